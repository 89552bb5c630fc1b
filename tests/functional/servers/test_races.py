"""Several conductors and schedulers in one process compete for the last resources and quotas."""

import asyncio
import collections
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from micronova.cli.roles.conductor import make as make_conductor
from micronova.cli.roles.scheduler import make as make_scheduler
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.races import Client, fill, race_for_quota

CAPACITY_PER_HOST = 10
pytestmark = [
    pytest.mark.thorough,
    only_in_one_process("hosts have ten CPUs; tests/integration/test_races.py has processes"),
]

CLOUD = CloudOptions(hosts=4, settings={"default": {"cpu_allocation_ratio": 1.0}, "fake": {"vcpus": CAPACITY_PER_HOST}})


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def more(cloud: OneProcess) -> AsyncIterator[None]:
    """Three more conductors and three more schedulers, each with its own view of the hosts."""
    roles: list[Any] = []
    for _ in range(3):
        roles += [await make_conductor(cloud.process), await make_scheduler(cloud.process)]
    for role in roles:
        await role.start()
    yield
    for role in roles:
        await role.stop()


def _client(user: Caller) -> Client:
    return Client(user.cloud.transport.request, user.project)


async def test_more_requests_than_there_is_room(cloud: OneProcess, user: Caller) -> None:
    capacity = CAPACITY_PER_HOST * len(cloud.hosts)
    servers = await fill(_client(user), capacity * 5 // 3, patience=60)
    ends = collections.Counter(server["status"] for server in servers)
    assert ends == {"ACTIVE": capacity, "ERROR": len(servers) - capacity}
    hosts = collections.Counter(s["OS-EXT-SRV-ATTR:host"] for s in servers if s["status"] == "ACTIVE")
    assert hosts == dict.fromkeys(cloud.hosts, CAPACITY_PER_HOST)
    for server in servers:
        if server["status"] == "ERROR":
            assert "There are not enough hosts available: no host" in server["fault"]["message"]
    await cloud.assert_clean()


async def test_several_at_once_are_placed_whole_or_not_at_all(cloud: OneProcess, user: Caller) -> None:
    """Requests for three servers each, with a capacity that is no multiple of three."""
    answers = await asyncio.gather(
        *(user.post("/servers", user.body(min_count=3, return_reservation_id=True)) for _ in range(20))
    )
    await cloud.settled()
    active = 0
    for answer in answers:
        listed = await user.get(f"/servers/detail?reservation_id={answer['reservation_id']}")
        states = {server["status"] for server in listed["servers"]}
        assert len(states) == 1
        active += 3 * (states == {"ACTIVE"})
    assert active == 39, "40 fit, in threes"
    await cloud.assert_clean()


@pytest.mark.parametrize("turn", range(2))
async def test_more_requests_than_the_quota_allows(cloud: OneProcess, user: Caller, turn: int) -> None:
    await race_for_quota(_client(user), 50, 10)
