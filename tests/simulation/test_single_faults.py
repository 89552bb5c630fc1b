"""One fault of each kind at every point: a message is lost or doubled, a transaction fails or its answer is lost, the
process crashes or is stopped, the hypervisor cannot be reached. The user of a server sees nothing but a delay.

A hypervisor that fails is another matter: the user sees that, and can go on.
"""

import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from random import Random

import pytest
import sqlalchemy as sa

from micronova.api.compute import removed
from micronova.conductor.operations.engine import Engine
from micronova.db.tables import instance_action_events, instances
from tests.simulation.faults import FAULTS, HYPERVISOR_AWAY, HYPERVISOR_FAILS, FaultPlan, Point, category
from tests.simulation.loop import VirtualClock, simulate
from tests.simulation.simulated_cloud import Refused, SimulatedCloud, UnexpectedResult, fresh
from tests.simulation.stories import LIFECYCLE, OTHER_REQUESTS, STORIES, Story

SEED = 1
EVERY = int(os.environ.get("MICRONOVA_EVERY", "11"))
"""Only every Nth fault is tried in the stories with running servers; `make simulate` tries all."""
EVERY_WITH_VOLUMES = 1 if EVERY == 1 else 5 * EVERY
"""The same for the stories with volumes, which have many transactions."""
AWAY, FAILS = min(EVERY, 3), min(EVERY, 5)
"""The same for faults of hypervisors: more of them are tried."""
TIMEOUT = 300 if EVERY > 1 else 7200
stories = pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)


def _tell(
    directory: Path, fault_plan: FaultPlan, story: Story = LIFECYCLE, tell: Callable[..., Awaitable[None]] | None = None
) -> set[str]:
    """Tell a story, with faults, and check what is left; return the actions that were asked for."""

    async def run(clock: VirtualClock, random: Random) -> set[str]:
        cloud = SimulatedCloud(directory, clock, random, fault_plan, services=story.services, default=story.default)
        await cloud.begin()
        await (tell or story.scenario)(cloud)
        await cloud.check()
        await cloud.end()
        return cloud.asked

    return simulate(SEED, run)


def _points(directory: Path, story: Story = LIFECYCLE) -> list[Point]:
    """Tell a story without faults; return its points."""
    fault_plan = FaultPlan()
    assert _tell(directory, fault_plan, story) == story.actions
    return fault_plan.points


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


def test_the_stories_ask_for_every_server_action(template: Path, tmp_path: Path) -> None:
    async def run(clock: VirtualClock, random: Random) -> set[str]:
        cloud = SimulatedCloud(fresh(template, tmp_path / "cloud"), clock, random, FaultPlan())
        await cloud.begin()
        routes = cloud.process().services["compute"].routes
        await cloud.end()
        return {
            route.action
            for route in routes
            if route.path == "/servers/{id}/action" and route.action and route.handler is not removed.gone
        }

    declared = simulate(SEED, run)
    told = frozenset[str]().union(LIFECYCLE.actions, *(story.actions for story in STORIES))
    assert told == declared | OTHER_REQUESTS


def test_a_seed_gives_the_same_points_again(template: Path, tmp_path: Path) -> None:
    one, two = (_points(fresh(template, tmp_path / str(number))) for number in (1, 2))
    assert one == two
    assert {point.kind for point in one} == {"cast", "call", "read", "write", "driver"}


def test_the_simulation_detects_a_cloud_that_gets_stuck(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the sweep an operation whose message was lost is stuck, and the simulation must fail."""

    async def nothing(engine: Engine) -> None:
        pass

    monkeypatch.setattr(Engine, "_sweep", nothing)
    [hint, *_] = [point for point in _points(fresh(template, tmp_path / "1")) if point.kind == "cast"]
    with pytest.raises(AssertionError, match="waited"):
        _tell(fresh(template, tmp_path / "2"), FaultPlan(_Once(hint, "lost")))


@pytest.fixture
def tries(template: Path, tmp_path: Path, record_property: Callable[[str, object], None]) -> "Tries":
    """Tries faults, and records how many there were for each action."""
    return Tries(template, tmp_path, record_property)


class Tries:
    """Tells stories once for each fault."""

    def __init__(self, template: Path, directory: Path, record: Callable[[str, object], None]) -> None:
        self._template, self._directory, self._record = template, directory, record

    def __call__(
        self,
        story: Story,
        faults: Mapping[str, Sequence[str]],
        every: int,
        tell: Callable[..., Awaitable[None]] | None = None,
    ) -> None:
        """Tell a story once for each of these faults at its points, by their kind."""
        points = _points(fresh(self._template, self._directory / "without-faults"), story)
        chosen = [(point, fault) for point in points for fault in faults.get(point.kind, ())][::every]
        counts = Counter((point.action, category(point.kind, fault)) for point, fault in chosen)
        self._record("faults", json.dumps([[*key, count] for key, count in counts.items()]))
        failures = []
        for number, (wanted, fault) in enumerate(chosen):
            once = _Once(wanted, fault)
            try:
                _tell(fresh(self._template, self._directory / f"{number}"), FaultPlan(once), story, tell)
                assert once.injected_at == wanted, f"the fault struck {once.injected_at}"
            except Exception as error:  # noqa: BLE001 - all failures are shown together
                failures.append(f"{wanted}: {fault}: {type(error).__name__}: {error}")
        assert not failures, f"{len(failures)} of {len(chosen)}\n" + "\n".join(failures)


@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind != "volume"])
def test_a_fault_at_every_point(kind: str, tries: Tries) -> None:
    tries(LIFECYCLE, {kind: FAULTS[kind]}, 1)


@pytest.mark.timeout(TIMEOUT)
@stories
def test_a_fault_in_an_action_on_a_running_server(story: Story, tries: Tries) -> None:
    tries(story, FAULTS, EVERY_WITH_VOLUMES if "volume" in story.services else EVERY)


@pytest.mark.timeout(TIMEOUT)
@pytest.mark.skipif(EVERY == 1, reason="the test above has these faults")
@stories
def test_a_hypervisor_that_cannot_be_reached(story: Story, tries: Tries) -> None:
    tries(story, {"driver": HYPERVISOR_AWAY}, AWAY)


@pytest.mark.timeout(TIMEOUT)
@stories
def test_a_hypervisor_that_fails(story: Story, tries: Tries) -> None:
    """Whatever the state of the server then: it says why, nothing is leaked, and its owner can delete it."""

    async def tell(cloud: SimulatedCloud) -> None:
        try:
            await story.scenario(cloud)
        except Refused as refused:
            assert "failed at" in str(refused)
        except UnexpectedResult:
            await _explained(cloud)
        await cloud.return_last_host()
        await cloud.check()
        for row in cloud.rows(sa.select(instances)):
            await cloud.insist("POST", f"/servers/{row['uuid']}/action", {"forceDelete": None}, 202, 404)
            await cloud.gone(row["uuid"])

    tries(story, {"driver": HYPERVISOR_FAILS}, FAILS, tell)


async def _explained(cloud: SimulatedCloud) -> None:
    """Assert that the owner of a server finds the reason for what went wrong."""
    cloud.fault_plan.armed = False
    await cloud.until(lambda: not cloud.open_operations(), "all operations to end")
    faults = [row["fault"] for row in cloud.rows(sa.select(instances)) if row["vm_state"] == "error"]
    assert None not in faults, "a server in ERROR does not say why"
    failed = cloud.rows(sa.select(instance_action_events).where(instance_action_events.c.result == "Error"))
    assert any("failed at" in str(each["details"]) for each in failed), "no event of an action has the reason"
