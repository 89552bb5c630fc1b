"""The agent API, and which hosts have a live network agent."""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.embedded.network.collection import Deletable, Resource, Updatable
from micronova.embedded.network.core import Core
from micronova.embedded.network.errors import not_found
from micronova.embedded.network.listing import Attributes, Clause
from micronova.embedded.network.request_bodies import Body, Flag, Name, body_of_one, convert_text
from micronova.embedded.network.router_placement import place
from micronova.embedded.network.row_types import AgentRow
from micronova.embedded.network.tables import agents
from micronova.http.paging import iso
from micronova.http.request import Request


def alive_since(core: Core) -> int:
    """Return the time since which a live agent must have sent a heartbeat."""
    return core.agent_times().alive_since


def hosts_with_agents(conn: sa.Connection, hosts: Sequence[str], since: int) -> set[str]:
    """Return the hosts whose network agent has sent a heartbeat since a time."""
    return set(conn.execute(_HOSTS_WITH_AGENTS, {"hosts": hosts, "since": since}).scalars())


_HOSTS_WITH_AGENTS = sa.select(agents.c.host).where(
    agents.c.host.in_(sa.bindparam("hosts", expanding=True)), agents.c.heartbeat_at >= sa.bindparam("since")
)


class AgentUpdate(Body, kw_only=True):
    """The attributes of an agent that an admin may set."""

    admin_state_up: Flag | UnsetType = UNSET
    description: Name | UnsetType = UNSET


class Agents(Updatable[AgentRow], Deletable[AgentRow]):
    """The agent API, for admins."""

    singular = "agent"
    plural = "agents"
    slug = "agents"
    taggable = False
    attributes = Attributes(
        agents,
        {
            **{name: agents.c[name] for name in ("id", "agent_type", "binary", "host", "topic", "description")},
            **{name: agents.c[name] for name in ("availability_zone", "admin_state_up", "created_at")},
        },
        {"alive": lambda values: sa.true()},
    )
    update_body = body_of_one("agent", AgentUpdate)

    def scope(self, request: Request) -> Clause | None:
        """Agents belong to no project, so policy alone decides."""
        return None

    def resources(self, conn: sa.Connection, rows: Sequence[AgentRow]) -> list[Resource]:
        """Return agents with whether they are alive."""
        since = alive_since(self.core)
        return [Resource(_agent(row, row.heartbeat_at >= since), {}) for row in rows]

    async def try_update(self, request: Request, id: str) -> dict[str, Any]:
        """Update an agent."""
        resource = await self.find(request, id, "update_agent")
        [given] = self.given(request)
        convert_text(given, ("admin_state_up",))
        changed = await self.core.write_and_wake(self._change, resource.id, given)
        return {self.singular: self.view(request, changed)}

    def _change(self, conn: sa.Connection, id: str, given: dict[str, Any]) -> Resource:
        if given:
            conn.execute(agents.update().where(agents.c.id == id).values(**given))
            place(conn, self.core.agent_times())
        resource = self.load(conn, id)
        if resource is None:
            raise not_found("agent", id)
        return resource

    async def try_delete(self, request: Request, id: str) -> None:
        """Delete the row of an agent."""
        resource = await self.find(request, id, "delete_agent")
        await self.core.write_and_wake(self._forget, resource.id)

    def _forget(self, conn: sa.Connection, id: str) -> None:
        conn.execute(agents.delete().where(agents.c.id == id))
        place(conn, self.core.agent_times())


def _agent(row: AgentRow, alive: bool) -> dict[str, Any]:
    return {
        "id": row.id,
        "agent_type": row.agent_type,
        "binary": row.binary,
        "host": row.host,
        "topic": row.topic,
        "availability_zone": row.availability_zone,
        "alive": alive,
        "admin_state_up": row.admin_state_up,
        "description": row.description,
        "configurations": row.configurations,
        "created_at": iso(row.created_at),
        "started_at": iso(row.started_at),
        "heartbeat_timestamp": iso(row.heartbeat_at),
        "resources_synced": None,
    }
