"""Hosts that die: their builds continue on other hosts, and guests that left them are removed when they return."""

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.conductor import heartbeat_transaction
from micronova.db.tables import departures
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.crashes import Crashes
from tests.functional.servers.killable_host import KillableHost, killable_host  # noqa: F401

crashes = Crashes()
pytestmark = [
    pytest.mark.thorough,
    only_in_one_process("kills hosts; tests/integration/test_kill.py kills processes"),
]

CLOUD = CloudOptions(
    hosts=2,
    after_commit=crashes,
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 1.0},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)
SLOW = {"operation": "spawn", "kind": "hang"}


@pytest.fixture(autouse=True)
def resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)


async def _departures(cloud: Cloud, host: KillableHost) -> set[str]:
    rows = await cloud.read(sa.select(departures).where(departures.c.host == host.name))
    return {row.instance_uuid for row in rows}


async def _building_on(user: Caller, host: KillableHost, **fields: Any) -> str:
    id = await user.create(**fields)
    await user.wait_for(id, "BUILD", task="spawning")
    assert await user.host_of(id) == host.name

    async def begun() -> bool | None:
        return True if await host.has_guest(id) else None

    await user.cloud.until(begun, "the guest to be half built")
    return id


@pytest.mark.parametrize("crash", [None, ("build", "rescheduled")])
async def test_a_build_that_dies_with_its_host_is_done_elsewhere(
    cloud: Cloud, user: Caller, killable_host: KillableHost, crash: tuple[str, str] | None
) -> None:
    await killable_host.start(SLOW)
    id = await _building_on(user, killable_host)
    crashes.next = crash
    await killable_host.kill()
    server = await user.wait_for(id, "ACTIVE")
    assert crashes.next is None
    assert await user.host_of(id) in cloud.hosts
    assert "fault" not in server
    assert await killable_host.has_guest(id), "the dead host could not clean up"
    assert await _departures(cloud, killable_host) == {id}
    [action] = (await user.admin.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    shown = (await user.admin.get(f"/servers/{id}/os-instance-actions/{action['request_id']}"))["instanceAction"]
    last, first = shown["events"]
    assert (first["result"], first["host"]) == ("Error", killable_host.name)
    assert "does not answer" in first["details"]
    assert last["result"] == "Success"
    await cloud.assert_clean()
    await killable_host.start()
    await killable_host.guest_removed(id)

    async def forgotten() -> bool | None:
        return None if await _departures(cloud, killable_host) else True

    await cloud.until(forgotten, "the record of the departure to be erased")
    assert (await user.show(id))["status"] == "ACTIVE"
    assert await user.host_of(id) in cloud.hosts
    await cloud.assert_clean()


async def test_a_host_that_comes_back_in_time_goes_on(cloud: Cloud, user: Caller, killable_host: KillableHost) -> None:
    await killable_host.start(SLOW)
    id = await _building_on(user, killable_host)
    await killable_host.kill()
    await killable_host.start()
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == killable_host.name
    assert await killable_host.has_guest(id)
    await cloud.assert_clean()


async def test_a_server_that_was_sent_to_this_host_only(
    cloud: Cloud, user: Caller, killable_host: KillableHost, notifications: Any
) -> None:
    await killable_host.start(SLOW)
    id = await user.admin.create(availability_zone=f"nova:{killable_host.name}")
    await user.wait_for(id, "BUILD", task="spawning")
    await killable_host.kill()
    server = await user.wait_for(id, "ERROR")
    assert "does not answer" in server["fault"]["message"]
    assert killable_host.name not in server["fault"]["message"]

    async def all_told() -> list[str] | None:
        return [event for event, _, _ in notifications] if len(notifications) > 1 else None

    assert await cloud.until(all_told, "the notifications") == ["create.start", "create.error"]
    await killable_host.start()
    await killable_host.guest_removed(id)
    await cloud.assert_clean()


@pytest.mark.parametrize("crash", [None, ("delete", "without host")])
async def test_a_server_on_a_dead_host_can_be_deleted(
    cloud: Cloud, user: Caller, killable_host: KillableHost, crash: tuple[str, str] | None
) -> None:
    await killable_host.start()
    id = (await user.boot())["id"]
    assert await user.host_of(id) == killable_host.name
    await killable_host.kill()
    await killable_host.wait_until_down()
    crashes.next = crash
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    assert crashes.next is None
    assert await killable_host.has_guest(id)
    await cloud.assert_clean()
    await killable_host.start()
    await killable_host.guest_removed(id)
    await cloud.assert_clean()


async def test_a_host_that_dies_while_it_deletes(cloud: Cloud, user: Caller, killable_host: KillableHost) -> None:
    await killable_host.start({"operation": "destroy", "kind": "hang"})
    id = (await user.boot())["id"]
    await user.delete(f"/servers/{id}")

    async def dispatched() -> bool | None:
        return True if any(row.owner == f"host:{killable_host.name}" for row in await cloud.open_operations()) else None

    await cloud.until(dispatched, "the order to be given")
    await killable_host.kill()
    await user.gone(id)
    await killable_host.start()
    await killable_host.guest_removed(id)
    await cloud.assert_clean()


async def test_deleted_while_its_host_is_dying(cloud: Cloud, user: Caller, killable_host: KillableHost) -> None:
    await killable_host.start(SLOW)
    id = await _building_on(user, killable_host)
    await killable_host.kill()
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await killable_host.start()
    await killable_host.guest_removed(id)
    await cloud.assert_clean()


async def test_servers_of_a_host_that_was_away_are_as_they_were(
    cloud: Cloud, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start()
    ids = await user.boot_many(3)
    assert {await user.host_of(id) for id in ids} == {killable_host.name}
    await killable_host.kill()
    await killable_host.wait_until_down()
    shown = await user.admin.show(ids[0])
    assert (shown["status"], shown["host_status"]) == ("ACTIVE", "UNKNOWN")
    await killable_host.start()
    for id in ids:
        assert (await user.show(id))["status"] == "ACTIVE"
        assert await killable_host.has_guest(id)
    await cloud.assert_clean()


async def test_console_output_of_a_dead_host(cloud: Cloud, user: Caller, killable_host: KillableHost) -> None:
    await killable_host.start()
    id = (await user.boot())["id"]
    await killable_host.kill()
    await killable_host.wait_until_down()
    message = await user.refused(503, "POST", f"/servers/{id}/action", {"os-getConsoleOutput": {}})
    assert killable_host.name not in message
    await killable_host.start()
    assert "login" in (await user.act(id, "os-getConsoleOutput", {}, 200))["output"]


async def test_an_order_to_a_dead_host_waits_for_it(cloud: Cloud, user: Caller, killable_host: KillableHost) -> None:
    await killable_host.start()
    id = (await user.boot())["id"]
    await killable_host.kill()
    await killable_host.wait_until_down()
    await user.act(id, "os-stop")
    assert (await user.show(id))["OS-EXT-STS:task_state"] == "powering-off"
    await killable_host.start()
    await user.wait_for(id, "SHUTOFF")
    await cloud.assert_clean()


async def test_a_guest_that_stopped_while_the_agent_was_dead(
    cloud: Cloud, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start()
    one, two = await user.boot_many(2)
    killable_host.driver.guest_stops(one)
    await user.wait_for(one, "SHUTOFF")
    await killable_host.kill()
    killable_host.driver.guest_stops(two)
    await killable_host.start()
    stopped = await user.wait_for(two, "SHUTOFF")
    assert stopped["OS-EXT-STS:power_state"] == 4


async def test_a_clean_stop_undoes_and_the_build_goes_on_elsewhere_or_later(
    cloud: Cloud, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start(SLOW)
    ids = await asyncio.gather(*(user.create() for _ in range(3)))
    await asyncio.gather(*(user.wait_for(id, "BUILD", task="spawning") for id in ids))
    await killable_host.stop()
    for id in ids:
        assert not await killable_host.has_guest(id)
    next_one = await user.boot()
    assert await user.host_of(next_one["id"]) in cloud.hosts, "no order is sent to a host that has stopped"
    servers = await asyncio.gather(*(user.wait_for(id, "ACTIVE") for id in ids))
    assert {await user.host_of(server["id"]) for server in servers} <= set(cloud.hosts)
    await cloud.assert_clean()


async def test_there_is_no_valid_host_when_all_hosts_stay_away(
    cloud: Cloud, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start()
    await killable_host.stop()
    id = await user.admin.create(host=killable_host.name)
    assert "No valid host" in (await user.wait_for(id, "ERROR"))["fault"]["message"]
    await cloud.assert_clean()
