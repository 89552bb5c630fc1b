"""Actions that change the row of a volume: flags, image metadata, status, type."""

from typing import Annotated, Any, Literal

import sqlalchemy as sa
from msgspec import Meta

from micronova.embedded.common.revisions import Changed
from micronova.embedded.volume import states
from micronova.embedded.volume.api.action_routes import action_route, change_row
from micronova.embedded.volume.api.request_bodies import MOST_ITEMS, Body, Flag, Items, Text, truth
from micronova.embedded.volume.api.volumes import VolumeHandlers
from micronova.embedded.volume.backend.capabilities import satisfy
from micronova.embedded.volume.core import Core, retry_or_conflict
from micronova.embedded.volume.encryption import check_same_encryption, same_encryption
from micronova.embedded.volume.export_manager import ExportManager
from micronova.embedded.volume.model import ResourceColumns, Volume, VolumeType
from micronova.embedded.volume.store import attachment_queries, quotas, type_queries, volume_queries
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Invalid, NotFound, TooLarge


class Bootable(Body):
    """The arguments of os-set_bootable."""

    bootable: Flag


class Readonly(Body):
    """The arguments of os-update_readonly_flag."""

    readonly: Flag


class ResetStatus(Body):
    """The arguments of os-reset_status."""

    status: Text | None = None
    attach_status: Literal["attached", "detached"] | None = None
    migration_status: Literal["none", "error", "success", "completing", "migrating", "starting"] | None = None


class Retype(Body):
    """The arguments of os-retype."""

    new_type: Text
    migration_policy: Literal["on-demand", "never"] | None = None


class ImageMetadata(Body):
    """The arguments of os-set_image_metadata."""

    metadata: Items


class ImageMetadataKey(Body):
    """The arguments of os-unset_image_metadata."""

    key: Annotated[str, Meta(min_length=1, max_length=255)]


class RowActions:
    """The handlers of these actions."""

    def __init__(self, core: Core, volumes: VolumeHandlers, export_manager: ExportManager) -> None:
        self._core = core
        self._volumes = volumes
        self._export_manager = export_manager

    def routes(self) -> list[Route]:
        """Return the routes."""
        admin, image = "volume_extension:volume_admin_actions:", "volume_extension:volume_image_metadata:"
        act = action_route
        return [
            act("os-set_bootable", self.set_bootable, "volume:update", Bootable, 200),
            act("os-update_readonly_flag", self.set_readonly, "volume:update_readonly_flag", Readonly),
            act("os-reset_status", self.reset_status, f"{admin}reset_status", ResetStatus),
            act("os-force_delete", self.force_delete, f"{admin}force_delete"),
            act("os-retype", self.retype, "volume:retype", Retype),
            act("os-set_image_metadata", self.set_image_metadata, f"{image}set", ImageMetadata, 200),
            act("os-show_image_metadata", self.show_image_metadata, f"{image}show", status=200),
            act("os-unset_image_metadata", self.unset_image_metadata, f"{image}remove", ImageMetadataKey, 200),
        ]

    async def set_bootable(self, request: Request, volume_id: str) -> None:
        """Set whether a server can boot from the volume."""
        await change_row(self._core, request, volume_id, lambda _: {"bootable": truth(request.body.arguments.bootable)})

    async def set_readonly(self, request: Request, volume_id: str) -> None:
        """Set whether the volume may be written to."""

        def change(volume: Volume) -> ResourceColumns:
            states.check_volume(volume, "set_readonly")
            return {"readonly": truth(request.body.arguments.readonly)}

        await change_row(self._core, request, volume_id, change)

    async def set_image_metadata(self, request: Request, volume_id: str) -> dict[str, Any]:
        """Add items to what the volume keeps of its image."""
        given = request.body.arguments.metadata

        def change(volume: Volume) -> ResourceColumns:
            following = {**volume.image_metadata, **given}
            if len(following) > max(MOST_ITEMS, len(volume.image_metadata)):
                raise TooLarge(f"The image metadata of a volume may have at most {MOST_ITEMS} items.")
            return {"image_metadata": following}

        volume = await change_row(self._core, request, volume_id, change)
        return {"metadata": {**volume.image_metadata, **given}}

    async def show_image_metadata(self, request: Request, volume_id: str) -> dict[str, Any]:
        """Show what the volume keeps of its image."""
        volume = await self._core.load_volume(request, volume_id)
        return {"metadata": volume.image_metadata}

    async def unset_image_metadata(self, request: Request, volume_id: str) -> None:
        """Remove an item of what the volume keeps of its image."""
        key = request.body.arguments.key

        def change(volume: Volume) -> ResourceColumns:
            if key not in volume.image_metadata:
                raise NotFound(f"Volume {volume_id} has no image metadata with key {key[:64]}.")
            return {"image_metadata": {name: value for name, value in volume.image_metadata.items() if name != key}}

        await change_row(self._core, request, volume_id, change)

    async def reset_status(self, request: Request, volume_id: str) -> None:
        """Set the status, whatever it is, and delete the attachments if the request asks for that."""
        asked: ResetStatus = request.body.arguments
        if not (asked.status or asked.attach_status or asked.migration_status):
            raise Invalid("Must specify 'status', 'attach_status' or 'migration_status' for update.")
        status = asked.status.lower() if asked.status else None
        if status is not None and status not in states.VOLUME_STATUSES:
            raise Invalid(f"Must specify a valid status: {', '.join(states.VOLUME_STATUSES)}.")
        if asked.attach_status == "attached":
            raise Invalid("A volume is attached by an attachment: attach_status can only be set to detached.")
        if asked.migration_status not in (None, "none"):
            raise Invalid("Volumes are not migrated here: migration_status can only be set to none.")

        async def try_once() -> None:
            volume = await self._core.load_volume(request, volume_id)
            now = self._core.now()
            if asked.attach_status == "detached":
                ids = [each.id for each in volume.attachments]
                await self._core.database.write(attachment_queries.remove_by_action, volume, ids, now, status)
            else:
                values: ResourceColumns = {"status": status or volume.status}
                await self._core.database.write(volume_queries.update, volume, values, now)

        await retry_or_conflict(f"volume {volume_id}", try_once)
        if asked.attach_status == "detached":
            await self._export_manager.stop_serving_unused(volume_id)

    async def force_delete(self, request: Request, volume_id: str) -> None:
        """Delete a volume in any status."""
        await self._volumes.begin_delete(request, volume_id, cascade=False, force=True)

    async def retype(self, request: Request, volume_id: str) -> None:
        """Give a volume another type, which has the same back end."""
        named = request.body.arguments.new_type

        async def try_once() -> None:
            volume = await self._core.load_volume(request, volume_id)
            context = request.context
            found = await self._core.database.read(type_queries.usable, named, context.project_id, context.is_admin)
            if found is None:
                raise Invalid(f"Volume type {named[:64]} could not be found.")
            if found.id == volume.volume_type_id:
                raise Invalid(f"New volume_type same as original: volume {volume_id} has the type {found.name}.")
            states.check_volume(volume, "retype")
            if not satisfy(found.extra_specs):
                raise Invalid(
                    f"No storage service takes volumes of the type {found.name}: its extra specs ask for more."
                )
            await check_same_encryption(self._core, found, volume.volume_type_id, "volume")
            if found.multiattach and not volume.multiattach:
                request.authorize(volume.target, "volume:multiattach")
            await self._core.database.write(self._set_type, volume, found)

        await retry_or_conflict(f"volume {volume_id}", try_once)

    def _set_type(self, conn: sa.Connection, volume: Volume, new: VolumeType) -> None:
        values: ResourceColumns = {"volume_type_id": new.id, "multiattach": new.multiattach}
        volume_queries.update(conn, volume, values, self._core.now())
        if not same_encryption(*(type_queries.encryption_of(conn, id) for id in (volume.volume_type_id, new.id))):
            raise Changed  # one of them has changed since the request compared them
        before, after = (quotas.of_volume_type(id, volume.size) for id in (volume.volume_type_id, new.id))
        quotas.move(conn, volume.project_id, after, before, self._core.settings.quotas)
