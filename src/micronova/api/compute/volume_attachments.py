"""The volumes of servers: those of their block devices that are volumes."""

from functools import partial
from typing import Any

import msgspec

from micronova.api.compute.server_lookup import authorized_server
from micronova.api.inputs import NoQuery, Slice
from micronova.api.view import OMIT, Field, View
from micronova.db import instances
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since, until
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import NotFound

ATTACHMENT = View(
    Field("id", "volume_id", until(88)),
    Field("volumeId", "volume_id"),
    Field("serverId", lambda device, server: server),
    Field("device", lambda device, _: device.device_name or OMIT, optional=True),
    Field("tag", "tag", since(70)),
    Field("delete_on_termination", "delete_on_termination", since(79)),
    Field("attachment_id", "attachment_id", since(89)),
    Field("bdm_uuid", "uuid", since(89)),
)


class VolumeAttachments:
    """The handlers."""

    def __init__(self, database: Database, max_limit: int) -> None:
        self._database = database
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
        raise NotFound(f"Instance {id} is not attached to volume {volume[:64]}")

    async def _volumes(self, request: Request, id: str) -> list[BlockDevice]:
        """Return the devices of a server that are volumes; since 2.89 those whose attachment is known."""
        row = await authorized_server(self._database, request, id)
        found = (await self._database.read(instances.devices, [row["uuid"]])).get(row["uuid"], [])
        devices = [msgspec.convert(device, BlockDevice) for device in found]
        return [each for each in devices if each.volume_id and (request.minor < 89 or each.attachment_id)]


def routes(database: Database, max_limit: int) -> list[Route]:
    """Declare the routes."""
    handlers = VolumeAttachments(database, max_limit)
    path, rule = "/servers/{id}/os-volume_attachments", "os_compute_api:os-volumes-attachments"
    route = partial(Route, method="GET", checks_policy=True)
    return [
        route(path=path, handler=handlers.index, policy=f"{rule}:index", query=Slice, strict_query=since(75)),
        route(path=f"{path}/{{volume}}", handler=handlers.show, policy=f"{rule}:show", query=NoQuery),
    ]
