"""Hosts that are silent for some time, because they are restarted or stand still, cost builds nothing but time."""

from typing import Any

import pytest

from micronova.cli.explain import read_decisions
from micronova.conductor import heartbeat_transaction
from micronova.conductor.operations import transitions
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.killable_host import KillableHost, killable_host  # noqa: F401

pytestmark = only_in_one_process("hosts are never down here, and the conductor's health is looked into")
CLOUD = CloudOptions(
    hosts=2,
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 600.0},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
        "scheduler": {"max_attempts": 2},
    },
)
SLOW = {"operation": "spawn", "kind": "hang"}


@pytest.fixture(autouse=True)
def resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)
    monkeypatch.setattr(transitions, "LONGEST_WAIT_FOR_HOSTS", 1.0)


async def _placed_in_vain(cloud: OneProcess) -> None:
    """Wait until a build that found no host is tried again, or has failed."""

    async def probe() -> bool | None:
        rows = await cloud.open_operations()
        return True if not rows or rows[0].leases > 2 else None

    await cloud.until(probe, "the build to be tried again")


async def _decisions(cloud: OneProcess, id: str) -> list[list[dict[str, Any]]]:
    """Give what `micronova explain` tells of a server: the decisions of each operation."""
    return [request["decisions"] for request in (await read_decisions(cloud.process, id))["requests"]]


async def test_a_server_created_while_all_agents_restart_is_built_afterwards(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    """The request allows no other host, so this one is all there is."""
    await killable_host.start()
    await cloud.healthy()
    await killable_host.stop()
    id = await user.admin.create(host=killable_host.name)
    await _placed_in_vain(cloud)
    [[decision]] = await _decisions(cloud, id)
    assert decision["waits"] and decision["filters"][-1]["name"] == "ComputeFilter"
    await killable_host.start()
    await user.wait_for(id, "ACTIVE")
    assert await killable_host.has_guest(id)
    [[decision]] = await _decisions(cloud, id)
    assert "waits" not in decision and decision["winners"][0]["host"] == killable_host.name
    await cloud.assert_clean()


async def test_a_build_returns_to_its_host_that_was_lost(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    """It did not fail there, so neither is the host excluded nor do lost hosts count as attempts."""
    await killable_host.start(SLOW)
    await cloud.healthy()
    id = await user.admin.create(host=killable_host.name)
    for _ in range(3):
        await user.wait_for(id, "BUILD", task="spawning")
        await killable_host.stop()
        await user.wait_for(id, "BUILD", task="scheduling")
        await _placed_in_vain(cloud)
        await killable_host.start(SLOW)
    await user.wait_for(id, "BUILD", task="spawning")
    await killable_host.stop()
    await killable_host.start()
    await user.wait_for(id, "ACTIVE")
    assert await killable_host.has_guest(id)
    [decisions] = await _decisions(cloud, id)
    assert len(decisions) > 1 and not [each for each in decisions if "waits" in each], "decisions to wait go"
    await cloud.assert_clean()


async def test_a_build_that_finds_no_host_after_its_only_one_was_lost_says_that_it_failed(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, notifications: list[tuple[str, Any, Any]]
) -> None:
    await killable_host.start(SLOW)
    await cloud.healthy()
    id = await user.admin.create(host=killable_host.name)
    await user.wait_for(id, "BUILD", task="spawning")
    await killable_host.stop()
    await user.wait_for(id, "BUILD", task="scheduling")
    async with cloud.forced_down(killable_host.name):
        server = await user.wait_for(id, "ERROR")
    assert "The host was stopped." in server["fault"]["message"]

    async def all_told() -> list[str] | None:
        return [event for event, _, _ in notifications] if len(notifications) > 1 else None

    assert await cloud.until(all_told, "the notifications") == ["create.start", "create.error"]
    await cloud.assert_clean()


async def test_a_build_that_fails_uses_up_its_attempts_as_before(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start({"operation": "spawn", "kind": "fail"})
    id = await user.admin.create(host=killable_host.name)
    fault = (await user.wait_for(id, "ERROR"))["fault"]
    assert "Exceeded maximum number of retries" in fault["message"]
    await cloud.assert_clean()
