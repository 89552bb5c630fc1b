"""A host that stops releases its leases: operations that other hosts can do continue at once, the others when it is
back. No lease expires in these tests."""

import pytest

from micronova.conductor import heartbeat_transaction
from micronova.scheduler.feed import HostFeed
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.killable_host import KillableHost, killable_host  # noqa: F401

pytestmark = only_in_one_process("no lease may expire, and hosts are started and stopped within the process")
CLOUD = CloudOptions(
    hosts=2,
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 600.0},
        "conductor": {"lease": 600.0, "sweep_interval": 0.1},
    },
)


@pytest.fixture(autouse=True)
def resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)


async def test_its_builds_continue_on_other_hosts_at_once(
    cloud: Cloud, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start({"operation": "spawn", "kind": "hang"})
    ids = [await user.create() for _ in range(3)]
    for id in ids:
        await user.wait_for(id, "BUILD", task="spawning")
        assert await user.host_of(id) == killable_host.name
    await killable_host.stop()
    for id in ids:
        await user.wait_for(id, "ACTIVE")
        assert await user.host_of(id) in cloud.hosts
    [action] = (await user.admin.get(f"/servers/{ids[0]}/os-instance-actions"))["instanceActions"]
    shown = (await user.admin.get(f"/servers/{ids[0]}/os-instance-actions/{action['request_id']}"))["instanceAction"]
    assert [event["result"] for event in shown["events"]] == ["Success", "Error"]
    assert "was stopped" in shown["events"][1]["details"]
    await killable_host.start()
    for id in ids:
        assert not await killable_host.has_guest(id)
    await cloud.assert_clean()


async def test_a_scheduler_that_has_not_read_of_the_stop_sends_no_build_back(
    user: Caller, killable_host: KillableHost, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a build waited until its lease expired: the host that had stopped was chosen again."""
    await killable_host.start({"operation": "spawn", "kind": "hang"})
    id = await user.create()
    await user.wait_for(id, "BUILD", task="spawning")
    assert await user.host_of(id) == killable_host.name

    async def not_now(feed: HostFeed, max_age: float) -> None:
        pass

    monkeypatch.setattr(HostFeed, "refresh", not_now)
    await killable_host.stop()
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) in cloud.hosts


async def test_what_only_this_host_may_build_waits_for_it(
    cloud: Cloud, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start({"operation": "spawn", "kind": "hang"})
    id = await user.admin.create(availability_zone=f"nova:{killable_host.name}")
    await user.wait_for(id, "BUILD", task="spawning")
    await killable_host.stop()
    shown = await user.show(id)
    assert (shown["status"], shown["OS-EXT-STS:task_state"]) == ("BUILD", "spawning")
    await killable_host.start()
    await user.wait_for(id, "ACTIVE")
    assert await killable_host.has_guest(id)
    await cloud.assert_clean()


async def test_work_on_its_guests_waits_for_it(cloud: Cloud, user: Caller, killable_host: KillableHost) -> None:
    await killable_host.start({"operation": "power_off", "kind": "hang"}, {"operation": "destroy", "kind": "hang"})
    stopped, deleted = await user.boot_many(2)
    await user.act(stopped, "os-stop")
    await user.delete(f"/servers/{deleted}")

    async def both_ordered() -> bool | None:
        owners = [row.owner for row in await cloud.open_operations()]
        return True if owners == [f"host:{killable_host.name}"] * 2 else None

    await cloud.until(both_ordered, "both orders to be given")
    await killable_host.stop()
    assert (await user.show(stopped))["OS-EXT-STS:task_state"] == "powering-off"
    await killable_host.start()
    await user.wait_for(stopped, "SHUTOFF")
    await user.gone(deleted)
    await cloud.assert_clean()
