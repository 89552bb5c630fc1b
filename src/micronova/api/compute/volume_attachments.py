"""The volumes of servers: those of their block devices that are volumes."""

from functools import partial
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.api import inputs
from micronova.api.compute.server_inputs import Id, Tag, given
from micronova.api.compute.server_lookup import authorized_server
from micronova.api.inputs import Body, NoQuery, Slice
from micronova.api.view import OMIT, Field, View
from micronova.db import instances
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since, until
from micronova.objects import states
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import Conflict, Invalid, NotFound
from micronova.servers.volumes import ServerVolumes, not_attached

RULE = "os_compute_api:os-volumes-attachments"

ATTACHMENT = View(
    Field("id", "volume_id", until(88), type=str),
    Field("volumeId", "volume_id", type=str),
    Field("serverId", lambda device, server: server, type=str),
    Field("device", lambda device, _: device.device_name or OMIT, optional=True, type=str),
    Field("tag", "tag", since(70), type=str | None),
    Field("delete_on_termination", "delete_on_termination", since(79), type=bool),
    Field("attachment_id", "attachment_id", since(89), type=str | None),
    Field("bdm_uuid", "uuid", since(89), type=str),
)

CREATED = View(
    Field("id", "volume_id", type=str),
    Field("volumeId", "volume_id", type=str),
    Field("serverId", lambda device, server: server, type=str),
    Field("device", "device_name", type=str | None),
    Field("tag", "tag", since(70), type=str | None),
    Field("delete_on_termination", "delete_on_termination", since(79), type=bool),
)

DeviceName = Annotated[
    str, Meta(max_length=255, pattern=r"^/dev/x?[a-z]?d?[a-z]+[0-9]*\Z", title="a device such as /dev/vdb")
]


class NewAttachment(Body, rename={"volume_id": "volumeId"}):
    """The volume to attach."""

    volume_id: Id
    device: DeviceName | None = None
    tag: Tag | UnsetType = UNSET
    delete_on_termination: inputs.Flag | UnsetType = UNSET

    versions = {"tag": since(49), "delete_on_termination": since(79)}


class Create(Body, rename={"volume_attachment": "volumeAttachment"}):
    """The body of an attach."""

    volume_attachment: NewAttachment


class Changes(Body, rename={"volume_id": "volumeId", "server_id": "serverId"}):
    """An attachment as it is shown, with what is to change in it; another volume takes the place of the old one."""

    volume_id: Id
    server_id: Id | UnsetType = UNSET
    id: Id | UnsetType = UNSET
    device: DeviceName | None | UnsetType = UNSET
    tag: Tag | UnsetType = UNSET
    delete_on_termination: inputs.Flag | UnsetType = UNSET

    versions = dict.fromkeys(("serverId", "id", "device", "tag", "delete_on_termination"), since(85))


class Update(Body, rename={"volume_attachment": "volumeAttachment"}):
    """The body of an update."""

    volume_attachment: Changes


class VolumeAttachments:
    """The handlers."""

    def __init__(self, database: Database, volumes: ServerVolumes, max_limit: int) -> None:
        self._database = database
        self._server_volumes = volumes
        self._max_limit = max_limit

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """List a server's volumes."""
        shape = ATTACHMENT.at(request.minor)
        page = request.query.cut(await self._volumes(request, id), self._max_limit)
        return {"volumeAttachments": [shape(device, id) for device in page]}

    async def show(self, request: Request, id: str, volume: str) -> dict[str, Any]:
        """Show one of a server's volumes."""
        for device in await self._volumes(request, id):
            if device.volume_id == volume:
                return {"volumeAttachment": ATTACHMENT.at(request.minor)(device, id)}
        raise not_attached(id, volume)

    async def create(self, request: Request, id: str) -> dict[str, Any]:
        """Attach a volume, and show its device when the guest has it."""
        return {"volumeAttachment": CREATED.at(request.minor)(await self._attach(request, id, waits=True), id)}

    async def begin(self, request: Request, id: str) -> None:
        """Accept a request to attach a volume; whether the guest gets it is in the server's actions."""
        await self._attach(request, id, waits=False)

    async def _attach(self, request: Request, id: str, *, waits: bool) -> BlockDevice:
        wanted: NewAttachment = request.body.volume_attachment
        row = await authorized_server(self._database, request, id)
        if request.minor < 20 and row["vm_state"] in (states.SHELVED, states.SHELVED_OFFLOADED):
            raise Conflict(f"Cannot 'attach_volume' instance {id} while it is in vm_state {row['vm_state']}")
        device = BlockDevice(
            uuid="",
            volume_id=wanted.volume_id,
            device_name=wanted.device,
            tag=given(wanted.tag),
            delete_on_termination=wanted.delete_on_termination is not UNSET
            and inputs.flag(wanted.delete_on_termination),
        )
        may_be_shared = request.minor >= 60
        return await self._server_volumes.attach(request.context, row, device, may_be_shared=may_be_shared, waits=waits)

    async def swap(self, request: Request, id: str, volume: str) -> None:
        """Copy a volume to another one, which takes its place."""
        row = await authorized_server(self._database, request, id)
        await self._server_volumes.swap(request.context, row, volume, request.body.volume_attachment.volume_id)

    async def update(self, request: Request, id: str, volume: str) -> None:
        """Change what happens to a volume when its server is deleted; another volume is a swap, after that."""
        wanted: Changes = request.body.volume_attachment
        swaps = wanted.volume_id != volume
        row = await authorized_server(self._database, request, id, rule=f"{RULE}:swap" if swaps else None)
        await self._database.write(_change, row["uuid"], volume, wanted)
        if swaps:
            await self._server_volumes.swap(request.context, row, volume, wanted.volume_id)

    async def delete(self, request: Request, id: str, volume: str) -> None:
        """Detach a volume."""
        row = await authorized_server(self._database, request, id)
        if request.minor < 20 and row["vm_state"] in (states.SHELVED, states.SHELVED_OFFLOADED):
            raise Conflict(f"Cannot 'detach_volume' instance {id} while it is in vm_state {row['vm_state']}")
        await self._server_volumes.detach(request.context, row, volume)

    async def _volumes(self, request: Request, id: str) -> list[BlockDevice]:
        """Return the devices of a server that are volumes; since 2.89 those whose attachment is known."""
        row = await authorized_server(self._database, request, id)
        devices = await self._database.read(instances.volumes_of, row["uuid"])
        return [each for each in devices if each.volume_id and (request.minor < 89 or each.attachment_id)]


def _attached(conn: sa.Connection, id: str, volume: str) -> list[BlockDevice]:
    """Return a server's devices with this volume."""
    return [device for device in instances.volumes_of(conn, id) if device.volume_id == volume]


def _change(conn: sa.Connection, id: str, volume: str, wanted: Changes) -> None:
    """Change `delete_on_termination`; raise Invalid if anything else would change."""
    instances.lock_existing(conn, id)
    found = _attached(conn, id, volume)
    if not found:
        raise NotFound(f"No volume Block Device Mapping with id {volume[:64]}.")
    device = found[0]
    fixed = {"id": volume, "server_id": id, "device": device.device_name, "tag": device.tag}
    for name, value in fixed.items():
        if getattr(wanted, name) not in (UNSET, value):
            shown = "serverId" if name == "server_id" else name
            raise Invalid(f"The {shown} property is not mutable")
    if given(wanted.delete_on_termination) is not None:
        kept = inputs.flag(wanted.delete_on_termination)
        instances.change_device(conn, msgspec.structs.replace(device, delete_on_termination=kept))


def routes(database: Database, volumes: ServerVolumes, max_limit: int) -> list[Route]:
    """Declare the routes."""
    handlers = VolumeAttachments(database, volumes, max_limit)
    path = "/servers/{id}/os-volume_attachments"
    one = f"{path}/{{volume}}"
    route = partial(Route, checks_policy=True)
    return [
        route(
            method="GET",
            path=path,
            handler=handlers.index,
            policy=f"{RULE}:index",
            query=Slice,
            strict_query=since(75),
            answer={"volumeAttachments": [ATTACHMENT]},
        ),
        route(
            method="GET",
            path=one,
            handler=handlers.show,
            policy=f"{RULE}:show",
            query=NoQuery,
            answer={"volumeAttachment": ATTACHMENT},
        ),
        route(
            method="POST",
            path=path,
            handler=handlers.create,
            policy=f"{RULE}:create",
            body=Create,
            answer={"volumeAttachment": CREATED},
            errors=(500, 501),
            versions=until(100),
        ),
        route(
            method="POST",
            path=path,
            handler=handlers.begin,
            policy=f"{RULE}:create",
            body=Create,
            status=202,
            errors=(501,),
            versions=since(101),
        ),
        route(
            method="PUT",
            path=one,
            handler=handlers.swap,
            policy=f"{RULE}:swap",
            body=Update,
            status=202,
            errors=(501,),
            versions=until(84),
        ),
        route(
            method="PUT",
            path=one,
            handler=handlers.update,
            policy=f"{RULE}:update",
            body=Update,
            status=202,
            errors=(501,),
            versions=since(85),
        ),
        route(
            method="DELETE",
            path=one,
            handler=handlers.delete,
            policy=f"{RULE}:delete",
            status=202,
            errors=(501,),
        ),
    ]
