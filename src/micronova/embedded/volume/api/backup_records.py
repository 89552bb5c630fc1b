"""The records of backups, by which a backup is found again after its row is gone.

A record is JSON in base64. It names the file that has the data, and all that the row has. An import makes a new row and
a hard link to the file, so that backups that were imported twice can be deleted one by one.
"""

import base64
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta, field

from micronova.embedded.volume import states
from micronova.embedded.volume.api.backups import brief
from micronova.embedded.volume.api.request_bodies import Body, Items, Text, Uuid, uuid
from micronova.embedded.volume.backend.keys import KeyNotReadable
from micronova.embedded.volume.core import Core, retry_or_conflict
from micronova.embedded.volume.encryption import key_of
from micronova.embedded.volume.model import CREATING, MAX_SIZE, Backup
from micronova.embedded.volume.operations.backup_work import ImportBackup
from micronova.embedded.volume.store import backup_queries, quotas
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Invalid

SERVICE = "cinder.backup.drivers.micronova"
"""The name of what keeps the data, which clients give back with a record. It begins as those of Cinder do."""


class BackupRecord(msgspec.Struct, kw_only=True):
    """The content of a record."""

    id: Uuid
    file: Uuid  # the id that the backup had when its file was written
    volume_id: Uuid
    snapshot_id: Uuid | None
    name: Text | None
    description: Text | None
    size: Annotated[int, Meta(ge=1, le=MAX_SIZE)]
    bootable: bool
    image_metadata: Items
    volume_metadata: Items
    metadata: Items
    data_timestamp: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    volume_type_id: Uuid | None = None
    encryption_key_id: Uuid | None = None
    sealed_key: bytes | None = None  # only a cloud with the same secret key can open it


class RecordFields(Body):
    """A record as clients keep it."""

    backup_service: Annotated[str, Meta(min_length=1, max_length=255)]
    backup_url: Annotated[str, Meta(min_length=1)]


class RecordBody(Body):
    """The body of an import."""

    record: RecordFields = field(name="backup-record")


class BackupRecordHandlers:
    """The handlers of records."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(
                method="GET",
                path="/backups/{backup_id}/export_record",
                handler=self.export_record,
                policy="backup:export-import",
                checks_policy=True,
            ),
            Route(
                method="POST",
                path="/backups/import_record",
                handler=self.import_record,
                policy="backup:backup-import",
                body=RecordBody,
                status=201,
            ),
        ]

    async def export_record(self, request: Request, backup_id: str) -> dict[str, Any]:
        """Return the record of a backup."""
        backup = await self._core.load_backup(request, backup_id)
        states.check_backup(backup, "export")
        fields = {name: getattr(backup, name) for name in BackupRecord.__struct_fields__ if name != "file"}
        url = base64.b64encode(msgspec.json.encode(BackupRecord(**fields, file=backup.id))).decode()
        return {"backup-record": {"backup_service": SERVICE, "backup_url": url}}

    async def import_record(self, request: Request) -> dict[str, Any]:
        """Create a backup of the caller's project from a record."""
        given: RecordFields = request.body.record
        if given.backup_service != SERVICE:
            raise Invalid(f"Invalid input for field/attribute backup_service: backups are kept by {SERVICE} here.")
        try:
            record = msgspec.json.decode(base64.b64decode(given.backup_url, validate=True), type=BackupRecord)
        except (ValueError, msgspec.DecodeError) as error:
            raise Invalid(
                f"Invalid input for field/attribute backup_url: it is not the record of a backup ({error})."
            ) from None
        now = self._core.now()
        fields = {name: getattr(record, name) for name in BackupRecord.__struct_fields__ if name not in ("id", "file")}
        backup = Backup(
            id=uuid(record.id),
            project_id=request.context.project_id,
            user_id=request.context.user_id,
            status=CREATING,
            host=self._core.host,
            fail_reason=None,
            created_at=now,
            updated_at=None,
            revision=1,
            **fields,
        )
        self._check_key(backup)
        operation_id = self._core.new_id()

        async def try_once() -> None:
            if await self._core.database.read(backup_queries.get, backup.id) is not None:
                raise Invalid(f"Invalid backup: Backup {backup.id} exists already.")
            await self._core.record_operation(
                self._record, backup, uuid(record.file), operation_id, request.context.request_id
            )

        await retry_or_conflict(f"backup {backup.id}", try_once)
        return {"backup": brief(request, backup)}

    def _check_key(self, backup: Backup) -> None:
        """Raise Invalid if a backup is encrypted with a key that this cloud cannot open."""
        key = key_of(backup)
        if (key is None) != (backup.encryption_key_id is None) or (key is not None and self._core.keys is None):
            raise Invalid(f"Invalid backup: Backup {backup.id} is encrypted, and the record has no key for it.")
        if key is not None and self._core.keys is not None:
            try:
                self._core.keys.open(key)
            except KeyNotReadable as error:
                raise Invalid(f"Invalid backup: Backup {backup.id} is encrypted: {error.message}") from None

    def _record(self, conn: sa.Connection, backup: Backup, file: str, operation_id: str, request_id: str) -> None:
        new = ImportBackup.record(
            conn,
            self._core,
            id=operation_id,
            resource_id=backup.id,
            source_id=file,
            project_id=backup.project_id,
            request_id=request_id,
        )
        if new:
            backup_queries.insert(conn, backup)
            quotas.charge(conn, backup.project_id, quotas.backup(backup.size), self._core.settings.quotas)
