"""Volumes and their snapshots (until 2.35), as the volume service shows them to the user."""

from functools import partial
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from micronova.api import inputs
from micronova.api.compute.server_inputs import given
from micronova.api.inputs import Body, NoQuery, Slice
from micronova.api.links import Links
from micronova.api.view import Field, View
from micronova.clients.volume.as_user import VolumesAsUser
from micronova.clients.volume.client import VolumeClient
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.versions import until
from micronova.objects.errors import NotFound, NotSupported

VOLUMES, SNAPSHOTS = "volumes", "snapshots"
Size = (
    Annotated[int, Meta(ge=1)] | Annotated[str, Meta(title="a whole number", pattern=r"^[0-9]+\Z", max_length=20)]
)  # in GB


class NewVolume(Body):
    """The volume to create."""

    size: Size
    volume_type: str | UnsetType = UNSET
    metadata: dict[str, Any] | UnsetType = UNSET
    snapshot_id: str | UnsetType = UNSET
    availability_zone: str | UnsetType = UNSET
    display_name: str | UnsetType = UNSET
    display_description: str | UnsetType = UNSET


class CreateVolume(Body):
    """The body of a create."""

    volume: NewVolume


class NewSnapshot(Body):
    """The snapshot to create."""

    volume_id: str
    force: inputs.Flag | UnsetType = UNSET
    display_name: str | UnsetType = UNSET
    display_description: str | UnsetType = UNSET


class CreateSnapshot(Body):
    """The body of a create."""

    snapshot: NewSnapshot


def _attachments(volume: dict[str, Any], _: Any) -> list[dict[str, str]]:
    """Return one of a volume's attachments, or an empty object: Nova shows one, also of a volume with several."""
    for each in volume.get("attachments") or ():
        device = {"device": each["device"]} if each.get("device") else {}
        return [{"id": volume["id"], "volumeId": volume["id"], "serverId": each["server_id"], **device}]
    return [{}]


_VOLUME = View(
    Field("id", "id", type=str),
    Field("status", "status", type=str),
    Field("size", "size", type=int),
    Field("availabilityZone", lambda volume, _: volume.get("availability_zone"), type=str | None),
    Field("createdAt", "created_at", type=str),
    Field("attachments", _attachments, type=[{"id?": str, "volumeId?": str, "serverId?": str, "device?": str}]),
    Field("displayName", lambda volume, _: volume.get("name"), type=str | None),
    Field("displayDescription", lambda volume, _: volume.get("description"), type=str | None),
    Field("volumeType", lambda volume, _: volume.get("volume_type"), type=str | None),
    Field("snapshotId", lambda volume, _: volume.get("snapshot_id"), type=str | None),
    Field("metadata", lambda volume, _: volume.get("metadata") or {}, type=dict[str, str]),
    keyed=True,
)
_SNAPSHOT = View(
    Field("id", "id", type=str),
    Field("volumeId", "volume_id", type=str),
    Field("status", "status", type=str),
    Field("size", "size", type=int),
    Field("createdAt", "created_at", type=str),
    Field("displayName", lambda snapshot, _: snapshot.get("name"), type=str | None),
    Field("displayDescription", lambda snapshot, _: snapshot.get("description"), type=str | None),
    keyed=True,
)


class Proxies:
    """The handlers."""

    def __init__(self, client: VolumeClient | None, max_limit: int) -> None:
        self._client = client
        self._max_limit = max_limit

    async def list_volumes(self, request: Request) -> dict[str, Any]:
        """List the volumes of the caller's project."""
        return await self._list(request, VOLUMES, _VOLUME)

    async def list_snapshots(self, request: Request) -> dict[str, Any]:
        """List the snapshots of the caller's project."""
        return await self._list(request, SNAPSHOTS, _SNAPSHOT)

    async def show_volume(self, request: Request, id: str) -> dict[str, Any]:
        """Show a volume."""
        return {"volume": _VOLUME.at(request.minor)(await self._found(request, VOLUMES, id))}

    async def show_snapshot(self, request: Request, id: str) -> dict[str, Any]:
        """Show a snapshot."""
        return {"snapshot": _SNAPSHOT.at(request.minor)(await self._found(request, SNAPSHOTS, id))}

    async def create_volume(self, request: Request) -> Response:
        """Create a volume."""
        asked: NewVolume = request.body.volume
        values = {
            "size": inputs.whole(asked.size, "volume.size", 1),
            "name": given(asked.display_name),
            "description": given(asked.display_description),
            "volume_type": given(asked.volume_type),
            "snapshot_id": given(asked.snapshot_id),
            "availability_zone": given(asked.availability_zone),
            "metadata": given(asked.metadata),
        }
        wanted = {name: value for name, value in values.items() if value is not None}
        made = await self._service(request).create(VOLUMES, wanted)
        location = f"{Links(request).base}/os-volumes/{made['id']}"
        return Response(body={"volume": _VOLUME.at(request.minor)(made)}, headers={"location": location})

    async def create_snapshot(self, request: Request) -> dict[str, Any]:
        """Create a snapshot of a volume; with `force` even if a server has it."""
        asked: NewSnapshot = request.body.snapshot
        values = {
            "volume_id": asked.volume_id,
            "force": asked.force is not UNSET and inputs.flag(asked.force),
            "name": given(asked.display_name),
            "description": given(asked.display_description),
        }
        made = await self._service(request).create(SNAPSHOTS, values)
        return {"snapshot": _SNAPSHOT.at(request.minor)(made)}

    async def delete_volume(self, request: Request, id: str) -> None:
        """Delete a volume."""
        await self._delete(request, VOLUMES, id)

    async def delete_snapshot(self, request: Request, id: str) -> None:
        """Delete a snapshot."""
        await self._delete(request, SNAPSHOTS, id)

    def _service(self, request: Request) -> VolumesAsUser:
        if self._client is None:
            raise NotSupported("There is no volume service.")
        return self._client.as_user(request.context.token)

    async def _list(self, request: Request, collection: str, view: View) -> dict[str, Any]:
        page: Slice = request.query
        limit, shape = min(page.limit or self._max_limit, self._max_limit), view.at(request.minor)
        found = await self._service(request).list_(collection, offset=page.offset, limit=limit)
        return {collection: [shape(each) for each in found]}

    async def _found(self, request: Request, collection: str, id: str) -> dict[str, Any]:
        try:
            return await self._service(request).show(collection, id)
        except NotFound:
            raise _not_found(collection, id) from None

    async def _delete(self, request: Request, collection: str, id: str) -> None:
        try:
            await self._service(request).delete(collection, id)
        except NotFound:
            raise _not_found(collection, id) from None


def _not_found(collection: str, id: str) -> NotFound:
    return NotFound(f"{collection.removesuffix('s').capitalize()} {id[:64]} could not be found.")


def routes(client: VolumeClient | None, max_limit: int) -> list[Route]:
    """Declare the routes; the volume service decides about each volume and snapshot."""
    handlers = Proxies(client, max_limit)
    found: list[Route] = []
    route = partial(Route, versions=until(35), errors=(501,))
    for noun, rule, view, body, list_, show, create, delete in (
        (
            "volume", "os_compute_api:os-volumes", _VOLUME, CreateVolume,
            handlers.list_volumes, handlers.show_volume, handlers.create_volume, handlers.delete_volume,
        ),
        (
            "snapshot", "os_compute_api:os-volumes:snapshots", _SNAPSHOT, CreateSnapshot,
            handlers.list_snapshots, handlers.show_snapshot, handlers.create_snapshot, handlers.delete_snapshot,
        ),
    ):  # fmt: skip
        path = f"/os-{noun}s"
        one = f"{path}/{{id}}"
        # Both lists have all fields.
        listed = partial(route, method="GET", handler=list_, query=Slice, answer={f"{noun}s": [view]})
        found += [
            listed(path=path, policy=f"{rule}:list"),
            listed(path=f"{path}/detail", policy=f"{rule}:detail"),
            route(method="GET", path=one, handler=show, policy=f"{rule}:show", query=NoQuery, answer={noun: view}),
            route(
                method="POST",
                path=path,
                handler=create,
                policy=f"{rule}:create",
                body=body,
                answer={noun: view},
            ),
            route(method="DELETE", path=one, handler=delete, policy=f"{rule}:delete", status=202),
        ]
    return found
