"""The agents as admins see them: `/v2.0/agents`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.embedded.network.agent_liveness import is_alive
from micronova.embedded.network.collection import Deletable, Resource, Updatable
from micronova.embedded.network.core import Core
from micronova.embedded.network.errors import not_found
from micronova.embedded.network.listing import Attributes, Clause, flag
from micronova.embedded.network.request_bodies import Body, Flag, Name, body_of_one, convert_text
from micronova.embedded.network.router_placement import place
from micronova.embedded.network.row_types import ShownAgentRow
from micronova.embedded.network.tables import agents
from micronova.http.paging import iso
from micronova.http.request import Request


class AgentUpdate(Body, kw_only=True):
    """The attributes of an agent that an admin may set."""

    admin_state_up: Flag | UnsetType = UNSET
    description: Name | UnsetType = UNSET


class Agents(Updatable[ShownAgentRow], Deletable[ShownAgentRow]):
    """The agent API, for admins."""

    singular = "agent"
    plural = "agents"
    slug = "agents"
    attributes = Attributes(
        agents,
        {
            **{name: agents.c[name] for name in ("id", "agent_type", "binary", "host", "topic", "description")},
            **{name: agents.c[name] for name in ("availability_zone", "admin_state_up", "created_at")},
        },
    )
    update_body = body_of_one("agent", AgentUpdate)

    def __init__(self, core: Core) -> None:
        self.attributes = replace(self.attributes, special={"alive": self._alive_filter})
        super().__init__(core)

    def _alive_filter(self, values: Sequence[str]) -> Clause:
        """Return the condition of the filter `alive`; of several values Neutron reads the first."""
        return flag("alive", is_alive(self.core.agent_times().alive_since), values[:1])

    def select(self) -> sa.Select[Any]:
        """Select agents with whether they are alive."""
        # The statement is built once, and the time is read each time that it runs.
        since = sa.bindparam("since", callable_=lambda: self.core.agent_times().alive_since, type_=sa.BigInteger)
        return sa.select(agents, is_alive(since).label("is_alive"))

    def visible_rows(self, request: Request) -> Clause | None:
        """Agents belong to no project, so policy alone decides."""
        return None

    def resources(self, conn: sa.Connection, rows: Sequence[ShownAgentRow]) -> list[Resource]:
        """Return agents."""
        return [Resource(_agent(row), {}) for row in rows]

    async def update(self, request: Request, id: str) -> dict[str, Any]:
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

    async def delete(self, request: Request, id: str) -> None:
        """Delete the row of an agent."""
        resource = await self.find(request, id, "delete_agent")
        await self.core.write_and_wake(self._delete, resource.id)

    def _delete(self, conn: sa.Connection, id: str) -> None:
        conn.execute(agents.delete().where(agents.c.id == id))
        place(conn, self.core.agent_times())


def _agent(row: ShownAgentRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "agent_type": row.agent_type,
        "binary": row.binary,
        "host": row.host,
        "topic": row.topic,
        "availability_zone": row.availability_zone,
        "alive": row.is_alive,
        "admin_state_up": row.admin_state_up,
        "description": row.description,
        "configurations": row.configurations,
        "created_at": iso(row.created_at),
        "started_at": iso(row.started_at),
        "heartbeat_timestamp": iso(row.heartbeat_at),
        "resources_synced": None,
    }
