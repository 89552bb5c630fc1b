"""Moves whose source or destination dies: the server returns to its source, or the move continues when it is back."""

from typing import Any

import pytest
import sqlalchemy as sa

from micronova.conductor import heartbeat_transaction
from micronova.db.tables import departures
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.killable_host import KillableHost, killable_host  # noqa: F401

pytestmark = [pytest.mark.thorough, only_in_one_process("kills hosts")]

CLOUD = CloudOptions(
    hosts=2,
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 1.0, "allow_resize_to_same_host": False},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)
SMALL, MEDIUM = "2", "3"


@pytest.fixture(autouse=True)
def resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)


def _hang(call: str) -> dict[str, Any]:
    return {"operation": call, "kind": "hang", "count": 1}


async def _struck(cloud: Cloud, host: KillableHost) -> None:
    async def probe() -> bool | None:
        return True if any(rule["hits"] for rule in host.driver.fault_rules()) else None

    await cloud.until(probe, "a fault")


async def _departed(cloud: Cloud, host: KillableHost) -> None:
    """Wait until the host has removed all guests that left it."""

    async def probe() -> bool | None:
        found = await cloud.read(sa.select(departures).where(departures.c.host == host.name))
        return None if found else True

    await cloud.until(probe, f"{host.name} to have removed what left it")


async def _resized(user: Caller, id: str) -> None:
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    await user.wait_for(id, "VERIFY_RESIZE")


async def test_a_destination_that_dies_does_not_get_the_server(
    cloud: Cloud, user: Caller, killable_host: KillableHost
) -> None:
    id = (await user.boot(flavorRef=SMALL))["id"]
    source = await user.host_of(id)
    await killable_host.start(_hang("import_guest"))
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    await _struck(cloud, killable_host)
    await killable_host.kill()
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == source
    assert await killable_host.has_guest(id)
    await cloud.assert_clean()
    await killable_host.start()
    await killable_host.guest_removed(id)
    await _departed(cloud, killable_host)
    assert (await cloud.guests(source))[id].power_state == 1
    await cloud.assert_clean()


@pytest.mark.parametrize("call", ["power_off", "export_disks"])
async def test_a_source_that_dies_continues_when_it_is_back(
    cloud: Cloud, user: Caller, killable_host: KillableHost, call: str
) -> None:
    await killable_host.start(_hang(call))
    id = (await user.boot(flavorRef=SMALL))["id"]
    assert await user.host_of(id) == killable_host.name
    await user.act(id, "resize", {"flavorRef": MEDIUM})
    await _struck(cloud, killable_host)
    await killable_host.kill()
    await killable_host.wait_until_down()
    assert (await user.show(id))["status"] == "RESIZE"
    await killable_host.start()
    await user.wait_for(id, "VERIFY_RESIZE")
    assert await user.host_of(id) in cloud.hosts
    await cloud.assert_clean()


async def test_a_source_that_dies_while_a_move_is_undone(
    cloud: Cloud, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start(_hang("power_on"))
    id = (await user.boot(flavorRef=SMALL, name="undone"))["id"]
    async with cloud.faults({"operation": "import_guest", "kind": "fail", "name": "undone"}):
        await user.act(id, "resize", {"flavorRef": MEDIUM})
        await _struck(cloud, killable_host)
        await killable_host.kill()
        await killable_host.wait_until_down()
        await killable_host.start()
        await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == killable_host.name
    await cloud.assert_clean()


async def test_a_source_that_is_down_does_not_prevent_the_end(
    cloud: Cloud, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start(_hang("destroy"))
    id = (await user.boot(flavorRef=SMALL))["id"]
    await _resized(user, id)
    await user.act(id, "confirmResize", status=204)
    await _struck(cloud, killable_host)
    await killable_host.kill()
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()
    await killable_host.start()
    await killable_host.guest_removed(id)
    await _departed(cloud, killable_host)
    await cloud.assert_clean()


async def test_a_resize_is_not_confirmed_while_the_source_is_down(
    cloud: Cloud, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start()
    id = (await user.boot(flavorRef=SMALL))["id"]
    await _resized(user, id)
    await killable_host.kill()
    await killable_host.wait_until_down()
    await user.refused(409, "POST", f"/servers/{id}/action", {"confirmResize": None})
    assert (await user.show(id))["status"] == "VERIFY_RESIZE"
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await killable_host.start()
    await killable_host.guest_removed(id)
    await _departed(cloud, killable_host)
    await cloud.assert_clean()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_revert_without_the_destination(
    cloud: Cloud, user: Caller, killable_host: KillableHost, when: str
) -> None:
    id = (await user.boot(flavorRef=SMALL))["id"]
    source = await user.host_of(id)
    await killable_host.start(_hang("destroy"))
    await _resized(user, id)
    assert await user.host_of(id) == killable_host.name
    if when == "before":
        await killable_host.kill()
        await killable_host.wait_until_down()
        await user.act(id, "revertResize")
    else:
        await user.act(id, "revertResize")
        await _struck(cloud, killable_host)
        await killable_host.kill()
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == source
    path = f"/servers/{id}/os-instance-actions"
    [action, *_] = (await user.get(path))["instanceActions"]
    events = (await user.admin.get(f"{path}/{action['request_id']}"))["instanceAction"]["events"]
    begun = [] if when == "before" else [("compute_revert_resize", "Error", killable_host.name)]
    expected = [*begun, ("compute_finish_revert_resize", "Success", source)]
    assert [(event["event"], event["result"], event["host"]) for event in reversed(events)] == expected
    await cloud.assert_clean()
    await killable_host.start()
    await killable_host.guest_removed(id)
    await _departed(cloud, killable_host)
    await cloud.assert_clean()


async def test_a_resize_is_not_reverted_while_the_source_is_down(
    cloud: Cloud, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start()
    id = (await user.boot(flavorRef=SMALL))["id"]
    await _resized(user, id)
    destination = await user.host_of(id)
    await killable_host.kill()
    await killable_host.wait_until_down()
    assert "when it is back" in await user.refused(409, "POST", f"/servers/{id}/action", {"revertResize": None})
    assert (await user.show(id))["status"] == "VERIFY_RESIZE"
    assert (await cloud.guests(destination))[id].power_state == 1
    await killable_host.start()
    await user.act(id, "revertResize")
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == killable_host.name
    await cloud.assert_clean()
