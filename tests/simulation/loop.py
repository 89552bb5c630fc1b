"""An event loop with virtual time, in which a seed decides the order of events.

Time stands still while a callback is ready, and jumps to the next timer when none is: a simulated hour takes as long as
the work in it. Callbacks that are ready at the same moment run in an order that the seed decides, as threads, sockets
and other machines decide it in reality. Nothing runs in threads. So a seed always gives the same order of events.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH = 1_800_000_000.0  # the wall-clock time at the start of a simulation


class Deadlock(Exception):
    """Nothing is ready and no timer is set: what the simulation waits for cannot happen."""


class _Idle(selectors.SelectSelector):
    """Advances the virtual time instead of waiting for the network."""

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
        """Return the virtual time."""
        return self._virtual

    def advance(self, seconds: float) -> None:
        """Advance the virtual time."""
        self._virtual += seconds

    def shuffle(self) -> None:
        """Put the callbacks that are ready into a random order."""
        ready: Any = self._ready  # type: ignore[attr-defined]
        waiting = list(ready)
        self._random.shuffle(waiting)
        ready.clear()
        ready.extend(waiting)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Run the function at once: the order of threads is not repeatable."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is passed to the caller
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


def simulate(seed: int, scenario: Callable[[VirtualClock, Random], Coroutine[Any, Any, T]]) -> T:
    """Run a scenario to its end in an event loop of its own."""
    random = Random(seed)
    loop = VirtualLoop(Random(random.getrandbits(32)))
    try:
        return loop.run_until_complete(scenario(VirtualClock(loop), random))
    finally:
        try:
            loop.run_until_complete(_cancel_others())
        finally:
            loop.close()


async def _cancel_others() -> None:
    """End all other tasks, also those that wait again while they undo their work."""
    for _ in range(1000):
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if not left:
            return
        for task in left:
            task.cancel()
        await asyncio.sleep(0)
    raise AssertionError(f"these tasks do not end: {left}")
