"""Finding the server that a request is about."""

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from micronova.db import instances
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.objects import states
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import Conflict, InstanceNotFound
from micronova.objects.instance import InstanceRow


async def authorized_server(
    database: Database,
    request: Request,
    id: str,
    *,
    deleted: bool = False,
    with_service: bool = False,
    rule: str | None = None,
) -> InstanceRow:
    """Return the server's row, after policy allowed `rule`, by default the route's, on it.

    Raise InstanceNotFound for a server of another project, so that nobody learns which ids exist. `deleted` finds
    deleted servers too. With `with_service` the row has the state of the compute service on the server's host, too.
    """
    project = _project(request)
    row = await database.read(instances.get_with_service if with_service else instances.get, id, project)
    if row is None and deleted:
        row = await database.read(instances.get_deleted, id)
        if row is not None and project is not None and row["project_id"] != project:
            row = None
    return _authorized(request, id, row, rule)


async def authorized_server_to_show(
    database: Database, request: Request, id: str, *, with_service: bool
) -> tuple[InstanceRow, tuple[BlockDevice, ...]]:
    """Return the server's row and its volumes, both in one read; else as `authorized_server`."""
    get = instances.get_with_service if with_service else instances.get
    row, volumes = await database.read(_with_volumes, get, id, _project(request))
    return _authorized(request, id, row, None), volumes


def _with_volumes(
    conn: sa.Connection,
    get: Callable[[sa.Connection, str, str | None], InstanceRow | None],
    id: str,
    project: str | None,
) -> tuple[InstanceRow | None, tuple[BlockDevice, ...]]:
    return get(conn, id, project), instances.volumes_of(conn, id)


def _project(request: Request) -> str | None:
    return None if request.context.is_admin else request.context.project_id


def _authorized(request: Request, id: str, row: InstanceRow | None, rule: str | None) -> InstanceRow:
    if row is None:
        raise InstanceNotFound(f"Instance {id[:64]} could not be found.")
    request.authorize(server_target(row), rule)
    return row


def server_target(row: InstanceRow) -> dict[str, Any]:
    """Return what policy rules about a server are asked with."""
    return {"project_id": row["project_id"], "user_id": row["user_id"]}


def lock_changeable(conn: sa.Connection, id: str, verb: str) -> InstanceRow:
    """Return a server's row, locked until the transaction ends; raise Conflict if its state does not allow `verb`."""
    row = instances.lock_existing(conn, id)
    check_changeable(row, verb)
    return row


def check_changeable(row: InstanceRow, verb: str) -> None:
    """Raise Conflict if a server's state does not allow `verb`: a change of its metadata or tags."""
    if row["vm_state"] not in states.CHANGEABLE:
        raise Conflict(f"Cannot '{verb}' instance {row['uuid']} while it is in vm_state {row['vm_state']}")
