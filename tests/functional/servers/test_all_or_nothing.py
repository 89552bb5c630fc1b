"""A request for several servers places all or none, also if its operations are interrupted and taken up again.

The cloud has resources for three of the servers on each host; one more than the sum is too many.
"""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.conductor.operations import build, engine
from micronova.conductor.rpcapi import ConductorAPI
from micronova.db.tables import operations
from micronova.objects.errors import Unavailable
from micronova.scheduler.manager import SchedulerManager
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.crashes import Crashes

HOSTS = 2
TOO_MANY = 3 * HOSTS + 1
LEASE = 60.0  # longer than any pause before an operation is tried again

crashes = Crashes()
pytestmark = only_in_one_process("crashes the conductor at chosen steps, and holds the scheduler")
CLOUD = CloudOptions(
    hosts=HOSTS,
    after_commit=crashes,
    settings={"default": {"report_interval": 0.1}, "conductor": {"lease": LEASE, "sweep_interval": 0.05}},
)


@pytest_asyncio.fixture(loop_scope="module")
async def flavor(user: Caller) -> AsyncIterator[str]:
    """A flavor of which three servers fit on a host."""
    wanted = {"name": user.project, "ram": (262_144 - 512) // 3, "vcpus": 1, "disk": 1}
    yield str((await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"])


async def _request(user: Caller, **fields: Any) -> list[str]:
    answer = await user.post("/servers", user.body(return_reservation_id=True, **fields))
    listed = await user.admin.get(f"/servers/detail?reservation_id={answer['reservation_id']}")
    return [server["id"] for server in listed["servers"]]


async def _assert_none_is_placed(cloud: OneProcess, user: Caller, ids: Sequence[str]) -> None:
    shown = [await user.wait_for(id, "ERROR", "ACTIVE") for id in ids]
    assert [server["status"] for server in shown] == ["ERROR"] * TOO_MANY
    assert all("not enough hosts" in server["fault"]["message"] for server in shown)
    await cloud.assert_clean()


async def test_a_sweep_takes_all_operations_of_a_request_or_none(
    cloud: OneProcess, user: Caller, flavor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request has more operations than a sweep looks for, and the message about them is lost."""

    async def lost(*_: Any) -> None:
        """Lose the message, so that only the sweep finds the operations."""

    monkeypatch.setattr(ConductorAPI, "run_operations", lost)
    monkeypatch.setattr(engine, "MOST_SWEPT", 2)
    ids = await _request(user, flavorRef=flavor, min_count=TOO_MANY, max_count=TOO_MANY)
    await _assert_none_is_placed(cloud, user, ids)


async def test_a_conductor_that_dies_while_it_fails_them_leaves_no_part_to_place(
    cloud: OneProcess, user: Caller, flavor: str
) -> None:
    crashes.next = ("build", "failed")
    ids = await _request(user, flavorRef=flavor, min_count=TOO_MANY, max_count=TOO_MANY)

    async def crashed() -> bool | None:
        return True if crashes.next is None else None

    await cloud.until(crashed, "the crash")
    assert cloud.process.database is not None
    expired = operations.update().where(operations.c.finished_at.is_(None)).values(lease_until=0)
    await cloud.process.database.write(lambda conn: conn.execute(expired))
    await _assert_none_is_placed(cloud, user, ids)


async def test_a_conductor_that_dies_between_two_parts_of_a_dispatch_has_placed_all(
    cloud: OneProcess, user: Caller, flavor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers that are not dispatched yet keep the resources that they hold: another request gets none."""
    monkeypatch.setattr(build, "DISPATCHED_TOGETHER", 2)
    crashes.next = ("build", "dispatched")
    ids = await _request(user, flavorRef=flavor, min_count=TOO_MANY - 1, max_count=TOO_MANY - 1)

    async def crashed() -> bool | None:
        return True if crashes.next is None else None

    await cloud.until(crashed, "the crash")
    waiting = [row for row in await cloud.open_operations() if row.step == "schedule"]
    assert len(waiting) == TOO_MANY - 1 - 2
    other = await user.create(flavorRef=flavor)
    assert "No valid host" in (await user.wait_for(other, "ERROR"))["fault"]["message"]
    assert cloud.process.database is not None
    expired = operations.update().where(operations.c.finished_at.is_(None)).values(lease_until=0)
    await cloud.process.database.write(lambda conn: conn.execute(expired))
    for id in ids:
        await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_operations_that_are_tried_later_are_tried_together(
    cloud: OneProcess, user: Caller, flavor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a request wait for the same moment: no sweep comes between two of them."""
    place = SchedulerManager._place
    unavailable = True

    async def sometimes(manager: SchedulerManager, request: Any) -> Any:
        if unavailable:
            raise Unavailable("not now")
        return await place(manager, request)

    monkeypatch.setattr(SchedulerManager, "_place", sometimes)
    ids = await _request(user, flavorRef=flavor, min_count=TOO_MANY, max_count=TOO_MANY)
    due = sa.select(operations.c.lease_until).where(operations.c.instance_uuid.in_(ids), operations.c.leases > 0)

    async def all_wait() -> list[int] | None:
        times = list(await cloud.read(due))
        soon = (time.time() + LEASE * 3 / 4) * 1e6
        return times if len(times) == TOO_MANY and all(each.lease_until < soon for each in times) else None

    assert len(set(await cloud.until(all_wait, "all to wait"))) == 1
    unavailable = False
    await _assert_none_is_placed(cloud, user, ids)
