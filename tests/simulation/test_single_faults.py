"""One thing goes wrong, at every point there is and in every way: a message is lost or doubled, a transaction fails or
its answer is lost, the process crashes or is stopped. A server's user notices nothing but a delay."""

import itertools
from pathlib import Path
from random import Random

import pytest

from micronova.conductor.operations import Engine
from tests.simulation.faults import WAYS, Fate, Point
from tests.simulation.loop import VirtualClock, simulate
from tests.simulation.stories import whole_life
from tests.simulation.world import World, fresh

SEED = 1


def _history(directory: Path, fate: Fate) -> list[Point]:
    async def story(clock: VirtualClock, random: Random) -> list[Point]:
        world = World(directory, clock, random, fate)
        await world.begin()
        fate.armed = True
        await whole_life(world)
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
    points = _history(fresh(template, tmp_path / "undisturbed"), Fate())
    numbers = itertools.count()
    failures = []
    for wanted in points:
        for way in WAYS[wanted.kind] if wanted.kind == kind else ():
            once = _Once(wanted, way)
            try:
                _history(fresh(template, tmp_path / f"{next(numbers)}"), Fate(once))
                assert once.struck == wanted
            except Exception as error:  # noqa: BLE001 - all are told together
                failures.append(f"{wanted}: {way}: {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {next(numbers)}\n" + "\n".join(failures)
