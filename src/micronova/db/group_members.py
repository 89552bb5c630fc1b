"""The members of server groups by host: how many there are, and which hosts a group's policy closes to further ones."""

from collections import Counter
from collections.abc import Collection, Mapping

import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db.tables import server_group_hosts, server_groups
from micronova.objects.scheduling import GroupSpec

_LOCK = sa.select(server_groups.c.uuid).where(server_groups.c.uuid == bindparam("uuid")).with_for_update()
_MEMBERS = (
    sa.select(server_group_hosts.c.host, server_group_hosts.c.members)
    .select_from(server_groups)
    .outerjoin(
        server_group_hosts,
        sa.and_(server_group_hosts.c.group_uuid == server_groups.c.uuid, server_group_hosts.c.members > 0),
    )
    .where(server_groups.c.uuid == bindparam("uuid"))
)
_JOIN = sa.text(
    "INSERT INTO server_group_hosts (group_uuid, host, members) VALUES (:group_uuid, :host, :members) "
    "ON CONFLICT (group_uuid, host) DO UPDATE SET members = server_group_hosts.members + excluded.members"
)
# The last ones to leave a host take its row along, and rows without members that older conductors have left.
_LEAVE_ALL = sa.text(
    "DELETE FROM server_group_hosts WHERE group_uuid = :group_uuid "
    "AND (members = 0 OR host = :host AND members <= :members) RETURNING host"
)
_LEAVE = sa.text(
    "UPDATE server_group_hosts SET members = members - :members WHERE group_uuid = :group_uuid AND host = :host"
)


def lock(conn: sa.Connection, uuids: Collection[str]) -> set[str]:
    """Lock server groups, in the order of their uuids; return those that exist."""
    return {uuid for uuid in sorted(uuids) if conn.execute(_LOCK, {"uuid": uuid}).first() is not None}


def by_host(conn: sa.Connection, group_uuid: str) -> dict[str, int] | None:
    """Return where the members of a server group are, host -> members; None if there is no such group."""
    found = conn.execute(_MEMBERS, {"uuid": group_uuid}).all()
    return {row.host: row.members for row in found if row.host is not None} if found else None


def count(conn: sa.Connection, group_uuid: str, changes: Mapping[str, int]) -> None:
    """Count members in (more than 0) and out (less than 0) by host; the caller has locked the group."""
    joining = []
    for host, change in sorted(changes.items()):
        row = {"group_uuid": group_uuid, "host": host, "members": abs(change)}
        if change > 0:
            joining.append(row)
        elif change < 0 and host not in conn.execute(_LEAVE_ALL, row).scalars().all():
            conn.execute(_LEAVE, row)
    if joining:
        conn.execute(_JOIN, joining)


def refused_hosts(
    conn: sa.Connection, changes: Mapping[str, Counter[str]], group_specs: Mapping[str, GroupSpec], left: Counter[str]
) -> set[str]:
    """Lock the server groups and return the hosts that their policies close to further members.

    `changes` are by group and host. `left` counts by host the members that this claim moves away: they still hold
    resources there, and do not count as members any more.
    """
    refused: set[str] = set()
    for uuid in sorted(changes):
        conn.execute(_LOCK, {"uuid": uuid})  # one change of a group at a time
        joined = {host for host, change in changes[uuid].items() if change > 0}
        group = group_specs.get(uuid)
        if group is None or not joined or group.policy not in ("affinity", "anti-affinity"):
            continue
        members = Counter(by_host(conn, uuid)) - left  # of a group that is gone: none
        if group.policy == "anti-affinity":
            refused |= {h for h in joined if members[h] + changes[uuid][h] > group.max_server_per_host}
            continue
        # Members that leave a host in this claim do not count: the others need not join them there.
        staying = {host for host, count in members.items() if count + min(0, changes[uuid][host]) > 0}
        if staying:
            refused |= joined - staying
        elif len(joined) > 1:
            refused |= joined
    return refused
