"""Several conductors and schedulers whose clocks differ; long outages; processes that stand still: only time is lost.

MICRONOVA_SEEDS=200 (or 100-300) runs more random mixtures: `make simulate`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest

from tests.simulation.faults import HYPERVISOR_AWAY, FaultPlan, Point
from tests.simulation.loop import VirtualClock, simulate
from tests.simulation.region import ROLES, SimulatedRegion
from tests.simulation.scenarios import delete_during_build, server_lifecycle, settled, stays_active
from tests.simulation.simulated_cloud import IMAGE
from tests.simulation.test_seeds import seeds

Disturbance = Callable[[SimulatedRegion], Awaitable[None]]

# Those after which nobody has to do anything, and after which a server must not be in ERROR.
HARMLESS = {
    "cast": ("lost", "twice", "refused"),
    "call": ("lost", "answer lost", "twice", "refused"),
    "write": ("fails", "answer lost", "answer late"),
    "read": ("fails",),
    "driver": HYPERVISOR_AWAY,
}
MAX_FAULTS = 12
AGENTS = [name for name, role in ROLES.items() if role == "compute"]

OUTAGES: dict[str, Disturbance] = {
    "bus": lambda region: region.outage(300.0, bus=True),
    "database": lambda region: region.outage(300.0, database=True),
    "both": lambda region: region.outage(300.0, bus=True, database=True),
}


def _run(seed: int, template: Path, directory: Path, disturb: Disturbance, plan: FaultPlan | None = None) -> None:
    """Disturb a region while users create and delete servers; none may be in ERROR but for lack of room."""

    async def run(clock: VirtualClock, random: Random) -> None:
        region = SimulatedRegion(template, directory / "region", clock, random, plan or FaultPlan())
        await region.begin()
        users = [
            asyncio.create_task(scenario)
            for scenario in (
                *(stays_active(region, f"kept-{number}", random.uniform(0.0, 8.0)) for number in range(6)),
                *(delete_during_build(region, f"deleted-{number}", random.uniform(0.0, 8.0)) for number in range(4)),
                server_lifecycle(region),
            )
        ]
        await clock.sleep(random.uniform(0.0, 5.0))
        await disturb(region)
        for user in users:
            await user
        await region.check()
        await region.end()

    simulate(seed, run)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", OUTAGES)
def test_five_minutes_without(what: str, template: Path, tmp_path: Path) -> None:
    _run(1, template, tmp_path, OUTAGES[what])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ROLES)
def test_a_process_stands_still_for_a_minute(name: str, template: Path, tmp_path: Path) -> None:
    _run(1, template, tmp_path, lambda region: region.stand_still(name, 60.0))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name, role in ROLES.items() if role != "compute"])
def test_a_process_has_no_free_connection_for_a_minute(name: str, template: Path, tmp_path: Path) -> None:
    _run(1, template, tmp_path, lambda region: region.exhaust_pool(name, 60.0))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", seeds())
def test_all_agents_restart(seed: int, template: Path, tmp_path: Path) -> None:
    """While they do, no host is up: servers that are created, and builds that the agents had begun, wait."""

    async def disturb(region: SimulatedRegion) -> None:
        await region.clock.sleep(60.0)  # a conductor that has just started waits for silent hosts in any case
        users = [asyncio.create_task(stays_active(region, f"meanwhile-{n}", n / 4)) for n in range(8)]
        await region.restart(*AGENTS)
        for user in users:
            await user

    _run(seed, template, tmp_path, disturb)


async def _ask(region: SimulatedRegion, ids: list[str], body: dict[str, object]) -> None:
    """Ask once for an action on each of these servers; it may be refused."""
    for id in ids:
        await region.request("POST", f"/servers/{id}/action", body)


async def _evacuate_during_outage(region: SimulatedRegion, ids: list[str]) -> None:
    outage = asyncio.create_task(region.outage(300.0, bus=True))
    await region.clock.sleep(250.0)
    await _ask(region, ids, {"evacuate": {}})
    await outage


async def _evacuate_during_restart(region: SimulatedRegion, ids: list[str]) -> None:
    await region.restart(*AGENTS)
    for _ in range(10):
        await _ask(region, ids, {"evacuate": {}})
        await region.clock.sleep(1.0)


async def _rebuild_is_withdrawn(region: SimulatedRegion, ids: list[str]) -> None:
    """The agents stand still while a rebuild is asked for and cancelled; the orders are in their queues.

    The guests are off: nothing delays the replacement of their disks.
    """
    await _ask(region, ids, {"os-stop": None})
    for id in ids:
        await region.becomes(id, "stopped")
    still = [asyncio.create_task(region.stand_still(name, 40.0)) for name in AGENTS]
    await region.clock.sleep(1.0)
    await _ask(region, ids, {"rebuild": {"imageRef": IMAGE}})
    await region.clock.sleep(20.0)
    await _ask(region, ids, {"os-resetState": {"state": "error"}})
    for each in still:
        await each
    await region.clock.sleep(60.0)
    await _ask(region, ids, {"reboot": {"type": "HARD"}})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("disturb", [_evacuate_during_outage, _evacuate_during_restart, _rebuild_is_withdrawn])
def test_hosts_that_live_keep_their_guests(
    disturb: Callable[[SimulatedRegion, list[str]], Awaitable[None]], seed: int, template: Path, tmp_path: Path
) -> None:
    async def run(clock: VirtualClock, random: Random) -> None:
        region = SimulatedRegion(template, tmp_path / "region", clock, random, FaultPlan())
        await region.begin()
        ids = await region.create("kept", count=4)
        for id in ids:
            await region.becomes(id, "active")

        def guests() -> list[tuple[str, str, int]]:
            found = [(id, driver.host, driver._store.get(id)) for id in ids for driver in region.drivers()]
            return [(id, host, guest.epoch) for id, host, guest in found if guest is not None]

        before = guests()
        await clock.sleep(60.0)  # a conductor that has just started waits for silent hosts in any case
        await disturb(region, ids)
        await clock.sleep(120.0)
        for id in ids:
            await settled(region, id)
        assert guests() == before
        await region.check()
        await region.end()

    simulate(seed, run)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", seeds())
def test_everything_at_random(seed: int, template: Path, tmp_path: Path) -> None:
    """Several disturbances at once or one after the other, and faults of single messages and transactions."""
    random = Random(seed)
    happened: list[str] = []

    def choose(point: Point) -> str | None:
        if len(happened) >= MAX_FAULTS or point.kind not in HARMLESS or random.random() > 0.01:
            return None
        fault = random.choice(HARMLESS[point.kind])
        happened.append(f"{point}: {fault}")
        return fault

    async def disturb(region: SimulatedRegion) -> None:
        region.fault_plan.armed = True
        under_way = []
        for _ in range(random.randint(2, 5)):
            name = random.choice(list(ROLES))
            seconds = random.choice((5.0, 30.0, 60.0, 300.0))
            what = random.choice(("bus", "database", "both", "crash", "still", "pool"))
            happened.append(f"at {region.clock.monotonic():.0f}: {what} {name} {seconds:.0f} s")
            if what == "crash":
                work = region.crash(name)
            elif what == "still":
                work = region.stand_still(name, min(seconds, 60.0))
            elif what == "pool":
                work = region.exhaust_pool(name, seconds)
            else:
                work = region.outage(seconds, bus=what != "database", database=what != "bus")
            under_way.append(asyncio.create_task(work))
            await region.clock.sleep(random.uniform(0.0, 90.0))
        for each in under_way:
            await each

    try:
        _run(seed, template, tmp_path, disturb, FaultPlan(choose))
    except BaseException as error:
        error.add_note(f"seed {seed}; what happened: {happened}")
        raise
