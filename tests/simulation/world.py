"""A cloud in a simulation: one process with all its roles, which crashes and comes back, and the users who talk to it.

What outlives a crash is what would in reality: the database, and the guests of the hypervisors. A message that was on
its way is lost with the process.
"""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.cli.inspect import run_audit
from micronova.cli.state import StateDirectory
from micronova.cli.wiring import COMPUTE_ROLES, Process
from micronova.compute.manager import ComputeManager
from micronova.conf.settings import load
from micronova.db.engine import Database
from micronova.db.tables import allocations, departures, instances, inventories, operations
from micronova.http.client import Answer, ASGITransport
from micronova.neighbours.network.tables import ports
from micronova.rpc.bus import Bus
from tests.simulation.database import InlineDatabase
from tests.simulation.faults import Fate, FaultyBus, FaultyDatabase, Life, mortal
from tests.simulation.loop import VirtualClock

IMAGE = "11111111-1111-4111-8111-111111111111"
PATIENCE = 900.0  # of virtual seconds: what has not happened by then is stuck
HOSTS = 3
HOST_MEMORY = 512 + 4 * 4096  # what a host keeps for itself, and four servers of the medium flavor
DRIVER = (
    "spawn", "destroy", "power_on", "power_off", "reboot", "pause", "unpause", "suspend", "resume",
    "attach_interface", "detach_interface",
)  # fmt: skip


class _Process(Process):
    """A process on the simulation's databases."""

    given: dict[str, Database]

    async def open_database(self, name: str) -> Database:
        return self.given[name]


class World:
    """The cloud and what surrounds it."""

    def __init__(
        self, directory: Path, clock: VirtualClock, random: Random, fate: Fate, *, networks: bool = False
    ) -> None:
        """`networks`: the cloud has a network service, in the same process."""
        self.clock = clock
        self.fate = fate
        self._roles = [*COMPUTE_ROLES, "network"] if networks else COMPUTE_ROLES
        self.databases = {name: InlineDatabase() for name in ("compute", *(["network"] if networks else []))}
        self.lives = 0
        self._directory = directory
        self._random = random
        self._life = Life()
        self._up = asyncio.Event()
        self._own: set[asyncio.Task[Any]] = set()  # tasks of the world itself, which no crash ends
        self._process: _Process | None = None
        self._transport: ASGITransport | None = None

    # --- lives -----------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Start the cloud, and whoever starts it again each time it has crashed."""
        self._adopt(asyncio.current_task())
        self._adopt(asyncio.create_task(self._supervise()))
        await self._up.wait()
        await self.until(self._all_up, "all hosts to be up")

    def spawn(self, story: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Let somebody do something meanwhile; no crash of the cloud is a user's."""
        return self._adopt(asyncio.create_task(story))

    async def end(self) -> None:
        """Stop the cloud in order."""
        assert self._process is not None
        await self._process.stop()
        for database in self.databases.values():
            database.dispose()

    def _adopt(self, task: Any) -> Any:
        self._own.add(task)
        return task

    async def _supervise(self) -> None:
        while True:
            self._life = Life()
            self.lives += 1
            starting = asyncio.create_task(self._start(self._life))
            if await self._first(starting) and not starting.exception():
                self._up.set()
                if await self._first(asyncio.create_task(self._life.told_to_stop.wait())):
                    self._up.clear()
                    assert self._process is not None
                    await self._first(asyncio.create_task(self._process.stop()))
            # It was stopped, has crashed, or could not start: whoever looks after processes starts it again.
            self._life.ended.set()
            self._up.clear()
            await self._bury()
            await self.clock.sleep(1.0)

    async def _first(self, task: "asyncio.Task[Any]") -> bool:
        """Wait until something is done, or the process is dead; say whether it was done."""
        ended = self._adopt(asyncio.create_task(self._life.ended.wait()))
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        return task.done() and not task.cancelled()

    async def _start(self, life: Life) -> None:
        def wrap(bus: Bus) -> Bus:
            return FaultyBus(bus, life, self.fate, self.clock)

        process = _Process(
            load(
                environ={},
                default={"host": "controller", "transport_url": f"local://life-{self.lives}"},
                api={"auth_strategy": "noauth2"},
                quota={"instances": -1, "cores": -1, "ram": -1},
                fake={
                    "hosts": HOSTS,
                    "memory_mb": HOST_MEMORY,
                    "rules": [{"operation": "*", "kind": "delay", "delay": (0.0, 2.0)}],
                },
            ),
            self._roles,
            StateDirectory(self._directory),
            clock=self.clock,
            random=self._random,
            wrap_bus=wrap,
        )
        process.given = {name: FaultyDatabase(each, life, self.fate) for name, each in self.databases.items()}
        self._process = process
        await process.start()
        for driver in self._drivers():
            for name in DRIVER:
                setattr(driver, name, mortal(getattr(driver, name), life, self.fate))
        self._transport = ASGITransport(process.application(), "cloud:8774")

    def _drivers(self) -> list[Any]:
        assert self._process is not None
        [manager] = [role for role in self._process.started if isinstance(role, ComputeManager)] or [None]
        return [] if manager is None else [agent.host.driver for agent in manager._agents.values()]

    async def _bury(self) -> None:
        """Let nothing of a dead process go on: neither its guests' file nor the database hears of it any more."""
        for driver in self._drivers():
            driver._store._path = None
        for _ in range(1000):
            left = asyncio.all_tasks() - self._own
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.sleep(0)
        raise AssertionError(f"these do not die: {left}")

    # --- users -----------------------------------------------------------------------------------------------

    async def request(
        self, method: str, path: str, body: Any = None, *, service: str = "/compute/v2.1"
    ) -> Answer | None:
        """Send a request; None if the connection broke, and nobody knows what became of it."""
        await self._up.wait()
        assert self._transport is not None
        headers = {"x-auth-token": "user:project", "openstack-api-version": "compute 2.100"}
        data = None if body is None else msgspec.json.encode(body)
        if data is not None:
            headers["content-type"] = "application/json"
        asked = asyncio.ensure_future(self._transport.request(method, f"{service}{path}", headers, data))
        await asyncio.wait({asked})  # it is one of the process' tasks: a crash ends it
        return None if asked.cancelled() else asked.result()

    async def insist(self, method: str, path: str, body: Any, *wanted: int) -> int:
        """Send a request again until it is answered in one of these ways."""
        async with self._patience(f"{method} {path} to be answered"):
            while True:
                answer = await self.request(method, path, body)
                if answer is not None and answer.status in wanted:
                    return answer.status
                assert answer is None or answer.status in (409, 503), f"{answer.status} {answer.body!r}"
                await self.clock.sleep(1.0)

    async def create(self, name: str, count: int = 1, flavor: str = "1", networks: Any = "none") -> list[str]:
        """Ask for servers, once: an answer that did not come is looked for, as a careful user would."""
        server = {"name": name, "imageRef": IMAGE, "flavorRef": flavor, "networks": networks, "max_count": count}
        async with self._patience(f"{name} to be accepted"):
            while True:
                answer = await self.request("POST", "/servers", {"server": {**server, "min_count": count}})
                found = self.servers(name)
                if found:
                    assert len(found) == count
                    return found
                assert answer is None or answer.status == 503, f"{answer.status} {answer.body!r}"
                await self.clock.sleep(1.0)

    async def becomes(self, id: str, *states: str) -> str:
        """Wait until a server is in one of these states and nothing is done to it."""
        row: Any = None

        def look() -> bool:
            nonlocal row
            row = self.row(id)
            return row is None or (row["task_state"] is None and row["vm_state"] in (*states, "error"))

        await self.until(look, f"{id} to be {states}")
        state = "gone" if row is None else str(row["vm_state"])
        assert state in states, f"{id} is {state}: {row and row['fault']}"
        return state

    async def gone(self, id: str) -> None:
        """Wait until a server is no more."""
        await self.until(lambda: self.row(id) is None, f"{id} to be gone")

    # --- looking, without being noticed ----------------------------------------------------------------------

    def rows(self, query: sa.Select[Any], database: str = "compute") -> list[Any]:
        """Read a database."""
        return self.databases[database].look(lambda conn: list(conn.execute(query).mappings()))

    def row(self, id: str) -> Any:
        """A server, if there is one."""
        found = self.rows(sa.select(instances).where(instances.c.uuid == id))
        return found[0] if found else None

    def servers(self, name: str) -> list[str]:
        """The servers with a name, or one that was made of it."""
        query = sa.select(instances.c.uuid).where(instances.c.display_name.startswith(name))
        return sorted(row["uuid"] for row in self.rows(query))

    def ports(self) -> dict[str, str]:
        """The ports that servers have, with their servers; none without a network service."""
        found = self.rows(sa.select(ports), "network") if "network" in self.databases else []
        return {row["id"]: row["device_id"] for row in found if row["device_owner"].startswith("compute:")}

    def open(self) -> list[Any]:
        """What is not finished."""
        return self.rows(sa.select(operations).where(operations.c.finished_at.is_(None)))

    async def until(self, true: Callable[[], bool], what: str) -> None:
        """Wait until something is so."""
        async with self._patience(what):
            while not true():
                await self.clock.sleep(0.5)

    @contextlib.asynccontextmanager
    async def _patience(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(PATIENCE):
                yield
        except TimeoutError:
            held = [(row["kind"], row["step"], row["owner"], row["attempts"]) for row in self.open()]
            raise AssertionError(f"waited {PATIENCE:.0f} s for {what}; open: {held}") from None

    def _all_up(self) -> bool:
        return len(self.rows(sa.select(inventories.c.node_uuid).distinct())) == HOSTS

    # --- the invariants --------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Nothing goes wrong any more. Then nothing is stuck, nothing is leaked, nothing is oversold."""
        self.fate.armed = False
        await self._up.wait()
        await self.until(lambda: not self.open(), "all operations to end")
        await self.until(lambda: not self.rows(sa.select(departures)), "the hosts to have cleaned up")
        assert self._process is not None
        assert await run_audit(self._process) == []
        expected = {row["uuid"]: row["host"] for row in self.rows(sa.select(instances)) if row["host"] is not None}
        guests = {guest.uuid: driver.host for driver in self._drivers() for guest in await driver.list_guests()}
        assert guests == expected
        assert set(self.ports().values()) <= {row["uuid"] for row in self.rows(sa.select(instances))}
        for row in self.rows(sa.select(inventories)):
            held = [
                each["used"]
                for each in self.rows(sa.select(allocations))
                if (each["node_uuid"], each["resource_class"]) == (row["node_uuid"], row["resource_class"])
            ]
            assert sum(held) == row["used"] <= row["capacity"]


def fresh(template: Path, directory: Path) -> Path:
    """A directory for one world; the cloud's keys, which take long to make, are the template's."""
    directory.mkdir(parents=True)
    shutil.copy(template / "keys.json", directory / "keys.json")
    return directory
