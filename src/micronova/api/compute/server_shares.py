"""Shares of servers (since 2.97): file systems of a shared file system service that guests mount.

Compute uses no such service, and no driver has the devices for it (virtio-fs). So no server has a share: lists are
empty, none is found by its id, and attaching one answers 501.
"""

from functools import partial
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from micronova.api.compute.server_inputs import Id
from micronova.api.compute.server_lookup import authorized_server
from micronova.api.inputs import Body, NoQuery
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects import states
from micronova.objects.errors import Conflict, NotFound, NotSupported
from micronova.objects.instance import InstanceRow


class NewShare(Body):
    """The share to attach, and the name by which the guest mounts it."""

    share_id: Id
    tag: (
        Annotated[
            str, Meta(min_length=1, max_length=255, pattern=r"^[a-zA-Z0-9-]*\Z", title="letters, digits and hyphens")
        ]
        | UnsetType
    ) = UNSET


class Create(Body):
    """The body of an attach."""

    share: NewShare


class ServerShares:
    """The handlers."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """List no shares of a server."""
        await authorized_server(self._database, request, id)
        return {"shares": []}

    async def show(self, request: Request, id: str, share_id: str) -> None:
        """Raise NotFound."""
        await authorized_server(self._database, request, id)
        raise _not_found(share_id)

    async def create(self, request: Request, id: str) -> None:
        """Raise NotSupported."""
        _check_state(await authorized_server(self._database, request, id), "create share", states.STOPPED)
        raise NotSupported("This cloud has no shared file system service: shares cannot be attached.")

    async def delete(self, request: Request, id: str, share_id: str) -> None:
        """Raise NotFound."""
        row = await authorized_server(self._database, request, id)
        _check_state(row, "delete share", states.STOPPED, states.ERROR)
        raise _not_found(share_id)


def _check_state(row: InstanceRow, verb: str, *allowed: str) -> None:
    if row["vm_state"] not in allowed:
        raise Conflict(f"Cannot '{verb}' instance {row['uuid']} while it is in vm_state {row['vm_state']}")


def _not_found(share_id: str) -> NotFound:
    return NotFound(f"Share {share_id[:64]} could not be found.")


def routes(database: Database) -> list[Route]:
    """Declare the routes."""
    handlers = ServerShares(database)
    path, rule = "/servers/{id}/shares", "os_compute_api:os-server-shares"
    one = f"{path}/{{share_id}}"
    route = partial(Route, versions=since(97), checks_policy=True)
    read = partial(route, method="GET", query=NoQuery, strict_query=since(97))
    return [
        read(path=path, handler=handlers.index, policy=f"{rule}:index", answer={"shares": [{"*": Any}]}),
        read(path=one, handler=handlers.show, policy=f"{rule}:show"),
        route(
            method="POST",
            path=path,
            handler=handlers.create,
            policy=f"{rule}:create",
            body=Create,
            status=201,
            errors=(501,),
        ),
        route(method="DELETE", path=one, handler=handlers.delete, policy=f"{rule}:delete"),
    ]
