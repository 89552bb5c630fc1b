"""Guests that should run are started again when their host is back; others stay as they are."""

import pytest

from micronova.conductor import heartbeat_transaction, rpcapi
from micronova.conductor.operations import engine
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.killable_host import KillableHost, killable_host  # noqa: F401

pytestmark = only_in_one_process("changes guests in the driver")
CLOUD = CloudOptions(
    hosts=2,
    settings={
        "default": {"report_interval": 0.1, "resume_guests_state_on_host_boot": True},
        "conductor": {"sweep_interval": 0.1},
    },
)


@pytest.fixture(autouse=True)
def resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)


async def _history(cloud: OneProcess, user: Caller, id: str, *wanted: str) -> None:
    """Wait until a server has had these actions, the newest first."""
    found: list[str] = []

    async def probe() -> bool | None:
        actions = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
        found[:] = [action["action"] for action in actions]
        return True if found == list(wanted) else None

    await cloud.until(probe, lambda: f"the actions {wanted}; there are {found}")


async def test_servers_that_ran_run_again(cloud: OneProcess, user: Caller, killable_host: KillableHost) -> None:
    await killable_host.start()
    ran, stopped, paused = await user.boot_many(3)
    await user.act(stopped, "os-stop")
    await user.wait_for(stopped, "SHUTOFF")
    await user.act(paused, "pause")
    await user.wait_for(paused, "PAUSED")
    await killable_host.stop()
    for id in (ran, paused):
        killable_host.driver.guest_stops(id)  # as when the machine is switched off
    await killable_host.start()
    await _history(cloud, user, ran, "start", "create")
    assert (await user.wait_for(ran, "ACTIVE", task=None))["OS-EXT-STS:power_state"] == 1
    assert (await user.wait_for(paused, "SHUTOFF", task=None))["OS-EXT-STS:power_state"] == 4
    assert (await user.show(stopped))["status"] == "SHUTOFF"
    await _history(cloud, user, stopped, "stop", "create")
    await cloud.assert_clean()


async def test_a_start_that_fails_leaves_the_server_off(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start()
    id = (await user.boot())["id"]
    await killable_host.stop()
    killable_host.driver.guest_stops(id)
    await killable_host.start({"operation": "power_on", "kind": "fail"})
    await user.wait_for(id, "SHUTOFF", task=None)
    actions = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert (actions[0]["action"], actions[0]["message"]) == ("start", "Error")
    await cloud.assert_clean()


async def test_a_start_waits_for_a_hypervisor_that_is_not_ready(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LONGEST_PAUSE", 0.1)
    await killable_host.start()
    id = (await user.boot())["id"]
    await killable_host.stop()
    killable_host.driver.guest_stops(id)
    await killable_host.start({"operation": "power_on", "kind": "unavailable", "count": 3})
    await _history(cloud, user, id, "start", "create")
    await user.wait_for(id, "ACTIVE", task=None)
    await cloud.assert_clean()


async def test_a_guest_that_its_owner_switches_off_stays_off(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start()
    id = (await user.boot())["id"]
    killable_host.driver.guest_stops(id)
    await user.wait_for(id, "SHUTOFF")
    await killable_host.stop()
    await killable_host.start()
    second = (await user.boot())["id"]  # a heartbeat of the new agent was answered before
    await user.wait_for(second, "ACTIVE")
    assert (await user.show(id))["status"] == "SHUTOFF"
    await cloud.assert_clean()


async def test_the_answer_may_be_lost(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    await killable_host.start()
    id = (await user.boot())["id"]
    await killable_host.stop()
    killable_host.driver.guest_stops(id)
    ask = rpcapi.HostConductorAPI.start_guests_after_host_boot
    answers: list[str] = []

    async def lose_the_first_answer(*arguments: object) -> tuple[str, ...]:
        answer = await ask(*arguments)  # type: ignore[arg-type]
        answers.extend(answer)
        if len(answers) == 1:
            raise TimeoutError("the answer was lost")
        return answer

    monkeypatch.setattr(rpcapi.HostConductorAPI, "start_guests_after_host_boot", lose_the_first_answer)
    await killable_host.start()
    await _history(cloud, user, id, "start", "create")
    await user.wait_for(id, "ACTIVE", task=None)
    await cloud.assert_clean()
