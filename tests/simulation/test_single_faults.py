"""One fault of each kind at every point: a message is lost or doubled, a transaction fails or its answer is lost, the
process crashes or is stopped, the hypervisor cannot be reached. The user of a server sees nothing but a delay."""

import itertools
import os
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from random import Random

import pytest

from micronova.conductor.operations.engine import Engine
from tests.simulation.faults import FAULTS, HYPERVISOR_AWAY, FaultPlan, Point
from tests.simulation.loop import VirtualClock, simulate
from tests.simulation.scenarios import attach_and_detach, pause_and_suspend, server_lifecycle
from tests.simulation.simulated_cloud import SimulatedCloud, fresh

SEED = 1
EVERY = int(os.environ.get("MICRONOVA_EVERY", "6"))
"""Only every Nth fault is tried in the scenarios with running servers; `make simulate` tries all."""

Scenario = Callable[[SimulatedCloud], Awaitable[None]]


def _points(directory: Path, fault_plan: FaultPlan, scenario: Scenario = server_lifecycle) -> list[Point]:
    async def run(clock: VirtualClock, random: Random) -> list[Point]:
        cloud = SimulatedCloud(directory, clock, random, fault_plan, networks=scenario is attach_and_detach)
        await cloud.begin()
        await scenario(cloud)
        await cloud.check()
        await cloud.end()
        return fault_plan.points

    return simulate(SEED, run)


class _Once:
    """Injects one fault at one point."""

    def __init__(self, wanted: Point, fault: str) -> None:
        self._wanted, self._fault = wanted, fault
        self.injected_at: Point | None = None

    def __call__(self, point: Point) -> str | None:
        if point.number != self._wanted.number:
            return None
        self.injected_at = point
        return self._fault


def test_a_seed_gives_the_same_points_again(template: Path, tmp_path: Path) -> None:
    one, two = (_points(fresh(template, tmp_path / str(number)), FaultPlan()) for number in (1, 2))
    assert one == two
    assert {point.kind for point in one} == {"cast", "call", "read", "write", "driver"}


def test_the_simulation_detects_a_cloud_that_gets_stuck(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the sweep an operation whose message was lost is stuck, and the simulation must fail."""

    async def nothing(engine: Engine) -> None:
        pass

    monkeypatch.setattr(Engine, "_sweep", nothing)
    [hint, *_] = [point for point in _points(fresh(template, tmp_path / "1"), FaultPlan()) if point.kind == "cast"]
    with pytest.raises(AssertionError, match="waited"):
        _points(fresh(template, tmp_path / "2"), FaultPlan(_Once(hint, "lost")))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["cast", "call", "read", "write", "driver"])
def test_a_fault_at_every_point(kind: str, template: Path, tmp_path: Path) -> None:
    _try_faults(server_lifecycle, template, tmp_path, lambda point: point.kind == kind, 1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", [pause_and_suspend, attach_and_detach])
def test_a_fault_in_an_action_on_a_running_server(scenario: Scenario, template: Path, tmp_path: Path) -> None:
    _try_faults(scenario, template, tmp_path, lambda point: True, EVERY)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", [pause_and_suspend, attach_and_detach])
def test_a_hypervisor_that_cannot_be_reached(scenario: Scenario, template: Path, tmp_path: Path) -> None:
    _try_faults(scenario, template, tmp_path, lambda point: point.kind == "driver", 1, HYPERVISOR_AWAY)


def _try_faults(
    scenario: Scenario,
    template: Path,
    directory: Path,
    chosen: Callable[[Point], bool],
    every: int,
    only: Collection[str] | None = None,
) -> None:
    """Run a scenario once for each fault."""
    points = _points(fresh(template, directory / "without-faults"), FaultPlan(), scenario)
    faults = [(point, fault) for point in points if chosen(point) for fault in only or FAULTS[point.kind]][::every]
    numbers = itertools.count()
    failures = []
    for wanted, fault in faults:
        once = _Once(wanted, fault)
        try:
            _points(fresh(template, directory / f"{next(numbers)}"), FaultPlan(once), scenario)
            assert once.injected_at == wanted
        except Exception as error:  # noqa: BLE001 - all failures are shown together
            failures.append(f"{wanted}: {fault}: {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {len(faults)}\n" + "\n".join(failures)
