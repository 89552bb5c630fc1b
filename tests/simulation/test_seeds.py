"""Much goes on and much goes wrong, at points that a seed draws: in the end nothing is stuck, leaked or oversold.

MICRONOVA_SEEDS=200 (or 100-300) runs more of them: `make simulate`.
"""

import os
from pathlib import Path
from random import Random

import pytest

from tests.simulation.faults import WAYS, Fate, Point
from tests.simulation.loop import VirtualClock, simulate
from tests.simulation.stories import changed_mind, crowd, kept, several
from tests.simulation.world import World, fresh

FAULTS = 8
DEFAULT_SEEDS = "10"


def _seeds() -> range:
    first, _, last = os.environ.get("MICRONOVA_SEEDS", DEFAULT_SEEDS).rpartition("-")
    return range(int(first or 1), int(last) + 1)


class _Chance:
    """Lets something go wrong now and then, a few times."""

    def __init__(self, random: Random) -> None:
        self.told: list[str] = []
        self._random = random
        self._odds = random.choice((0.005, 0.02, 0.1))

    def __call__(self, point: Point) -> str | None:
        if len(self.told) >= FAULTS or self._random.random() > self._odds:
            return None
        way = self._random.choice(WAYS[point.kind])
        self.told.append(f"{point}: {way}")
        return way


@pytest.mark.parametrize("seed", _seeds())
def test_nothing_is_stuck_leaked_or_oversold(seed: int, template: Path, tmp_path: Path):
    chance = _Chance(Random(seed))
    fate = Fate(chance)

    async def story(clock: VirtualClock, random: Random) -> None:
        world = World(fresh(template, tmp_path / "cloud"), clock, random, fate)
        await world.begin()
        fate.armed = True
        users = [
            world.spawn(story)
            for story in (
                several(world),
                kept(world),
                crowd(world),
                *(changed_mind(world, f"mind-{number}", random.uniform(0.0, 4.0)) for number in range(4)),
            )
        ]
        for user in users:
            await user
        await world.check()
        await world.end()

    try:
        simulate(seed, story)
    except BaseException as error:
        error.add_note(f"seed {seed}; what went wrong on purpose: {chance.told}")
        raise
