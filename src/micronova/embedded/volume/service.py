"""The volume role: Cinder's v3 API over a database and a directory of its own."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from micronova.db.engine import Database
from micronova.db.schema import upgrade
from micronova.embedded.common.compute_events import EventSender
from micronova.embedded.volume.api import versions
from micronova.embedded.volume.api.attach_actions import AttachActions
from micronova.embedded.volume.api.attachments import AttachmentHandlers
from micronova.embedded.volume.api.backup_records import BackupRecordHandlers
from micronova.embedded.volume.api.backups import BackupHandlers
from micronova.embedded.volume.api.file_actions import FileActions
from micronova.embedded.volume.api.hosts import HostHandlers
from micronova.embedded.volume.api.messages import MessageHandlers
from micronova.embedded.volume.api.metadata import handlers as metadata_handlers
from micronova.embedded.volume.api.qos_specs import QosSpecsHandlers
from micronova.embedded.volume.api.quota_sets import QuotaHandlers
from micronova.embedded.volume.api.row_actions import RowActions
from micronova.embedded.volume.api.service_info import ServiceInfoHandlers
from micronova.embedded.volume.api.services import ServiceHandlers
from micronova.embedded.volume.api.snapshots import SnapshotHandlers
from micronova.embedded.volume.api.transfers import TransferHandlers
from micronova.embedded.volume.api.type_encryption import TypeEncryptionHandlers
from micronova.embedded.volume.api.types import TypeHandlers
from micronova.embedded.volume.api.versions import VERSIONS, root_routes
from micronova.embedded.volume.api.volume_encryption import VolumeEncryptionHandlers
from micronova.embedded.volume.api.volume_sources import Sources
from micronova.embedded.volume.api.volumes import VolumeHandlers
from micronova.embedded.volume.backend.exports import Exports
from micronova.embedded.volume.backend.files import Files
from micronova.embedded.volume.backend.keys import KeyBox
from micronova.embedded.volume.backend.luks import LuksTool
from micronova.embedded.volume.core import Core, VolumeServiceSettings
from micronova.embedded.volume.export_manager import ExportManager
from micronova.embedded.volume.images import Images
from micronova.embedded.volume.model import VolumeType
from micronova.embedded.volume.operations.backup_work import CreateBackup, DeleteBackup, ImportBackup, RestoreBackup
from micronova.embedded.volume.operations.base import OperationKind
from micronova.embedded.volume.operations.engine import Engine
from micronova.embedded.volume.operations.leftover_files import remove_leftovers
from micronova.embedded.volume.operations.snapshot_work import CreateSnapshot, DeleteSnapshot
from micronova.embedded.volume.operations.volume_events import LOST, OUTBOX
from micronova.embedded.volume.operations.volume_work import (
    CreateVolume,
    DeleteVolume,
    ExtendVolume,
    ReimageVolume,
    RevertVolume,
    UploadVolume,
)
from micronova.embedded.volume.store import service_queries, type_queries
from micronova.embedded.volume.tables import metadata
from micronova.http.client import ServiceClient
from micronova.http.faults import compute_fault
from micronova.http.mount import below_versions
from micronova.http.service import Authenticator, Observer, Policy, Route, Service
from micronova.objects.clock import Clock

MIGRATIONS = "micronova.embedded.volume.migrations"
PREFIX = "/v3"
TYPES = ("block-storage", "volumev3")
"""The types of the service in the catalog."""
KINDS: tuple[type[OperationKind], ...] = (
    *(CreateVolume, DeleteVolume, ExtendVolume, ReimageVolume, RevertVolume, UploadVolume),
    *(CreateSnapshot, DeleteSnapshot, CreateBackup, DeleteBackup, ImportBackup, RestoreBackup),
)


class VolumeService:
    """The embedded volume service. `app` is its ASGI application, `service` has its routes."""

    def __init__(
        self,
        database: Database,
        directory: Path,
        policy: Policy,
        authenticator: Authenticator,
        clock: Clock,
        images: Images | None = None,
        make_exports: Callable[[Files], Exports] | None = None,
        compute: ServiceClient | None = None,
        keys: KeyBox | None = None,
        luks: LuksTool | None = None,
        *,
        machine: str,
        schema: str | None = None,  # of PostgreSQL
        random_source: random.Random | None = None,
        settings: VolumeServiceSettings | None = None,
        public_url: str | None = None,
        mount: str = "/volume",
        observer: Observer | None = None,
    ) -> None:
        """`images` is the image service, if there is one; `make_exports` makes what serves volumes to hosts, without it
        none can be connected; `compute` receives events of volumes; `keys` seals the keys of encrypted volumes, whose
        files `luks` makes; `machine` is the one that has the directory.
        """
        self._database = database
        self._schema = schema
        self.core = Core(
            database,
            clock,
            random_source or random.Random(),  # ids need not be secret
            settings or VolumeServiceSettings(),
            machine,
            EventSender(database, clock, compute, OUTBOX, name="volume", lost=LOST),
            keys,
            luks,
        )
        self.files = Files(directory)
        exports = None if make_exports is None else make_exports(self.files)
        self.files.live_copies = None if exports is None else exports.live_copies
        self.export_manager = ExportManager(self.core, exports)
        self.engine = Engine(
            self.core, self.files, [kind(self.core, self.files, images, self.export_manager) for kind in KINDS]
        )
        found = routes(self.core, self.files, images, self.export_manager)
        service = partial(
            Service,
            policy=policy,
            authenticator=authenticator,
            fault_body=compute_fault,
            mount=mount,
            public_url=public_url,
            observer=observer,
        )
        self.service = service("volume", found, prefix=PREFIX, versions=VERSIONS, types=TYPES)
        self.documents = service("volume-versions", root_routes())
        self.app = below_versions(self.service.app, self.documents.app, found, version="v3")

    async def start(self) -> None:
        """Bring the schema up to date, and continue the operations that earlier processes have not finished."""
        await upgrade(self._database, metadata, MIGRATIONS, schema=self._schema)
        await self._database.write(type_queries.ensure, self._first_type())
        await self._database.write(service_queries.record_alive, self.core.host, self.core.now())
        await self.files.start()
        await remove_leftovers(self.core, self.files)
        await self.engine.start()
        await self.export_manager.start()
        await self.core.events.start()

    async def stop(self) -> None:
        """Interrupt the operations that run; the next start continues them."""
        await self.export_manager.stop()
        await self.engine.stop()
        await self.core.events.stop()
        await self.files.stop()

    def _first_type(self) -> VolumeType:
        return VolumeType(
            id=self.core.new_id(),
            name=self.core.settings.default_volume_type,
            description="The type of volumes for which no other is named.",
            is_public=True,
            extra_specs={},
            qos_specs_id=None,
            created_at=self.core.now(),
            updated_at=None,
            revision=1,
        )


def routes(core: Core, files: Files, images: Images | None, export_manager: ExportManager) -> list[Route]:
    """Return the routes of the service, relative to /v3."""
    snapshots = SnapshotHandlers(core)
    volumes = VolumeHandlers(core, Sources(core, images), snapshots)
    return [
        *versions.routes(),
        *volumes.routes(),
        *RowActions(core, volumes, export_manager).routes(),
        *AttachActions(core, export_manager).routes(),
        *FileActions(core, images).routes(),
        *snapshots.routes(),
        *BackupHandlers(core, volumes).routes(),
        *BackupRecordHandlers(core).routes(),
        *(route for each in metadata_handlers(core) for route in each.routes()),
        *AttachmentHandlers(core, export_manager).routes(),
        *VolumeEncryptionHandlers(core).routes(),
        *TypeHandlers(core).routes(),
        *TypeEncryptionHandlers(core).routes(),
        *QosSpecsHandlers(core).routes(),
        *QuotaHandlers(core).routes(),
        *ServiceHandlers(core).routes(),
        *ServiceInfoHandlers(core, files).routes(),
        *HostHandlers(core).routes(),
        *MessageHandlers(core).routes(),
        *TransferHandlers(core).routes(),
    ]
