"""One thing goes wrong, at every point there is and in every way: a message is lost or doubled, a transaction fails or
its answer is lost, the process crashes or is stopped. A server's user notices nothing but a delay."""

import itertools
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest

from micronova.conductor.operations import Engine
from tests.simulation.faults import WAYS, Fate, Point
from tests.simulation.loop import VirtualClock, simulate
from tests.simulation.stories import rest, whole_life, wired
from tests.simulation.world import World, fresh

SEED = 1
EVERY = int(os.environ.get("MICRONOVA_EVERY", "6"))
"""Of the faults in what is done to servers that run, every so many is tried; `make simulate` tries all."""

Story = Callable[[World], Awaitable[None]]


def _history(directory: Path, fate: Fate, tell: Story = whole_life) -> list[Point]:
    async def story(clock: VirtualClock, random: Random) -> list[Point]:
        world = World(directory, clock, random, fate, networks=tell is wired)
        await world.begin()
        await tell(world)
        await world.check()
        await world.end()
        return fate.points

    return simulate(SEED, story)


class _Once:
    """Lets one thing go wrong."""

    def __init__(self, wanted: Point, way: str) -> None:
        self._wanted, self._way = wanted, way
        self.struck: Point | None = None

    def __call__(self, point: Point) -> str | None:
        if point.number != self._wanted.number:
            return None
        self.struck = point
        return self._way


def test_a_seed_is_a_history(template: Path, tmp_path: Path):
    one, two = (_history(fresh(template, tmp_path / str(number)), Fate()) for number in (1, 2))
    assert one == two
    assert {point.kind for point in one} == {"cast", "call", "read", "write", "driver"}


def test_a_cloud_that_would_get_stuck_is_found_out(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without the sweep nobody finds work whose message was lost: the simulation must say so."""

    async def nothing(engine: Engine) -> None:
        pass

    monkeypatch.setattr(Engine, "_sweep", nothing)
    [hint, *_] = [point for point in _history(fresh(template, tmp_path / "1"), Fate()) if point.kind == "cast"]
    with pytest.raises(AssertionError, match="waited"):
        _history(fresh(template, tmp_path / "2"), Fate(_Once(hint, "lost")))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["cast", "call", "read", "write", "driver"])
def test_a_fault_at_every_point(kind: str, template: Path, tmp_path: Path):
    _disturb(whole_life, template, tmp_path, lambda point: point.kind == kind, 1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tell", [rest, wired])
def test_a_fault_while_a_server_rests_or_is_wired(tell: Story, template: Path, tmp_path: Path):
    _disturb(tell, template, tmp_path, lambda point: True, EVERY)


def _disturb(tell: Story, template: Path, room: Path, chosen: Callable[[Point], bool], every: int) -> None:
    """Tell a story again and again, each time with another thing that goes wrong."""
    points = _history(fresh(template, room / "undisturbed"), Fate(), tell)
    faults = [(point, way) for point in points if chosen(point) for way in WAYS[point.kind]][::every]
    numbers = itertools.count()
    failures = []
    for wanted, way in faults:
        once = _Once(wanted, way)
        try:
            _history(fresh(template, room / f"{next(numbers)}"), Fate(once), tell)
            assert once.struck == wanted
        except Exception as error:  # noqa: BLE001 - all are told together
            failures.append(f"{wanted}: {way}: {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {len(faults)}\n" + "\n".join(failures)
