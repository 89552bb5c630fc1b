"""Which network agents are alive: those that have sent a heartbeat lately (`Core.agent_times` says since when)."""

from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from micronova.embedded.network.tables import agents


class AgentTimes(NamedTuple):
    """What silence of agents means, in microseconds."""

    now: int
    alive_since: int  # agents that sent a heartbeat since then are alive
    grace: int  # for which a host keeps the routers after it was first found silent


def is_alive(since: int | sa.BindParameter[int]) -> sa.ColumnElement[bool]:
    """Return the condition on rows of `agents` that are alive; `since` is `AgentTimes.alive_since`."""
    return agents.c.heartbeat_at >= since


def hosts_with_agents(conn: sa.Connection, hosts: Sequence[str]) -> set[str]:
    """Return those of the hosts that have a network agent, alive or not.

    A silent agent may be back in a moment, and nobody else wires the ports of its host.
    """
    return set(conn.execute(_HOSTS_WITH_AGENTS, {"hosts": hosts}).scalars())


_HOSTS_WITH_AGENTS = sa.select(agents.c.host).where(agents.c.host.in_(sa.bindparam("hosts", expanding=True)))
