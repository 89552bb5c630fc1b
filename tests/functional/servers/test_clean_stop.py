"""A host that stops cleanly says so: what others can do goes on at once, the rest when it is back. No lease runs out
in these tests."""

import pytest

from micronova.conductor import manager
from tests.functional.cloud import Caller, Cloud, Wanted
from tests.functional.servers.mortal import MortalHost, mortal  # noqa: F401

CLOUD = Wanted(
    hosts=2,
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 600.0},
        "conductor": {"lease": 600.0, "sweep_interval": 0.1},
    },
)


@pytest.fixture(autouse=True)
def resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "JUST_SENT", 100_000)


async def test_its_builds_go_on_elsewhere_at_once(cloud: Cloud, user: Caller, mortal: MortalHost):
    await mortal.start({"operation": "spawn", "kind": "hang"})
    ids = [await user.create() for _ in range(3)]
    for id in ids:
        await user.wait_for(id, "BUILD", task="spawning")
        assert await user.host_of(id) == mortal.name
    await mortal.stop()
    for id in ids:
        await user.wait_for(id, "ACTIVE")
        assert await user.host_of(id) in cloud.hosts
    [action] = (await user.admin.get(f"/servers/{ids[0]}/os-instance-actions"))["instanceActions"]
    shown = (await user.admin.get(f"/servers/{ids[0]}/os-instance-actions/{action['request_id']}"))["instanceAction"]
    assert [event["result"] for event in shown["events"]] == ["Success", "Error"]
    assert "was stopped" in shown["events"][1]["details"]
    await mortal.start()
    for id in ids:
        assert not await mortal.has(id)
    await cloud.assert_clean()


async def test_what_only_this_host_may_build_waits_for_it(cloud: Cloud, user: Caller, mortal: MortalHost):
    await mortal.start({"operation": "spawn", "kind": "hang"})
    id = await user.admin.create(availability_zone=f"nova:{mortal.name}")
    await user.wait_for(id, "BUILD", task="spawning")
    await mortal.stop()
    shown = await user.show(id)
    assert (shown["status"], shown["OS-EXT-STS:task_state"]) == ("BUILD", "spawning")
    await mortal.start()
    await user.wait_for(id, "ACTIVE")
    assert await mortal.has(id)
    await cloud.assert_clean()


async def test_work_on_its_guests_waits_for_it(cloud: Cloud, user: Caller, mortal: MortalHost):
    await mortal.start({"operation": "power_off", "kind": "hang"}, {"operation": "destroy", "kind": "hang"})
    stopped, deleted = await user.boot_many(2)
    await user.act(stopped, "os-stop")
    await user.delete(f"/servers/{deleted}")

    async def both_ordered() -> bool | None:
        owners = [row.owner for row in await cloud.open_operations()]
        return True if owners == [f"host:{mortal.name}"] * 2 else None

    await cloud.until(both_ordered, "both orders to be given")
    await mortal.stop()
    assert (await user.show(stopped))["OS-EXT-STS:task_state"] == "powering-off"
    await mortal.start()
    await user.wait_for(stopped, "SHUTOFF")
    await user.gone(deleted)
    await cloud.assert_clean()
