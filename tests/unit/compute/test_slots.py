"""Places for heavy work: how many there are, and who gets one that becomes free."""

import asyncio

import pytest

from micronova.compute.slots import Slots
from tests.clocks import settle


class Work:
    """Pieces of work, each of which has a place until it is told to end."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.running: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *names: str) -> None:
        """Begin pieces of work; the first letter of a name is the project."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._run(name))
            await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.tasks[name]
        await settle()

    async def _run(self, name: str) -> None:
        async with self._slots.one(name[0]):
            self.running.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.running.remove(name)


async def test_a_free_place_goes_to_the_project_with_the_fewest() -> None:
    work = Work(Slots(3))
    await work.begin("a1", "a2", "b1", "b2", "a3", "c1", "a4")
    assert work.running == ["a1", "a2", "b1"]
    for ends, running in (
        ("a1", ["a2", "b1", "c1"]),
        ("b1", ["a2", "c1", "b2"]),
        ("c1", ["a2", "b2", "a3"]),
        ("a2", ["b2", "a3", "a4"]),
    ):
        await work.end(ends)
        assert work.running == running
    for name in ("b2", "a3", "a4"):
        await work.end(name)


async def test_one_project_leaves_places_to_others() -> None:
    work = Work(Slots(3))
    await work.begin("a1", "a2", "a3", "b1", "b2")
    assert work.running == ["a1", "a2", "b1"]
    await work.end("b1")
    assert work.running == ["a1", "a2", "b2"]
    await work.end("b2")
    assert work.running == ["a1", "a2"], "the third one waits although a place is free"
    await work.end("a2")
    assert work.running == ["a1", "a3"]
    for name in ("a1", "a3"):
        await work.end(name)


@pytest.mark.parametrize("given", [False, True])
async def test_who_gives_up_keeps_no_place(given: bool) -> None:
    slots = Slots(1)
    await slots.acquire("a")
    waiting = asyncio.create_task(slots.acquire("b"))
    await settle()
    if given:
        slots.release("a")  # it has the place, and does not know it yet
        waiting.cancel()
    else:
        waiting.cancel()
        slots.release("a")
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wait_for(slots.acquire("c"), 60)


async def test_without_a_limit_nobody_waits() -> None:
    work = Work(Slots(0))
    await work.begin(*(f"a{number}" for number in range(100)))
    assert len(work.running) == 100
    for name in list(work.running):
        await work.end(name)
