"""Server groups: servers that are placed on the same host, or on different hosts. An instance's row names its group."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypedDict, cast

import sqlalchemy as sa

from micronova.db import instances as instance_rows
from micronova.db import quotas
from micronova.db.listed import one_of
from micronova.db.tables import instances, server_group_hosts, server_groups
from micronova.objects import states
from micronova.objects.errors import NotFound

_g, _h = server_groups.c, server_group_hosts.c


class ServerGroupRow(Protocol):
    """A row of `server_groups`, as a cursor returns it. Times are microseconds since 1970 (UTC)."""

    uuid: str
    project_id: str
    user_id: str
    name: str
    policy: str
    rules: dict[str, int]
    created_at: int


class NewServerGroup(TypedDict):
    """A new row of `server_groups`."""

    uuid: str
    project_id: str
    user_id: str
    name: str
    policy: str
    rules: dict[str, int]
    created_at: int


def insert(conn: sa.Connection, row: NewServerGroup, limits: Mapping[str, int]) -> ServerGroupRow:
    """Add a group and charge its project; raise QuotaExceeded."""
    quotas.charge(conn, row["project_id"], {"server_groups": 1}, limits, row["user_id"])
    conn.execute(sa.insert(server_groups).values(**row))
    return get(conn, row["uuid"])


def get(conn: sa.Connection, uuid: str) -> ServerGroupRow:
    """Return a group; raise NotFound."""
    found = conn.execute(sa.select(server_groups).where(_g.uuid == uuid)).first()
    if found is None:
        raise NotFound(f"Instance group {uuid} could not be found.")
    return cast(ServerGroupRow, found)


def get_with_members(conn: sa.Connection, uuid: str) -> tuple[ServerGroupRow, list[str]]:
    """Return a group and its servers, as `members` does; raise NotFound."""
    return get(conn, uuid), members(conn, [uuid])[uuid]


def list_(
    conn: sa.Connection, project_id: str | None, *, offset: int = 0, limit: int | None = None
) -> Sequence[ServerGroupRow]:
    """Return the groups of a project, or of all projects (None), oldest first."""
    query = sa.select(server_groups).order_by(_g.created_at, _g.uuid).offset(offset)
    if project_id is not None:
        query = query.where(_g.project_id == project_id)
    return cast(Sequence[ServerGroupRow], conn.execute(query if limit is None else query.limit(limit)).all())


def members(conn: sa.Connection, groups: Iterable[str]) -> dict[str, list[str]]:
    """Return the servers of each group, the oldest first, without those that are soft-deleted."""
    found: dict[str, list[str]] = {group: [] for group in groups}
    i = instances.c
    query = sa.select(i.server_group_id, i.uuid).where(
        one_of(i.server_group_id, "groups"), i.vm_state != states.SOFT_DELETED
    )
    for row in conn.execute(query.order_by(i.created_at, i.uuid), {"groups": list(found)}):
        found[row.server_group_id].append(row.uuid)
    return found


def delete(conn: sa.Connection, group: ServerGroupRow) -> None:
    """Delete a group and release its quota; its servers stay, in no group. Raise NotFound."""
    # Claims lock servers in the order of their ids, and then their group.
    mine = sa.select(instances.c.uuid, instances.c.hints).where(instances.c.server_group_id == group.uuid)
    hints = {row.uuid: row.hints for row in conn.execute(mine.order_by(instances.c.uuid).with_for_update())}
    if conn.execute(sa.delete(server_groups).where(_g.uuid == group.uuid)).rowcount != 1:
        raise NotFound(f"Instance group {group.uuid} could not be found.")
    instance_rows.leave_group(conn, hints)
    on_hosts = _h.group_uuid == group.uuid
    conn.execute(sa.select(_h.host).where(on_hosts).order_by(_h.group_uuid, _h.host).with_for_update()).all()
    conn.execute(sa.delete(server_group_hosts).where(on_hosts))
    quotas.release(conn, group.project_id, {"server_groups": 1}, group.user_id)
