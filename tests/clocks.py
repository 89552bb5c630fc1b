"""Clocks for tests."""

import asyncio
import heapq
import itertools

from micronova.objects.clock import SystemClock

START = 1_800_000_000.0


async def settle() -> None:
    """Run everything that can run without advancing the clock."""
    for _ in range(200):
        await asyncio.sleep(0)


class SetClock:
    """A clock that a test sets; who sleeps sets it forward and does not wait."""

    def __init__(self, time: float = START) -> None:
        self.time = time
        self.set_by = 0.0  # by how much the wall clock was set forward

    def now(self) -> float:
        return self.time + self.set_by

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        await asyncio.sleep(0)


class HeldClock:
    """A clock that stands still until a test sets it; sleeping takes real time, so that loops do not spin."""

    def __init__(self) -> None:
        self.time = 1_700_000_000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        await SystemClock().sleep(seconds)


class ManualClock:
    """A clock that only a test advances; sleeping tasks wait for it."""

    def __init__(self) -> None:
        self.time = START
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    @property
    def sleepers(self) -> int:
        """The number of tasks that sleep."""
        return sum(not sleeper.done() for _, _, sleeper in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.time + seconds, next(self._order), sleeper))
        await sleeper

    async def advance(self, seconds: float) -> None:
        """Advance the clock; wake each sleeper at its time, and let it do all that it can before the next one."""
        await settle()
        until = self.time + seconds
        while self._sleepers and self._sleepers[0][0] <= until:
            when, _, sleeper = heapq.heappop(self._sleepers)
            self.time = max(self.time, when)
            if not sleeper.done():
                sleeper.set_result(None)
                await settle()
        self.time = until
        await settle()

    async def jump(self, seconds: float) -> None:
        """Set the clock forward at once; a loop that sleeps for less wakes once, as after a standstill."""
        self.time += seconds
        while self._sleepers and self._sleepers[0][0] <= self.time:
            _, _, sleeper = heapq.heappop(self._sleepers)
            if not sleeper.done():
                sleeper.set_result(None)
        for _ in range(5):
            await asyncio.sleep(0)
