"""A build whose hosts go down one after the other ends; hosts that go down with all others do not count."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from micronova.conductor import heartbeat_transaction
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.killable_host import KillableHost

pytestmark = only_in_one_process("kills hosts")
CLOUD = CloudOptions(
    hosts=2,
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 1.0},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
        "scheduler": {"max_attempts": 1},
    },
)
SLOW = {"operation": "spawn", "kind": "hang"}


@pytest.fixture(autouse=True)
def resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)


@pytest_asyncio.fixture(loop_scope="module")
async def victims(cloud: OneProcess, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[KillableHost]]:
    """Three hosts that the scheduler prefers, the first one most."""
    made = []
    for number in range(3):
        path = tmp_path_factory.mktemp(f"victim-{number}")
        room = {"memory_mb": 1 << (24 - number), "vcpus": 1 << (12 - number), "local_gb": 1 << (20 - number)}
        made.append(KillableHost(cloud, path.name, path, **room))
    yield made
    await cloud.delete_all()
    for each in made:
        await each.stop()


async def _killed_while_building(cloud: OneProcess, id: str, host: KillableHost) -> None:
    """Kill a host when it has begun to build a server."""

    async def begun() -> bool | None:
        return True if await host.has_guest(id) else None

    await cloud.until(begun, f"{host.name} to begin the guest")
    await host.kill()


async def test_a_build_that_ends_its_hosts_is_not_sent_to_all_of_them(
    cloud: OneProcess, user: Caller, victims: list[KillableHost]
) -> None:
    """The first host that is lost is replaced, as the outage of one host must cost no server."""
    for each in victims:
        await each.start(SLOW)
    id = await user.create()
    await _killed_while_building(cloud, id, victims[0])
    await _killed_while_building(cloud, id, victims[1])
    fault = (await user.wait_for(id, "ERROR"))["fault"]
    assert "2 hosts went down one after the other while they built instance" in fault["message"]
    assert not [each.name for each in victims if each.name in fault["message"]]
    assert not await victims[2].has_guest(id), "it was not tried"
    for each in victims[:2]:
        await each.start()
        await each.guest_removed(id)
    await cloud.assert_clean()


async def test_a_host_that_is_lost_when_no_other_is_up_does_not_count(
    cloud: OneProcess, user: Caller, victims: list[KillableHost]
) -> None:
    first, second, _ = victims
    await first.start(SLOW)
    id = await user.create()
    async with AsyncExitStack() as outage:
        for host in cloud.hosts:
            await outage.enter_async_context(cloud.forced_down(host))
        await _killed_while_building(cloud, id, first)
        await user.wait_for(id, "BUILD", task="scheduling")
        await second.start(SLOW)
        await _killed_while_building(cloud, id, second)
        await second.wait_until_down()
        await user.wait_for(id, "BUILD", task="scheduling")
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) in cloud.hosts
    for each in (first, second):
        await each.start()
        await each.guest_removed(id)
    await cloud.assert_clean()
