"""Hosts that are silent and not lost, because the bus or their agent was away: their servers keep their guests."""

import pytest

from micronova.conductor import heartbeat_transaction
from micronova.rpc.bus import Bus
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.killable_host import KillableHost, killable_host  # noqa: F401
from tests.functional.servers.paused_bus import PausedBus

pytestmark = [pytest.mark.thorough, only_in_one_process("stops the bus and agents")]
buses: list[PausedBus] = []


def _wrap(bus: Bus) -> Bus:
    buses[:] = [PausedBus(bus)]
    return buses[0]


CLOUD = CloudOptions(
    hosts=3,
    wrap_bus=_wrap,
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 1.0},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)


@pytest.fixture(autouse=True)
def resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)


async def _last_action(user: Caller, id: str) -> tuple[str, str | None]:
    [last, *_] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    return last["action"], last["message"]


async def test_an_evacuation_that_was_accepted_during_an_outage(cloud: OneProcess, user: Caller) -> None:
    id = (await user.boot())["id"]
    home = await user.host_of(id)
    before = (await cloud.guests(home))[id]
    async with buses[0].outage(cloud, user):
        await user.admin.act(id, "evacuate", {}, 200)
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == home
    assert (await cloud.guests(home))[id] == before
    assert await _last_action(user, id) == ("evacuate", "Error")
    await cloud.assert_clean()


async def test_no_evacuation_while_an_agent_restarts(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start()
    id = (await user.boot())["id"]
    assert await user.host_of(id) == killable_host.name
    await killable_host.stop()
    await killable_host.wait_until_down()
    path = f"/servers/{id}/action"
    assert "may return" in await user.admin.refused(400, "POST", path, {"evacuate": {}})
    [service] = (await user.admin.get(f"/os-services?binary=nova-compute&host={killable_host.name}"))["services"]
    await user.admin.put(f"/os-services/{service['id']}", {"forced_down": True})
    await user.admin.at(94).act(id, "evacuate", {}, 200)  # who forces a host down knows that it is lost
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) in cloud.hosts
    await killable_host.start_unheard()
    await killable_host.guest_removed(id)
    await cloud.assert_clean()


async def test_a_host_that_was_stopped_for_long_is_lost(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start()
    id = (await user.boot())["id"]
    await killable_host.stop()

    async def accepted() -> bool | None:
        answer = await user.admin.at(94).request("POST", f"/servers/{id}/action", {"evacuate": {}})
        return True if answer.status == 200 else None

    await cloud.until(accepted, "the stopped host to be lost")
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) in cloud.hosts
    await killable_host.start()
    await killable_host.guest_removed(id)
    await cloud.assert_clean()


async def test_a_host_that_returns_while_its_server_is_built_elsewhere(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start()
    id = (await user.boot(name="returns"))["id"]
    await killable_host.kill()
    await killable_host.wait_until_down()
    async with cloud.faults({"operation": "spawn", "kind": "delay", "delay": 3.0, "name": "returns"}):
        await user.admin.at(94).act(id, "evacuate", {}, 200)
        await cloud.fault_struck()
        await killable_host.start()
        await user.wait_for(id, "ACTIVE")
    assert await _last_action(user, id) == ("evacuate", "Error")
    assert await user.host_of(id) == killable_host.name
    assert await killable_host.has_guest(id)

    async def only_there() -> bool | None:
        return None if any([id in await cloud.guests(host) for host in cloud.hosts]) else True

    await cloud.until(only_there, "the new guest to be removed")
    await cloud.assert_clean()
