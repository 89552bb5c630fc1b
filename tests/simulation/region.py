"""A simulated region: each role is a process of its own, some of them twice, with a clock of its own.

Processes crash or stand still one by one; the broker and the database are away for minutes. What a process that has
ended had begun never takes effect: its tasks wait for ever at their next message, transaction or call of a driver.
"""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from micronova.cli.names import COMPUTE_ROLES
from micronova.cli.state import StateDirectory
from micronova.conf.settings import load
from micronova.db.clock import DatabaseClock
from micronova.db.engine import Database
from micronova.http.client import Answer, ASGITransport
from micronova.rpc.bus import Bus, connect
from tests.simulation.faults import FaultPlan, FaultyBus, FaultyDatabase, Outages, ProcessRun, with_faults
from tests.simulation.loop import VirtualClock
from tests.simulation.simulated_cloud import (
    DRIVER,
    HOST_MEMORY,
    SimulatedCloud,
    SimulatedProcess,
    drivers_of,
    fresh,
    request_headers,
)

ROLES = {
    "api": "api",
    "conductor-1": "conductor",
    "conductor-2": "conductor",
    "scheduler-1": "scheduler",
    "scheduler-2": "scheduler",
    "compute-1": "compute",
    "compute-2": "compute",
}
HOSTS_PER_PROCESS = 2
SKEWS = (-30.0, 30.0)  # seconds by which the clocks of the processes are wrong, in turn


class ProcessClock:
    """The clock of one machine: it may be wrong, and who sleeps by it does not wake while the process stands still."""

    def __init__(self, clock: VirtualClock, process_run: ProcessRun, skew: float) -> None:
        self._clock, self._process_run, self._skew = clock, process_run, skew

    def now(self) -> float:
        return self._clock.now() + self._skew

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        await self._process_run.block_if_ended()


class _RoleProcess(SimulatedProcess):
    """A process with one role, which reaches the others over a bus in this event loop.

    As on PostgreSQL, a process with the database uses the clock of the database server, which is right.
    """

    local_bus: Bus
    right_clock: VirtualClock

    async def open_database(self, name: str) -> Database:
        database = await super().open_database(name)
        self.clock = self._database_clock = DatabaseClock(self.clock, database, lambda conn: self.right_clock.now())
        await self._database_clock.start()
        return database

    async def connect_bus(self) -> Bus:
        self.local_bus = connect("local://region", clock=self.clock, random=self.random, name=self.host, grace=0.0)
        await self.local_bus.start()
        assert self._wrap_bus is not None
        return self._wrap_bus(self.local_bus)


class Node:
    """One process of the region, and what starts it again when it has ended."""

    def __init__(self, region: "SimulatedRegion", name: str, directory: Path, skew: float) -> None:
        self.name = name
        self.up = asyncio.Event()
        self.run = ProcessRun()
        self.process: _RoleProcess | None = None
        self.transport: ASGITransport | None = None
        self._region = region
        self._directory = directory
        self._skew = skew

    async def supervise(self) -> None:
        """Start the process again, as a service manager does, whenever it has ended."""
        while True:
            self.run = ProcessRun()
            starting = asyncio.create_task(self._start(self.run))
            if await self._first(starting) and not starting.exception():
                self.up.set()
                stop = asyncio.create_task(self.run.stop_requested.wait())
                if await self._first(stop):
                    self.up.clear()
                    assert self.process is not None
                    await self._first(asyncio.create_task(self.process.stop()))
                stop.cancel()
            self.run.ended.set()
            self.up.clear()
            await self._leave_bus()
            await self._region.clock.sleep(1.0)

    async def _first(self, task: "asyncio.Task[Any]") -> bool:
        ended = asyncio.create_task(self.run.ended.wait())
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        return task.done() and not task.cancelled()

    async def _start(self, process_run: ProcessRun) -> None:
        region = self._region

        def wrap(bus: Bus) -> Bus:
            return FaultyBus(bus, process_run, region.fault_plan, region.clock, region.outages)

        process = _RoleProcess(
            load(
                environ={},
                default={"host": self.name, "transport_url": "local://region"},
                api={"auth_strategy": "noauth2"},
                quota={"instances": -1, "cores": -1, "ram": -1},
                fake={
                    "hosts": HOSTS_PER_PROCESS,
                    "host_pattern": f"{self.name}-{{}}",
                    "memory_mb": HOST_MEMORY,
                    "rules": [{"operation": "*", "kind": "delay", "delay": (0.0, 2.0)}],
                },
            ),
            [ROLES[self.name]],
            StateDirectory(self._directory),
            clock=ProcessClock(region.clock, process_run, self._skew),
            random=region.random,
            wrap_bus=wrap,
        )
        process.given = {
            name: FaultyDatabase(each, process_run, region.fault_plan, region.outages)
            for name, each in region.databases.items()
        }
        process.right_clock = region.clock
        self.process = process
        await process.start()
        for driver in drivers_of(process):
            for name in DRIVER:
                call = with_faults(getattr(driver, name), process_run, region.fault_plan)
                setattr(driver, name, region.watched(call))
        self.transport = ASGITransport(process.application(), "cloud:8774")

    async def _leave_bus(self) -> None:
        """Do what the kernel and the broker do for a process that has ended.

        Its connections and locks are gone, and messages that it had not handled go to another process.
        """
        process = self.process
        if process is None:
            return
        process.release_locks()
        for driver in drivers_of(process):
            driver._store._path = None
        servers = getattr(getattr(process, "local_bus", None), "_servers", ())
        for server in servers:
            server._stopping = True
            await server._detach()
        for _ in range(1000):
            left = [task for server in servers for task in server._running]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.sleep(0)
        raise AssertionError(f"these handlers of {self.name} do not end: {left}")


class SimulatedRegion(SimulatedCloud):
    """The processes of a region, their databases and their users."""

    patience = 7200.0
    hosts = HOSTS_PER_PROCESS * sum(role == "compute" for role in ROLES.values())

    def __init__(self, template: Path, directory: Path, clock: VirtualClock, random: Random, plan: FaultPlan) -> None:
        assert set(ROLES.values()) == set(COMPUTE_ROLES)
        super().__init__(directory, clock, random, plan)
        self.random = random
        self.outages = Outages()
        self.nodes = {
            name: Node(self, name, fresh(template, directory / name), SKEWS[number % len(SKEWS)])
            for number, name in enumerate(ROLES)
        }

    async def begin(self) -> None:
        """Start all processes, one after the other: the first one creates the tables."""
        for node in self.nodes.values():
            self._supervisors.append(self._adopt(asyncio.create_task(node.supervise())))
            await node.up.wait()
        await self.until(self._all_up, "all hosts to be up")

    async def end(self) -> None:
        """Stop all processes and remove the databases."""
        for node in self.nodes.values():
            if node.process is not None:
                await node.process.stop()
        for database in self.databases.values():
            database.dispose()

    async def all_up(self) -> None:
        """Wait until every process runs."""
        for node in self.nodes.values():
            await node.up.wait()

    def process(self) -> SimulatedProcess:
        """Return the process of the API."""
        process = self.nodes["api"].process
        assert process is not None
        return process

    def drivers(self) -> list[Any]:
        """Return the drivers of all hosts."""
        return [driver for node in self.nodes.values() if node.process for driver in drivers_of(node.process)]

    async def request(
        self, method: str, path: str, body: Any = None, *, service: str = "/compute/v2.1"
    ) -> Answer | None:
        """Send a request; return None if a crash broke the connection, so that its result is unknown."""
        node = self.nodes["api"]
        await node.up.wait()
        assert node.transport is not None
        self.note_action(method, path, body)
        headers = request_headers(body)
        data = None if body is None else msgspec.json.encode(body)
        asked = asyncio.ensure_future(node.transport.request(method, f"{service}{path}", headers, data))
        ended = asyncio.ensure_future(node.run.ended.wait())
        await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        return asked.result() if asked.done() else None

    # --- disturbances ----------------------------------------------------------------------------------------

    async def stand_still(self, name: str, seconds: float) -> None:
        """Let a process stand still and go on."""
        run = self.nodes[name].run
        run.running.clear()
        await self.clock.sleep(seconds)
        run.running.set()

    async def exhaust_pool(self, name: str, seconds: float) -> None:
        """Let a process find no free connection to the database."""
        run = self.nodes[name].run
        run.pool_free.clear()
        await self.clock.sleep(seconds)
        run.pool_free.set()

    async def restart(self, *names: str) -> None:
        """Stop processes cleanly; they are started again."""
        for name in names:
            self.nodes[name].run.stop_requested.set()

    async def crash(self, name: str) -> None:
        """Kill a process."""
        self.nodes[name].run.ended.set()

    async def outage(self, seconds: float, *, bus: bool = False, database: bool = False) -> None:
        """Let the broker, the database or both stand still."""
        affected = [self.outages.bus_up] * bus + [self.outages.database_up] * database
        for each in affected:
            each.clear()
        await self.clock.sleep(seconds)
        for each in affected:
            each.set()
