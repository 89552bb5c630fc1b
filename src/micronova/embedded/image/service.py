"""The image role: Glance's v2 API over a database and a directory of its own."""

import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from micronova.db.engine import Database
from micronova.db.schema import upgrade
from micronova.embedded.common.revisions import Changed
from micronova.embedded.image import attributes, patch, queries
from micronova.embedded.image.core import Core
from micronova.embedded.image.data import Checker, ImageDataHandlers
from micronova.embedded.image.discovery import DiscoveryHandlers
from micronova.embedded.image.formats import check_format
from micronova.embedded.image.images import ImageHandlers
from micronova.embedded.image.members import MemberHandlers
from micronova.embedded.image.metadefs.items import ObjectHandlers, PropertyHandlers, TagHandlers
from micronova.embedded.image.metadefs.model import RESOURCE_TYPES
from micronova.embedded.image.metadefs.namespaces import NamespaceHandlers, ResourceTypeHandlers
from micronova.embedded.image.metadefs.queries import ensure_resource_types
from micronova.embedded.image.model import ACTIVE, QUEUED, SAVING, Image
from micronova.embedded.image.signatures import CertificateSource
from micronova.embedded.image.store import BLOCK, Store
from micronova.embedded.image.sweep import sweep
from micronova.embedded.image.tables import metadata
from micronova.embedded.image.tasks import TaskHandlers
from micronova.http.faults import image_fault
from micronova.http.service import Authenticator, Observer, Policy, Service
from micronova.http.tickets import Tickets
from micronova.objects.clock import Clock
from micronova.objects.errors import Conflict
from micronova.telemetry.threads import ThreadUse

MIGRATIONS = "micronova.embedded.image.migrations"
MAX_SIZE = 1 << 40  # bytes of an image
MAX_BODY = 1 << 20  # bytes of a JSON body; an image may have many properties
_NAMESPACE = uuid.UUID("3c0b7f1e-5a0c-4d5e-9f53-2f6d0c3b7a11")  # of the ids of images that `ensure_image` creates


class ImageService:
    """The embedded image service. `service.app` is its ASGI application."""

    def __init__(
        self,
        database: Database,
        directory: Path,
        policy: Policy,
        authenticator: Authenticator,
        clock: Clock,
        ticket_keys: Sequence[bytes],
        *,
        schema: str | None = None,  # of PostgreSQL
        public_url: str | None = None,
        observer: Observer | None = None,
        check: Checker = check_format,
        max_size: int = MAX_SIZE,
        max_property_bytes: int = attributes.MAX_PROPERTY_BYTES,
        project_images: int | None = None,
        project_bytes: int | None = None,
        project_uploads: int | None = None,
        idle_timeout: float = 60.0,
        threads: int = 4,
        random_source: random.Random | None = None,
        certificates: CertificateSource | None = None,
    ) -> None:
        self._database = database
        self._schema = schema
        self._core = Core(
            database, clock, random_source, tickets=Tickets(ticket_keys[0], ticket_keys[1:]) if ticket_keys else None
        )
        self._store = Store(directory, threads)
        self._data = ImageDataHandlers(
            self._core,
            self._store,
            check=check,
            max_size=max_size,
            project_bytes=project_bytes,
            project_uploads=project_uploads,
            idle_timeout=idle_timeout,
            certificates=certificates,
        )
        routes = [
            *DiscoveryHandlers(self._core, project_bytes, project_images).routes(),
            *ImageHandlers(
                self._core, self._store, max_property_bytes=max_property_bytes, project_images=project_images
            ).routes(),
            *self._data.routes(),
            *MemberHandlers(self._core).routes(),
            *TaskHandlers(self._core).routes(),
            *NamespaceHandlers(self._core).routes(),
            *ResourceTypeHandlers(self._core).routes(),
            *ObjectHandlers(self._core).routes(),
            *PropertyHandlers(self._core).routes(),
            *TagHandlers(self._core).routes(),
        ]
        self.service = Service(
            "image",
            routes,
            policy=policy,
            authenticator=authenticator,
            fault_body=image_fault,
            html_errors=True,
            mount="/image",
            public_url=public_url,
            max_body=MAX_BODY,
            media_types=tuple(patch.MEDIA_TYPES),
            observer=observer,
            ignores_slash=False,  # /v2/images/ is an image without an id, not the list
        )

    def thread_use(self) -> ThreadUse:
        """Return how the threads that work on image data are used."""
        return self._store.use()

    async def start(self) -> None:
        """Bring the schema up to date, and clean up after interrupted uploads and deletes."""
        await upgrade(self._database, metadata, MIGRATIONS, schema=self._schema)
        await self._database.write(ensure_resource_types, RESOURCE_TYPES, self._core.now())
        await self._store.start()
        await sweep(self._core, self._store)

    async def stop(self) -> None:
        """Finish the writes that run. The requests of unfinished uploads undo them."""
        await self._store.stop()

    async def ensure_image(
        self,
        name: str,
        content: bytes,
        *,
        owner: str | None = None,
        disk_format: str = "raw",
        container_format: str = "bare",
        visibility: str = "public",
        min_disk: int = 0,
        min_ram: int = 0,
        properties: Mapping[str, str] | None = None,
        tags: tuple[str, ...] = (),
        edition: str = "",
        instead_of: tuple[str, ...] = (),
    ) -> str:
        """Create an image with this content unless it exists or has been deleted; return its id.

        The id is made from owner, name and edition, so that a call after a crash or a restart finds the same image.
        The images of the editions `instead_of` are deleted.
        """
        for other in instead_of:
            await self._remove(_own_id(owner, name, other), owner or "")
        image_id = _own_id(owner, name, edition)
        image = await self._database.read(queries.get, image_id, owner or "")
        if image is None:
            now = self._core.now()
            image = Image(
                id=image_id,
                name=attributes.check("name", name),
                status=QUEUED,
                visibility=attributes.check("visibility", visibility),
                owner=owner or None,
                disk_format=attributes.check("disk_format", disk_format),
                container_format=attributes.check("container_format", container_format),
                min_disk=min_disk,
                min_ram=min_ram,
                protected=False,
                os_hidden=False,
                created_at=now,
                updated_at=now,
                properties=dict(properties or {}),
                tags=attributes.unique(list(tags)),
            )
            try:
                await self._database.write(queries.create, image)
            except Conflict:
                return image_id  # it has been deleted, or another process creates it now
        elif not await self._data.can_receive(image):
            return image_id  # it has its data, or another process uploads it now
        with contextlib.suppress(Conflict):  # another process has begun to upload it meanwhile
            await self._data.receive(image, _blocks(content), len(content), SAVING, ACTIVE)
        return image_id

    async def has_image(self, name: str, *, owner: str | None = None, edition: str = "") -> bool:
        """Return whether the image that `ensure_image` creates exists and has its data."""
        image = await self._database.read(queries.get, _own_id(owner, name, edition), owner or "")
        return image is not None and image.status == ACTIVE

    async def _remove(self, image_id: str, owner: str) -> None:
        image = await self._database.read(queries.get, image_id, owner)
        if image is None:
            return
        try:
            await self._database.write(queries.delete, image, self._core.now())
        except Changed:
            return  # another process deletes it too
        await self._store.remove(image_id)


def _own_id(owner: str | None, name: str, edition: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, f"{owner or ''}/{name}{f'/{edition}' if edition else ''}"))


async def _blocks(content: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(content), BLOCK):
        yield content[begin : begin + BLOCK]
