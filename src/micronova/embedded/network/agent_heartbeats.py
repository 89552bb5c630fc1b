"""Heartbeats of network agents: those that arrive within `WINDOW` share one transaction.

Its number of statements does not depend on the number of agents, unless they start or report other configurations than
before. The first heartbeat after a pause does not wait.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.db.listed import one_of
from micronova.db.upsert import insert_if_absent
from micronova.embedded.network.core import Core
from micronova.embedded.network.router_placement import place
from micronova.embedded.network.tables import AGENT_BINARY, AGENT_TYPE, agents
from micronova.objects.background import end_tasks
from micronova.objects.errors import Unavailable

WINDOW = 0.2  # seconds between two transactions
MOST_AT_ONCE = 500  # heartbeats in one transaction
COUNT_INTERVAL = 60.0  # seconds between two counts of the agents


class AgentHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat of an agent."""

    host: str
    started: bool  # the agent has just started
    configurations: dict[str, Any]


_Waiting = tuple[AgentHeartbeat, asyncio.Future[None]]


class AgentHeartbeats:
    """Records heartbeats."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting: dict[str, _Waiting] = {}  # by host
        self._worker: asyncio.Task[None] | None = None
        self._recorded_at = float("-inf")  # by the clock of the event loop
        self._counted_at = float("-inf")  # by the monotonic clock

    async def record(self, heartbeat: AgentHeartbeat) -> None:
        """Record a heartbeat; raise Unavailable if the database does not answer."""
        older, recorded = self._waiting.get(heartbeat.host, (heartbeat, asyncio.get_running_loop().create_future()))
        merged = msgspec.structs.replace(heartbeat, started=heartbeat.started or older.started)
        self._waiting[heartbeat.host] = merged, recorded
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="agent-heartbeats")
        await asyncio.shield(recorded)

    async def stop(self) -> None:
        """Stop; agents whose heartbeats wait send them again."""
        await end_tasks(self._worker)

    async def _work(self) -> None:
        taken: list[_Waiting] = []
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                await asyncio.sleep(self._recorded_at + WINDOW - loop.time())
                self._recorded_at = loop.time()
                taken = [self._waiting.pop(host) for host in list(self._waiting)[:MOST_AT_ONCE]]
                await self._record(taken)
        finally:
            self._worker = None
            _end([*taken, *self._waiting.values()], Unavailable("The network service stops."))
            self._waiting.clear()

    async def _record(self, taken: Sequence[_Waiting]) -> None:
        try:
            await self._write([heartbeat for heartbeat, _ in taken])
        except Exception as error:
            if len(taken) == 1 or isinstance(error, Unavailable):
                _end(taken, error)
                return
            for each in taken:  # one of them is wrong
                await self._record([each])
        else:
            _end(taken)

    async def _write(self, heartbeats: list[AgentHeartbeat]) -> None:
        now = self._core.clock.monotonic()
        counting = now >= self._counted_at + COUNT_INTERVAL
        write = (
            self._core.write_and_wake
            if any(heartbeat.started for heartbeat in heartbeats)
            else self._core.database.write
        )
        count = await write(record_heartbeats, self._core, heartbeats, counting)
        if count is not None:
            self._counted_at = now
            self._core.set_heartbeat_interval(count)


def _end(taken: Sequence[_Waiting], error: Exception | None = None) -> None:
    for _, recorded in taken:
        if recorded.done():
            continue
        if error is None:
            recorded.set_result(None)
        else:
            recorded.set_exception(error)
            recorded.exception()  # marks it as retrieved: the agent may have given up


def record_heartbeats(
    conn: sa.Connection, core: Core, heartbeats: Sequence[AgentHeartbeat], counting: bool = False
) -> int | None:
    """Record heartbeats of different hosts; return the number of agents if it is asked for."""
    now = core.now()
    known = {row.host: row for row in conn.execute(_KNOWN, {"hosts": [heartbeat.host for heartbeat in heartbeats]})}
    plain: list[str] = []
    for heartbeat in heartbeats:
        row = known.get(heartbeat.host)
        if row is not None and not heartbeat.started and row.configurations == heartbeat.configurations:
            plain.append(row.id)
    if plain:
        conn.execute(_HEARTBEAT, {"ids": plain, "now": now})
    for heartbeat in sorted(heartbeats, key=lambda each: known[each.host].id if each.host in known else ""):
        row = known.get(heartbeat.host)
        if row is None:
            insert_if_absent(conn, agents, _new_agent(core, heartbeat, now))
        elif row.id not in plain:
            values: dict[str, Any] = {"heartbeat_at": now, "configurations": heartbeat.configurations}
            if heartbeat.started:
                values["started_at"] = now
            conn.execute(agents.update().where(agents.c.id == row.id).values(**values))
    if any(heartbeat.started for heartbeat in heartbeats):
        place(conn, core.agent_times())
    return conn.execute(_COUNT).scalar_one() if counting else None


_KNOWN = (
    sa.select(agents.c.id, agents.c.host, agents.c.configurations)
    .where(one_of(agents.c.host, "hosts"), agents.c.agent_type == AGENT_TYPE)
    .order_by(agents.c.id)
    .with_for_update()
)
_HEARTBEAT = agents.update().where(one_of(agents.c.id, "ids")).values(heartbeat_at=sa.bindparam("now"))
_COUNT = sa.select(sa.func.count()).select_from(agents)


def _new_agent(core: Core, heartbeat: AgentHeartbeat, now: int) -> dict[str, Any]:
    return {
        "id": core.new_id(),
        "agent_type": AGENT_TYPE,
        "binary": AGENT_BINARY,
        "host": heartbeat.host,
        "topic": "N/A",
        "availability_zone": core.settings.availability_zone,
        "description": "",
        "admin_state_up": True,
        "configurations": heartbeat.configurations,
        "created_at": now,
        "started_at": now,
        "heartbeat_at": now,
    }
