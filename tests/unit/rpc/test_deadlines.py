"""Timers follow the clock that they are given."""

import asyncio
from functools import partial

from micronova.rpc.deadlines import Deadlines


class ManualClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.time = 100.0
        self.sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sleepers.append((self.time + seconds, sleeper))
        await sleeper

    async def advance(self, seconds: float) -> None:
        self.time += seconds
        for when, sleeper in self.sleepers:
            if when <= self.time and not sleeper.done():
                sleeper.set_result(None)
        for _ in range(5):
            await asyncio.sleep(0)


async def test_timers_fire_in_order_and_only_when_due() -> None:
    clock = ManualClock()
    fired: list[object] = []
    deadlines = Deadlines(clock)
    deadlines.after(30, lambda: fired.append("late"))
    deadlines.after(10, lambda: fired.append("early"))  # earlier than what the watcher already waits for
    cancelled = deadlines.after(20, lambda: fired.append("never"))
    await clock.advance(9)
    assert fired == []
    cancelled.cancel()
    await clock.advance(1)
    assert fired == ["early"]
    await clock.advance(100)
    assert fired == ["early", "late"]
    assert not cancelled.fired


async def test_it_starts_again_after_it_was_idle() -> None:
    clock = ManualClock()
    fired: list[object] = []
    deadlines = Deadlines(clock)
    for n in range(3):
        deadlines.after(5, partial(fired.append, n))
        await asyncio.sleep(0)
        await clock.advance(5)
    assert fired == [0, 1, 2]


async def test_closing_forgets_what_is_to_come() -> None:
    clock = ManualClock()
    fired: list[object] = []
    deadlines = Deadlines(clock)
    deadlines.after(5, lambda: fired.append("never"))
    await asyncio.sleep(0)
    deadlines.close()
    await clock.advance(10)
    assert fired == []


async def test_a_callback_that_fails_stops_no_other_one() -> None:
    clock = ManualClock()
    fired: list[object] = []
    deadlines = Deadlines(clock)
    deadlines.after(5, lambda: fired.append(1 / 0))
    deadlines.after(6, lambda: fired.append("next"))
    await asyncio.sleep(0)
    await clock.advance(5)
    deadlines.after(5, lambda: fired.append("later"))
    await clock.advance(5)
    assert fired == ["next", "later"]
