"""Many users and several faults, at points that a seed decides: in the end nothing is stuck, leaked or oversold.

MICRONOVA_SEEDS=200 (or 100-300) runs more of them: `make simulate`.
"""

import os
from pathlib import Path
from random import Random

import pytest

from tests.simulation.faults import FAULTS, FaultPlan, Point
from tests.simulation.loop import VirtualClock, simulate
from tests.simulation.scenarios import (
    delete_during_build,
    delete_during_move,
    exceed_capacity,
    keep_servers,
    several_in_one_request,
)
from tests.simulation.simulated_cloud import SimulatedCloud, fresh

MAX_FAULTS = 8
DEFAULT_SEEDS = "10"


def seeds() -> range:
    """Return the seeds to run."""
    first, _, last = os.environ.get("MICRONOVA_SEEDS", DEFAULT_SEEDS).rpartition("-")
    return range(int(first or 1), int(last) + 1)


class _Chance:
    """Chooses a few points at random, and a fault for each."""

    def __init__(self, random: Random) -> None:
        self.injected: list[str] = []
        self._random = random
        self._odds = random.choice((0.005, 0.02, 0.1))

    def __call__(self, point: Point) -> str | None:
        if len(self.injected) >= MAX_FAULTS or self._random.random() > self._odds:
            return None
        fault = self._random.choice(FAULTS[point.kind])
        self.injected.append(f"{point}: {fault}")
        return fault


@pytest.mark.parametrize("seed", seeds())
def test_nothing_is_stuck_leaked_or_oversold(seed: int, template: Path, tmp_path: Path) -> None:
    chance = _Chance(Random(seed))
    fault_plan = FaultPlan(chance)

    async def run(clock: VirtualClock, random: Random) -> None:
        cloud = SimulatedCloud(fresh(template, tmp_path / "cloud"), clock, random, fault_plan)
        await cloud.begin()
        fault_plan.armed = True
        users = [
            cloud.spawn(scenario)
            for scenario in (
                several_in_one_request(cloud),
                keep_servers(cloud),
                exceed_capacity(cloud),
                *(delete_during_build(cloud, f"deleted-{number}", random.uniform(0.0, 4.0)) for number in range(4)),
                *(delete_during_move(cloud, f"moved-{number}", random.uniform(0.0, 12.0)) for number in range(2)),
            )
        ]
        for user in users:
            await user
        await cloud.check()
        await cloud.end()

    try:
        simulate(seed, run)
    except BaseException as error:
        error.add_note(f"seed {seed}; injected faults: {chance.injected}")
        raise
