"""Volumes and their snapshots (until 2.35), which compute handed on to a block storage service.

Compute does not hand them on: lists are empty, nothing is found by its id, and what would make one answers 501 and
says where to ask. Nova without such a service in its catalog answers 500, which clients take for a failure that may
pass; they do not repeat a request that got 501.
"""

from functools import partial
from typing import Annotated, Any, Never

from msgspec import UNSET, Meta, UnsetType

from micronova.api import inputs
from micronova.api.inputs import Body, NoQuery, Slice
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import until
from micronova.objects.errors import NotFound, NotSupported

Size = Annotated[int, Meta(ge=1)] | Annotated[str, Meta(pattern=r"^[0-9]+\Z", max_length=20)]  # in GB


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


def no_block_storage(advice: str) -> Never:
    """Raise NotSupported: compute does not hand such requests on."""
    raise NotSupported(f"Compute makes no volumes: {advice}")


async def list_volumes(request: Request) -> dict[str, Any]:
    """List no volumes."""
    return {"volumes": []}


async def find_volume(request: Request, id: str) -> None:
    """Raise NotFound."""
    raise NotFound(f"Volume {id[:64]} could not be found.")


async def create_volume(request: Request) -> None:
    """Raise NotSupported."""
    inputs.whole(request.body.volume.size, "volume.size", 1)
    no_block_storage("create them at the block storage service.")


async def list_snapshots(request: Request) -> dict[str, Any]:
    """List no snapshots."""
    return {"snapshots": []}


async def find_snapshot(request: Request, id: str) -> None:
    """Raise NotFound."""
    raise NotFound(f"Snapshot {id[:64]} could not be found.")


async def create_snapshot(request: Request) -> None:
    """Raise NotSupported."""
    no_block_storage("create snapshots of volumes at the block storage service.")


def routes() -> list[Route]:
    """Declare the routes."""
    rule = "os_compute_api:os-volumes"
    route = partial(Route, versions=until(35))
    listed = partial(route, method="GET", query=Slice)
    none: dict[str, Any] = {"*": Any}
    return [
        listed(path="/os-volumes", handler=list_volumes, policy=f"{rule}:list", answer={"volumes": [none]}),
        listed(path="/os-volumes/detail", handler=list_volumes, policy=f"{rule}:detail", answer={"volumes": [none]}),
        route(method="GET", path="/os-volumes/{id}", handler=find_volume, policy=f"{rule}:show", query=NoQuery),
        route(
            method="POST",
            path="/os-volumes",
            handler=create_volume,
            policy=f"{rule}:create",
            body=CreateVolume,
            errors=(501,),
        ),
        route(method="DELETE", path="/os-volumes/{id}", handler=find_volume, policy=f"{rule}:delete", status=202),
        listed(
            path="/os-snapshots", handler=list_snapshots, policy=f"{rule}:snapshots:list", answer={"snapshots": [none]}
        ),
        listed(
            path="/os-snapshots/detail",
            handler=list_snapshots,
            policy=f"{rule}:snapshots:detail",
            answer={"snapshots": [none]},
        ),
        route(
            method="GET",
            path="/os-snapshots/{id}",
            handler=find_snapshot,
            policy=f"{rule}:snapshots:show",
            query=NoQuery,
        ),
        route(
            method="POST",
            path="/os-snapshots",
            handler=create_snapshot,
            policy=f"{rule}:snapshots:create",
            body=CreateSnapshot,
            errors=(501,),
        ),
        route(
            method="DELETE",
            path="/os-snapshots/{id}",
            handler=find_snapshot,
            policy=f"{rule}:snapshots:delete",
            status=202,
        ),
    ]
