"""Where something can go wrong, and the ways in which it does: messages, transactions, and what a hypervisor is told.

A *point* is a moment at which the cloud depends on something outside of itself. Points are numbered as they come, so
that a history can be repeated with a fault at just one of them.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.objects.errors import Unavailable
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Context, Method, Target
from micronova.rpc.errors import BusUnavailable, CallTimeout
from micronova.rpc.wrapper import BusWrapper
from tests.simulation.database import InlineDatabase
from tests.simulation.loop import VirtualClock

P = ParamSpec("P")
R = TypeVar("R")
Mp = TypeVar("Mp")
Mr = TypeVar("Mr")

ENDS = ("crash before", "crash after", "told to stop")
WAYS = {
    "cast": ("lost", "twice", "refused", *ENDS),
    "fanout": ("lost", "twice", "refused", *ENDS),
    "call": ("lost", "answer lost", "twice", "refused", *ENDS),
    "write": ("fails", "answer lost", *ENDS),
    "read": ("fails", "crash before"),
    "driver": ENDS,
}


@dataclass(frozen=True)
class Point:
    """One moment at which something could go wrong."""

    number: int
    kind: str
    name: str  # the method of the message, the function of the transaction, the driver's operation

    def __str__(self) -> str:
        return f"{self.number} {self.kind} {self.name}"


class Fate:
    """Says what goes wrong at a point, once it is armed; remembers the points that there were."""

    def __init__(self, choose: Callable[[Point], str | None] = lambda point: None) -> None:
        self.armed = False
        self.points: list[Point] = []
        self._choose = choose

    def at(self, kind: str, name: str) -> str | None:
        """A point is reached."""
        if not self.armed:
            return None
        point = Point(len(self.points), kind, name)
        self.points.append(point)
        return self._choose(point)


class Life:
    """One life of a process: from its start until it crashes, or has stopped because it was told to."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.told_to_stop = asyncio.Event()

    async def begin(self, way: str | None) -> None:
        """Something begins; it may be the last thing, or the last but a few."""
        if way == "crash before":
            await self.crash()
        if way == "told to stop":
            self.told_to_stop.set()

    async def end(self, way: str | None) -> None:
        """Something is done, and its effect is there: that may be the last thing."""
        await self.goes_on()
        if way == "crash after":
            await self.crash()

    async def crash(self) -> NoReturn:
        """End it here and now, as kill -9 does: whoever is in the middle of something never comes out of it."""
        self.ended.set()
        await self._nothing()

    async def goes_on(self) -> None:
        """Return only if it does."""
        if self.ended.is_set():
            await self._nothing()

    async def _nothing(self) -> NoReturn:
        while True:
            await asyncio.get_running_loop().create_future()


class FaultyDatabase(Database):
    """A process's connection to the database."""

    dialect = "sqlite"

    def __init__(self, database: InlineDatabase, life: Life, fate: Fate) -> None:
        super().__init__()
        self._database, self._life, self._fate = database, life, fate

    async def read(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._transaction("read", self._database.read, fn, *args, **kwargs)

    async def write(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._transaction("write", self._database.write, fn, *args, **kwargs)

    async def _transaction(self, kind: str, run: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        await self._life.goes_on()
        way = self._fate.at(kind, fn.__qualname__)
        await self._life.begin(way)
        if way == "fails":
            raise Unavailable("The database does not answer.")
        result = await run(fn, *args, **kwargs)
        await self._life.end(way)
        if way == "answer lost":
            raise Unavailable("The database does not answer any more.")
        return result

    async def close(self) -> None:
        """The database stays."""


class FaultyBus(BusWrapper):
    """A process's connection to the bus."""

    def __init__(self, bus: Bus, life: Life, fate: Fate, clock: VirtualClock) -> None:
        super().__init__(bus)
        self._life, self._fate, self._clock = life, fate, clock
        self._second: set[asyncio.Task[Any]] = set()

    async def cast(self, target: Target, method: Method[Mp, Any], params: Mp, *, context: Context) -> None:
        await self._hint("cast", method, lambda: self._bus.cast(target, method, params, context=context))

    async def fanout(self, topic: str, method: Method[Mp, Any], params: Mp, *, context: Context) -> None:
        await self._hint("fanout", method, lambda: self._bus.fanout(topic, method, params, context=context))

    async def _hint(self, kind: str, method: Method[Any, Any], send: Callable[[], Awaitable[None]]) -> None:
        way = await self._begin(kind, method)
        if way == "lost":
            return
        for _ in range(2 if way == "twice" else 1):
            await send()
        await self._life.end(way)

    async def call(self, target: Target, method: Method[Mp, Mr], params: Mp, *, context: Context, timeout: float) -> Mr:
        way = await self._begin("call", method)
        if way == "lost":
            await self._clock.sleep(timeout)
            raise CallTimeout(f"{method.label} did not answer in time")
        ask = functools.partial(self._bus.call, target, method, params, context=context, timeout=timeout)
        if way == "twice":
            again = asyncio.ensure_future(ask())
            self._second.add(again)
            again.add_done_callback(lambda task: task.cancelled() or task.exception())
        begun = self._clock.monotonic()
        answer = await ask()
        await self._life.end(way)
        if way == "answer lost":
            await self._clock.sleep(begun + timeout - self._clock.monotonic())
            raise CallTimeout(f"{method.label} did not answer in time")
        return answer

    async def _begin(self, kind: str, method: Method[Any, Any]) -> str | None:
        await self._life.goes_on()
        way = self._fate.at(kind, method.label)
        await self._life.begin(way)
        if way == "refused":
            raise BusUnavailable(f"{method.label} could not be sent")
        return way


def mortal(operation: Callable[..., Awaitable[Any]], life: Life, fate: Fate) -> Callable[..., Awaitable[Any]]:
    """An operation of a driver, around which the process may crash."""
    name = operation.__name__

    async def run(*args: Any, **kwargs: Any) -> Any:
        await life.goes_on()
        way = fate.at("driver", name)
        await life.begin(way)
        result = await operation(*args, **kwargs)
        await life.end(way)
        return result

    return run
