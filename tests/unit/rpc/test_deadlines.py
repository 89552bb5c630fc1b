"""Timers follow the clock that they are given."""

import asyncio
from functools import partial

from micronova.rpc.deadlines import Deadlines
from tests.clocks import ManualClock


async def test_timers_fire_in_order_and_only_when_due() -> None:
    clock = ManualClock()
    fired: list[object] = []
    deadlines = Deadlines(clock)
    deadlines.after(30, lambda: fired.append("late"))
    deadlines.after(10, lambda: fired.append("early"))  # earlier than what the watcher already waits for
    cancelled = deadlines.after(20, lambda: fired.append("never"))
    await clock.jump(9)
    assert fired == []
    cancelled.cancel()
    await clock.jump(1)
    assert fired == ["early"]
    await clock.jump(100)
    assert fired == ["early", "late"]
    assert not cancelled.fired


async def test_it_starts_again_after_it_was_idle() -> None:
    clock = ManualClock()
    fired: list[object] = []
    deadlines = Deadlines(clock)
    for n in range(3):
        deadlines.after(5, partial(fired.append, n))
        await asyncio.sleep(0)
        await clock.jump(5)
    assert fired == [0, 1, 2]


async def test_closing_forgets_what_is_to_come() -> None:
    clock = ManualClock()
    fired: list[object] = []
    deadlines = Deadlines(clock)
    deadlines.after(5, lambda: fired.append("never"))
    await asyncio.sleep(0)
    deadlines.close()
    await clock.jump(10)
    assert fired == []


async def test_a_callback_that_fails_stops_no_other_one() -> None:
    clock = ManualClock()
    fired: list[object] = []
    deadlines = Deadlines(clock)
    deadlines.after(5, lambda: fired.append(1 / 0))
    deadlines.after(6, lambda: fired.append("next"))
    await asyncio.sleep(0)
    await clock.jump(5)
    deadlines.after(5, lambda: fired.append("later"))
    await clock.jump(5)
    assert fired == ["next", "later"]
