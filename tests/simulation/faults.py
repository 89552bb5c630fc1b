"""Faults that a simulation injects into messages, transactions, and calls of the hypervisor driver and of services.

A *point* is a moment at which the cloud uses the bus, the database, a driver or the volume service. Points are numbered
in the order in which they are reached, so that a simulation can be repeated with a fault at exactly one of them.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.objects.context import Context
from micronova.objects.errors import Unavailable
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Method, Target
from micronova.rpc.errors import BusUnavailable, CallTimeout
from micronova.rpc.wrapper import BusWrapper
from micronova.virt.driver import DriverFailed
from tests.simulation.database import InlineDatabase
from tests.simulation.loop import VirtualClock

P = ParamSpec("P")
R = TypeVar("R")
Mp = TypeVar("Mp")
Mr = TypeVar("Mr")

DATABASE_PATIENCE = 30.0  # seconds until the engine gives up: for a connection, or for the fate of a commit
CONFIRM_PATIENCE = 5.0  # seconds until a sender gives up waiting for the broker's confirmation
PROCESS_ENDS = ("crash before", "crash after", "stop")
HYPERVISOR_AWAY = ("unavailable", "lost")
HYPERVISOR_FAILS = ("fails",)  # the users see that: it is not among the faults that only delay
FAULTS = {
    "cast": ("lost", "twice", "refused", *PROCESS_ENDS),
    "call": ("lost", "answer lost", "twice", "refused", *PROCESS_ENDS),
    "write": ("fails", "answer lost", "answer late", *PROCESS_ENDS),
    "read": ("fails", "crash before"),
    "driver": (*HYPERVISOR_AWAY, *PROCESS_ENDS),
    "volume": ("unavailable", "answer lost", "late", *PROCESS_ENDS),
}


def category(kind: str, fault: str) -> str:
    """Return as what a fault at a point of this kind is counted."""
    if fault in PROCESS_ENDS:
        return "process ends"
    return {"cast": "message", "call": "message", "driver": "driver", "volume": "volume service"}.get(kind, "database")


@dataclass(frozen=True)
class Point:
    """A moment at which a fault can be injected."""

    number: int
    kind: str
    name: str  # the message's method, the transaction's function, the driver's method, or the request
    action: str = ""  # what the user has asked for last

    def __str__(self) -> str:
        return f"{self.number} {self.kind} {self.name} ({self.action})"


class FaultPlan:
    """Chooses the fault at each point, if any, once it is armed; records the points that were reached."""

    def __init__(self, choose: Callable[[Point], str | None] = lambda point: None) -> None:
        self.armed = False
        self.action = ""
        self.points: list[Point] = []
        self._choose = choose

    def at(self, kind: str, name: str) -> str | None:
        """Record a point; return the fault to inject there, or None."""
        if not self.armed:
            return None
        point = Point(len(self.points), kind, name, self.action)
        self.points.append(point)
        return self._choose(point)


class ProcessRun:
    """One run of the process, from its start until it crashes or stops."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.stop_requested = asyncio.Event()
        self.running = _set_event()  # else the process stands still
        self.pool_free = _set_event()  # else all its connections to the database are in use

    async def before(self, fault: str | None) -> None:
        """Crash or request a stop before an action, if that is the fault."""
        if fault == "crash before":
            await self.crash()
        if fault == "stop":
            self.stop_requested.set()

    async def after(self, fault: str | None) -> None:
        """Crash after an action has taken effect, if that is the fault."""
        await self.block_if_ended()
        if fault == "crash after":
            await self.crash()

    async def crash(self) -> NoReturn:
        """End the run at once, as kill -9 does: the task that calls this never continues."""
        self.ended.set()
        await self._block()

    async def block_if_ended(self) -> None:
        """Return if the run has not ended, once the process does not stand still; otherwise never return."""
        if not self.running.is_set():
            await self.running.wait()
        if self.ended.is_set():
            await self._block()

    async def _block(self) -> NoReturn:
        while True:
            await asyncio.get_running_loop().create_future()


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


class Outages:
    """Whether the broker and the database answer; without an answer, callers wait until their patience ends."""

    def __init__(self) -> None:
        self.bus_up = _set_event()
        self.database_up = _set_event()


async def _answers(up: asyncio.Event, seconds: float) -> bool:
    """Wait so many seconds at most; return whether the event is set."""
    if not up.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await up.wait()
    return up.is_set()


class FaultyDatabase(Database):
    """A database connection of the process, with faults."""

    dialect = "sqlite"

    def __init__(
        self,
        database: InlineDatabase,
        process_run: ProcessRun,
        fault_plan: FaultPlan,
        outages: Outages | None = None,
    ) -> None:
        super().__init__()
        self._database, self._process_run, self._fault_plan = database, process_run, fault_plan
        self._outages = outages or Outages()

    async def read(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = await self._transaction("read", self._database.read, fn, *args, **kwargs)
        return result

    async def write(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = await self._transaction("write", self._database.write, fn, *args, **kwargs)
        return result

    async def _transaction(self, kind: str, run: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        await self._process_run.block_if_ended()
        fault = self._fault_plan.at(kind, fn.__qualname__)
        await self._process_run.before(fault)
        if not await _answers(self._process_run.pool_free, DATABASE_PATIENCE):
            raise Unavailable("All connections are in use.")
        if fault == "fails" or not await _answers(self._outages.database_up, DATABASE_PATIENCE):
            raise Unavailable("The database does not answer.")
        result = await run(fn, *args, **kwargs)
        if fault == "answer late":  # the connection was lost, and the database was asked whether it has committed
            await asyncio.sleep(DATABASE_PATIENCE / 2)
        await self._process_run.after(fault)
        if fault == "answer lost" or not await _answers(self._outages.database_up, DATABASE_PATIENCE):
            raise Unavailable("The database does not answer. It is not known whether the change was made.")
        return result

    async def close(self) -> None:
        """Do nothing: the next run uses the same database."""


class FaultyBus(BusWrapper):
    """A bus connection of the process, with faults."""

    def __init__(
        self,
        bus: Bus,
        process_run: ProcessRun,
        fault_plan: FaultPlan,
        clock: VirtualClock,
        outages: Outages | None = None,
    ) -> None:
        super().__init__(bus)
        self._process_run, self._fault_plan, self._clock = process_run, fault_plan, clock
        self._outages = outages or Outages()
        self._second: set[asyncio.Task[Any]] = set()

    async def cast(self, target: Target, method: Method[Mp, Any], params: Mp, *, context: Context) -> None:
        fault = await self._begin("cast", method)
        if not await _answers(self._outages.bus_up, CONFIRM_PATIENCE):
            raise BusUnavailable(f"{method.label} was not confirmed")
        if fault == "lost":
            return
        for _ in range(2 if fault == "twice" else 1):
            await self._bus.cast(target, method, params, context=context)
        await self._process_run.after(fault)

    async def call(self, target: Target, method: Method[Mp, Mr], params: Mp, *, context: Context, timeout: float) -> Mr:
        fault = await self._begin("call", method)
        if fault == "lost":
            await self._clock.sleep(timeout)
            raise CallTimeout(f"{method.label} did not answer in time")
        ask = functools.partial(self._bus.call, target, method, params, context=context, timeout=timeout)
        if fault == "twice":
            again = asyncio.ensure_future(ask())
            self._second.add(again)
            again.add_done_callback(lambda task: task.cancelled() or task.exception())
        begun = self._clock.monotonic()
        if not await _answers(self._outages.bus_up, timeout):
            raise CallTimeout(f"{method.label} did not answer in time")
        answer = await ask()
        await self._process_run.after(fault)
        if fault == "answer lost" or not await _answers(
            self._outages.bus_up, begun + timeout - self._clock.monotonic()
        ):
            await self._clock.sleep(begun + timeout - self._clock.monotonic())
            raise CallTimeout(f"{method.label} did not answer in time")
        return answer

    async def _begin(self, kind: str, method: Method[Any, Any]) -> str | None:
        await self._process_run.block_if_ended()
        fault = self._fault_plan.at(kind, method.label)
        await self._process_run.before(fault)
        if fault == "refused":
            raise BusUnavailable(f"{method.label} could not be sent")
        return fault


def with_faults(
    operation: Callable[..., Awaitable[Any]], process_run: ProcessRun, fault_plan: FaultPlan
) -> Callable[..., Awaitable[Any]]:
    """Return a driver's method with a point at which the process may crash or stop, or the hypervisor be away.

    If it is "unavailable", nothing happens; if the connection is "lost", the call has its effect. If it "fails",
    nothing happens, and trying again at this host would not help.
    """
    name = operation.__name__

    async def run(*args: Any, **kwargs: Any) -> Any:
        await process_run.block_if_ended()
        fault = fault_plan.at("driver", name)
        await process_run.before(fault)
        if fault == "unavailable":
            raise Unavailable("The hypervisor cannot be reached.")
        if fault == "fails":
            raise DriverFailed(f"The hypervisor failed at {name}.")
        result = await operation(*args, **kwargs)
        await process_run.after(fault)
        if fault == "lost":
            raise Unavailable("The connection to the hypervisor was lost.")
        return result

    return run
