"""Attachments: reserve a volume for a server, connect it to the server's host, complete, and delete."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import msgspec

from micronova.embedded.volume import states
from micronova.embedded.volume.api import listing
from micronova.embedded.volume.api.action_routes import action_route
from micronova.embedded.volume.api.request_bodies import Body, Uuid, uuid
from micronova.embedded.volume.core import Core, is_admin_or_service, retry_or_conflict
from micronova.embedded.volume.export_manager import ExportManager, as_attachment, check_mode
from micronova.embedded.volume.model import ATTACHED, ATTACHING, DOWNLOADING, IN_USE, RESERVED, Attachment, Volume
from micronova.embedded.volume.store import attachment_queries
from micronova.embedded.volume.tables import attachments
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.errors import Conflict, Invalid, MicronovaError

FILTERS = frozenset({"volume_id", "status", "instance_id", "attach_status"})
_COLUMNS = {
    "volume_id": attachments.c.volume_id,
    "status": attachments.c.attach_status,
    "attach_status": attachments.c.attach_status,
    "instance_id": attachments.c.instance_uuid,
    "project_id": attachments.c.project_id,
}


class NewAttachment(Body):
    """The attachment to create."""

    versions = {"mode": since(54)}

    volume_uuid: Uuid
    instance_uuid: Uuid | None = None
    connector: dict[str, Any] | None = None
    mode: Literal["rw", "ro"] | None = None


class NewAttachmentBody(Body):
    """The body of a create."""

    attachment: NewAttachment


class AttachmentChanges(Body):
    """What connects an attachment."""

    connector: dict[str, Any]


class AttachmentChangesBody(Body):
    """The body of an update."""

    attachment: AttachmentChanges


class AttachmentHandlers:
    """The handlers of attachments."""

    def __init__(self, core: Core, export_manager: ExportManager) -> None:
        self._core = core
        self._export_manager = export_manager

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_, one = "/attachments", "/attachments/{attachment_id}"
        route = partial(Route, checks_policy=True, versions=since(27))
        see, change, complete = "volume:get", "volume:attachment_update", "volume:attachment_complete"
        return [
            Route(method="GET", path=all_, handler=self.index, policy="volume:get_all", versions=since(27)),
            Route(
                method="GET", path=f"{all_}/detail", handler=self.detail, policy="volume:get_all", versions=since(27)
            ),
            route(
                method="POST",
                path=all_,
                handler=self.create,
                policy="volume:attachment_create",
                body=NewAttachmentBody,
            ),
            route(method="GET", path=one, handler=self.show, policy=see),
            route(method="PUT", path=one, handler=self.update, policy=change, body=AttachmentChangesBody),
            route(method="DELETE", path=one, handler=self.delete, policy="volume:attachment_delete"),
            action_route("os-complete", self.complete, complete, status=204, of="attachment", versions=since(44)),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List attachments."""
        return await self._list(request, "attachments", _brief)

    async def detail(self, request: Request) -> dict[str, Any]:
        """List attachments with all fields."""
        return await self._list(request, "attachments/detail", partial(_full, request))

    async def _list(self, request: Request, path: str, view: Callable[[Attachment], dict[str, Any]]) -> dict[str, Any]:
        page = listing.read_page(request.raw_query, attachment_queries.SORTABLE, self._core.settings.max_limit)
        # Compute looks for the attachments of a server, whatever its project is.
        own = listing.own_project(request, attachments.c.project_id, services=True)
        conditions = [*own]
        known = FILTERS | ({"project_id"} if request.context.is_admin else set())
        if request.minor >= 31:
            listing.refuse_unknown(request.raw_query, known)
        for name, values in request.raw_query.items():
            if name in known and (name != "project_id" or not own):
                conditions.append(_COLUMNS[name].in_(values))
        found = await self._core.database.read(attachment_queries.list_attachments, page, conditions)
        return listing.answer(request, "attachments", path, found, view)

    async def show(self, request: Request, attachment_id: str) -> dict[str, Any]:
        """Show an attachment."""
        return {"attachment": _full(request, await self._load(request, attachment_id))}

    async def create(self, request: Request) -> dict[str, Any]:
        """Reserve a volume, and connect it if the request says to which host."""
        asked: NewAttachment = request.body.attachment
        new_id = self._core.new_id()

        async def try_once() -> Attachment:
            volume = await self._core.load_volume(request, uuid(asked.volume_uuid))
            if (reserved := _reserved_before(volume, asked)) is not None:
                return reserved
            if not _follows_server(volume, asked.instance_uuid):
                states.check_volume(volume, "reserve_attachment")
            if volume.bootable and volume.multiattach and volume.status == IN_USE:
                request.authorize(volume.target, "volume:multiattach_bootable_volume")
            attachment = Attachment(
                id=new_id,
                volume_id=volume.id,
                project_id=volume.project_id,
                instance_uuid=None if asked.instance_uuid is None else uuid(asked.instance_uuid),
                attached_host=None,
                mountpoint=None,
                attach_status=RESERVED,
                attach_mode=None if asked.mode is None else check_mode(volume, asked.mode),
                connector=None,
                connection_info=None,
                attached_at=None,
                created_at=self._core.now(),
                updated_at=None,
            )
            await self._core.database.write(attachment_queries.add, volume, attachment, self._core.now())
            return attachment

        attachment = await retry_or_conflict(f"volume {asked.volume_uuid}", try_once)
        if asked.connector:
            try:
                attachment = await self._connect(request, attachment.id, asked.connector)
            except (MicronovaError, OSError):
                await self._remove(request, attachment.id)
                raise
        return {"attachment": _full(request, attachment)}

    async def update(self, request: Request, attachment_id: str) -> dict[str, Any]:
        """Connect a reserved volume to a host."""
        connector = request.body.attachment.connector
        if not connector:
            raise Invalid("Invalid input for field/attribute connector: it is empty.")
        await self._load(request, attachment_id)
        return {"attachment": _full(request, await self._connect(request, attachment_id, connector))}

    async def _connect(self, request: Request, attachment_id: str, connector: dict[str, Any]) -> Attachment:
        async def try_once() -> Attachment:
            attachment = await self._load(request, attachment_id, "volume:get")
            volume = await self._core.load_volume(request, attachment.volume_id, "volume:get")
            if volume.status == DOWNLOADING:  # its file is about to be replaced
                raise Invalid(
                    f"Invalid volume: Volume {volume.id} is {DOWNLOADING}; connect it when its image is written."
                )
            mode = check_mode(volume, attachment.attach_mode or connector.get("mode"))
            connection = await self._export_manager.describe(volume, connector, mode)
            mountpoint = connector.get("mountpoint")
            following = msgspec.structs.replace(
                attachment,
                attach_status=ATTACHED if attachment.attach_status == ATTACHED else ATTACHING,
                attach_mode=mode,
                attached_host=connector["host"][:255],
                mountpoint=mountpoint[:255] if isinstance(mountpoint, str) else attachment.mountpoint,
                connector=None,  # nothing needs it, and a user decides how large it is
                connection_info=as_attachment(connection, attachment.id),
            )
            await self._core.database.write(attachment_queries.change, volume, following, self._core.now())
            await self._export_manager.serve(volume)
            return following

        return await retry_or_conflict(f"attachment {attachment_id}", try_once)

    async def complete(self, request: Request, attachment_id: str) -> None:
        """Record that the server has the volume."""

        async def try_once() -> None:
            attachment = await self._load(request, attachment_id)
            volume = await self._core.load_volume(request, attachment.volume_id, "volume:get")
            now = self._core.now()
            following = msgspec.structs.replace(attachment, attach_status=ATTACHED, attached_at=now)
            await self._core.database.write(attachment_queries.change, volume, following, now)

        await retry_or_conflict(f"attachment {attachment_id}", try_once)

    async def delete(self, request: Request, attachment_id: str) -> dict[str, Any]:
        """Delete an attachment, and list the others of the volume."""
        await check_unused(request, [await self._load(request, attachment_id)])
        volume = await self._remove(request, attachment_id)
        return {"attachments": [_brief(each) for each in volume.attachments if each.id != attachment_id]}

    async def _remove(self, request: Request, attachment_id: str) -> Volume:
        async def try_once() -> Volume:
            attachment = await self._load(request, attachment_id, "volume:get")
            volume = await self._core.load_volume(request, attachment.volume_id, "volume:get")
            await self._core.database.write(attachment_queries.remove, volume, [attachment_id], self._core.now())
            return volume

        volume = await retry_or_conflict(f"attachment {attachment_id}", try_once)
        await self._export_manager.stop_serving_unused(volume.id)
        return volume

    async def _load(self, request: Request, attachment_id: str, rule: str | None = None) -> Attachment:
        return await self._core.load(
            request, attachment_queries.get, attachment_id, noun="Volume attachment", see="volume:get", rule=rule
        )


def _reserved_before(volume: Volume, asked: NewAttachment) -> Attachment | None:
    """Return the reservation that a server has already; None if there is none.

    A client that gets no answer repeats its request. It learns of one attachment and deletes only this one, so a second
    reservation for the same server would stay for ever.
    """
    if asked.instance_uuid is None or asked.connector:
        return None
    server = uuid(asked.instance_uuid)
    for each in volume.attachments:
        if (each.instance_uuid, each.attach_status) == (server, RESERVED) and not each.is_connected:
            return each if asked.mode in (None, each.attach_mode) else None
    return None


def _follows_server(volume: Volume, instance_uuid: str | None) -> bool:
    """Return whether all attachments of a volume are of this server, which moves to another host."""
    return (
        instance_uuid is not None
        and bool(volume.attachments)
        and volume.status in (*states.ATTACHABLE, *states.WORKING)
        and all(each.instance_uuid == uuid(instance_uuid) for each in volume.attachments)
    )


async def check_unused(request: Request, found: Iterable[Attachment]) -> None:
    """Raise Conflict if a user deletes attachments through which a server uses the volume.

    Compute takes the volume from the guest before it deletes an attachment. Otherwise the guest would still write to a
    volume that another server may have by then. Administrators may delete such attachments, to clean up after a server
    that is gone.
    """
    connected = [each for each in found if each.instance_uuid and each.is_connected]
    if not connected or is_admin_or_service(request):
        return
    if not await request.service.is_from_service(request):
        raise Conflict(f"Server {connected[0].instance_uuid} uses the volume: detach it there.")


def _brief(attachment: Attachment) -> dict[str, Any]:
    return {
        "id": attachment.id,
        "status": attachment.attach_status,
        "instance": attachment.instance_uuid,
        "volume_id": attachment.volume_id,
    }


def _full(request: Request, attachment: Attachment) -> dict[str, Any]:
    return {
        **_brief(attachment),
        "attached_at": iso_micros(attachment.attached_at) or "",
        "detached_at": "",
        "attach_mode": attachment.attach_mode,
        "connection_info": (attachment.connection_info or {}) if is_admin_or_service(request) else {},
    }
