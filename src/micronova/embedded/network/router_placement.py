"""Which host has the routers. A row names it, and it keeps them as long as its agent is alive.

A host whose agent is not alive keeps the routers for a grace time in which other agents are alive. So after an outage
of the network service, in which none was alive, agents have the time to report in any order, and the routers do not
move. They move at once if an admin disables or deletes the agent.
"""

from typing import Any, NamedTuple

import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.network.agent_liveness import AgentTimes, is_alive
from micronova.embedded.network.host_changes import note
from micronova.embedded.network.tables import AGENT_TYPE, agents, router_placement
from micronova.embedded.network.topics import host_topic

_NAME = "routers"  # of the only row


class _Placement(NamedTuple):
    host: str
    silent_since: int | None


def router_host(conn: sa.Connection) -> str | None:
    """Return the host that has the routers; None if no agent has reported yet."""
    return conn.execute(_HOST).scalar()


def is_due(conn: sa.Connection, times: AgentTimes) -> bool:
    """Return whether `place` would change something."""
    return _next(conn, conn.execute(_CURRENT, {"since": times.alive_since}).first(), times) is not None


def place(conn: sa.Connection, times: AgentTimes) -> None:
    """Place the routers on another host if theirs is gone or was silent for the grace time; note the hosts."""
    row = conn.execute(_CURRENT.with_for_update(of=router_placement), {"since": times.alive_since}).first()
    found = _next(conn, row, times)
    if found is None:
        return
    if row is None:
        if not insert_if_absent(conn, router_placement, {"name": _NAME, **found._asdict()}):
            return  # a concurrent transaction placed them
    else:
        conn.execute(router_placement.update().values(**found._asdict()))
    if row is None or row.host != found.host:
        note(conn, times.now, [host_topic(host) for host in (found.host, row.host if row is not None else "") if host])


def _next(conn: sa.Connection, row: Any, times: AgentTimes) -> _Placement | None:
    """Return what should be stored, None if it is stored already."""
    if row is not None and row.admin_state_up and row.is_alive:
        return None if row.silent_since is None else _Placement(row.host, None)
    first = conn.execute(_FIRST_ALIVE, {"since": times.alive_since}).scalar()
    if row is None or not row.admin_state_up:
        return None if first is None else _Placement(first, None)
    if first is None:  # no agent is alive: none can be told to take them
        return None if row.silent_since is None else _Placement(row.host, None)
    if row.silent_since is None:
        return _Placement(row.host, times.now)
    return _Placement(first, None) if times.now - row.silent_since >= times.grace else None


_HOST = sa.select(router_placement.c.host)
_CURRENT = sa.select(
    router_placement.c.host,
    router_placement.c.silent_since,
    agents.c.admin_state_up,
    is_alive(sa.bindparam("since")).label("is_alive"),
).outerjoin(agents, sa.and_(agents.c.host == router_placement.c.host, agents.c.agent_type == AGENT_TYPE))
_FIRST_ALIVE = (
    sa.select(agents.c.host)
    .where(is_alive(sa.bindparam("since")), agents.c.admin_state_up, agents.c.agent_type == AGENT_TYPE)
    .order_by(agents.c.host)
    .limit(1)
)
