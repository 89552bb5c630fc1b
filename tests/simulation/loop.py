"""An event loop in which time is virtual and the order of events is drawn from a seed.

Time stands still while anything can be done, and jumps to the next timer when nothing can: an hour of a cloud's life
takes as long as the work in it. Callbacks that are ready at the same moment run in an order that the seed decides,
as threads, sockets and other machines decide it in reality. Nothing runs in threads. So a seed is a history: it can be
repeated, and another one is another history.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH = 1_800_000_000.0  # what the wall clock says when a simulation begins


class Deadlock(Exception):
    """Nothing is ready and no timer is set: whatever the simulation waits for cannot happen any more."""


class _Idle(selectors.SelectSelector):
    """Asked to wait for the network, it lets the time pass instead."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.loop.shuffle()
        if timeout is None:
            raise Deadlock
        if timeout > 0:
            self.loop.advance(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop of one simulation."""

    def __init__(self, random: Random) -> None:
        selector = _Idle()
        selector.loop = self
        self._virtual = 0.0
        self._random = random
        super().__init__(selector)

    def time(self) -> float:
        """Say what time it is in the simulation."""
        return self._virtual

    def advance(self, seconds: float) -> None:
        """Nothing can be done until then."""
        self._virtual += seconds

    def shuffle(self) -> None:
        """Let chance decide who of those that are ready comes first."""
        ready: Any = self._ready  # type: ignore[attr-defined]
        waiting = list(ready)
        self._random.shuffle(waiting)
        ready.clear()
        ready.extend(waiting)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Do it here and now: a thread would have an order of its own."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)
        return future


class VirtualClock:
    """The clock of a simulation's loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return EPOCH + self._loop.time()

    def monotonic(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def simulate(seed: int, story: Callable[[VirtualClock, Random], Coroutine[Any, Any, T]]) -> T:
    """Run a story to its end in a world of its own."""
    random = Random(seed)
    loop = VirtualLoop(Random(random.getrandbits(32)))
    try:
        return loop.run_until_complete(story(VirtualClock(loop), random))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        try:
            loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop), return_exceptions=True))
        finally:
            loop.close()
