"""Moves that a later request has ended: what they did to the guest is undone, whoever dies meanwhile."""

from typing import Any

import pytest
import sqlalchemy as sa

from micronova.cli.audit import run_audit
from micronova.conductor import heartbeat_transaction
from micronova.conductor.rpcapi import HostConductorAPI
from micronova.db.tables import departures
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.crashes import Crashes
from tests.functional.servers.killable_host import KillableHost, killable_host  # noqa: F401

pytestmark = [pytest.mark.thorough, only_in_one_process("kills hosts and conductors")]
crashes = Crashes()
CLOUD = CloudOptions(
    hosts=2,
    after_commit=crashes,
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 1.0, "allow_resize_to_same_host": True},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)
LIVE = {"host": None, "block_migration": "auto"}
WORK: list[tuple[str, str, Any]] = [
    ("migrate", "export_disks", None),
    ("os-migrateLive", "live_migrate", LIVE),
    ("resize", "power_on", {"flavorRef": "2"}),
]


@pytest.fixture(autouse=True)
def resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)


async def _struck(cloud: OneProcess, host: KillableHost) -> None:
    async def probe() -> bool | None:
        return True if any(rule["hits"] for rule in host.driver.fault_rules()) else None

    await cloud.until(probe, "the fault to strike")


async def _only_host(user: Caller, host: str, status: str) -> None:
    """Disable all other hosts, or enable them."""
    for service in (await user.admin.get("/os-services?binary=nova-compute"))["services"]:
        if service["host"] != host:
            await user.admin.put(f"/os-services/{service['id']}", {"status": status})


async def _works(cloud: OneProcess, user: Caller, host: KillableHost, action: str, call: str, body: Any) -> str:
    """Return a server of a host on which a move is at a call of the driver, which hangs."""
    name = f"busy-{action}"
    await host.start()
    id = (await user.boot(flavorRef="1", name=name))["id"]
    assert await user.host_of(id) == host.name
    host.driver.set_fault_rules([{"operation": call, "kind": "hang", "name": name, "count": 1}])
    if action == "resize":
        await _only_host(user, host.name, "disabled")
    await user.admin.act(id, action, body)
    await _struck(cloud, host)
    await _only_host(user, host.name, "enabled")
    return str(id)


async def _as_before(cloud: OneProcess, user: Caller, host: KillableHost, id: str) -> None:
    """Check that a server is on its host, and that its guest runs there with the flavor's size, and nowhere else."""
    await cloud.settled()
    shown = await user.show(id)
    assert (shown["status"], shown["OS-EXT-STS:power_state"], await user.host_of(id)) == ("ACTIVE", 1, host.name)
    guest = await host.driver.info(id)
    assert (guest.power_state, guest.memory_mb) == (1, shown["flavor"]["ram"])
    await cloud.assert_clean()


async def _given_up(cloud: OneProcess, user: Caller, host: KillableHost, id: str, name: str, times: int = 1) -> None:
    """Kill a host, evacuate a server, and let the host return before the server is built elsewhere."""
    await host.kill()
    await host.wait_until_down()
    async with cloud.faults({"operation": "spawn", "kind": "delay", "delay": 2.0, "name": name}):
        for _ in range(times):
            await user.admin.at(94).act(id, "evacuate", {}, 200)
            await cloud.fault_struck()
        await host.start()

        async def ended() -> bool | None:
            actions = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
            return True if ("evacuate", "Error") in [(each["action"], each["message"]) for each in actions] else None

        await cloud.until(ended, "the evacuation to end")


@pytest.mark.parametrize(("action", "call", "body"), WORK)
async def test_a_move_that_an_evacuation_interrupted_and_that_is_given_up(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, action: str, call: str, body: Any
) -> None:
    id = await _works(cloud, user, killable_host, action, call, body)
    await _given_up(cloud, user, killable_host, id, f"busy-{action}")
    await _as_before(cloud, user, killable_host, id)


async def test_an_evacuation_that_was_sent_twice(cloud: OneProcess, user: Caller, killable_host: KillableHost) -> None:
    """The second one interrupts nothing but the first, which has changed nothing on the host."""
    await killable_host.start()
    id = (await user.boot(flavorRef="1", name="twice"))["id"]
    await _given_up(cloud, user, killable_host, id, "twice", times=2)
    await _as_before(cloud, user, killable_host, id)


async def test_a_resize_whose_report_was_lost_leaves_no_larger_guest(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guest has its new size; the claim that is left is that of the old one."""
    report = HostConductorAPI.report
    held = cloud.process.clock

    async def lost(self: Any, found: Any, context: Any) -> Any:
        guest = await killable_host.driver.info(id)
        while found.host == killable_host.name and guest is not None and guest.memory_mb == 2048:
            await held.sleep(3600)
        return await report(self, found, context)

    await killable_host.start()
    id = (await user.boot(flavorRef="1", name="larger"))["id"]
    await _only_host(user, killable_host.name, "disabled")
    monkeypatch.setattr(HostConductorAPI, "report", lost)
    await user.act(id, "resize", {"flavorRef": "2"})

    async def resized() -> bool | None:
        guest = await killable_host.driver.info(id)
        return True if (guest.memory_mb, guest.power_state) == (2048, 1) else None

    await cloud.until(resized, "the guest to have its new size")
    await _only_host(user, killable_host.name, "enabled")
    monkeypatch.setattr(HostConductorAPI, "report", report)
    await _given_up(cloud, user, killable_host, id, "larger")
    await _as_before(cloud, user, killable_host, id)


RESETS = [("os-migrateLive", "receive_live_guest", LIVE), ("migrate", "import_guest", None)]


@pytest.mark.parametrize(("action", "call", "body"), RESETS)
@pytest.mark.parametrize("crash", [None, ("undo_move", "dispatched")])
async def test_a_reset_at_the_last_step_of_a_move(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, action: str, call: str, body: Any, crash: Any
) -> None:
    """All hosts are up; the source has paused its guest or switched it off. The conductor that undoes it may die."""
    await killable_host.start()
    name = f"reset-{action}"
    id = (await user.boot(flavorRef="1", name=name))["id"]
    async with cloud.faults({"operation": call, "kind": "hang", "name": name, "count": 1}):
        await user.admin.act(id, action, body)
        await cloud.fault_struck()
        crashes.next = crash
        await user.admin.act(id, "os-resetState", {"state": "active"})
        await _as_before(cloud, user, killable_host, id)


@pytest.mark.parametrize("reverts", [False, True])
async def test_a_reset_while_a_resize_on_one_host_changes_the_guest(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, reverts: bool
) -> None:
    """Its agent dies, too. Until the guest is what it was, the server has a task state, and can be deleted."""
    await killable_host.start()
    await _only_host(user, killable_host.name, "disabled")
    id = (await user.boot(flavorRef="1", name="same"))["id"]
    if reverts:
        await user.act(id, "resize", {"flavorRef": "2"})
        await user.wait_for(id, "VERIFY_RESIZE")
    killable_host.driver.set_fault_rules([{"operation": "power_on", "kind": "hang", "name": "same", "count": 1}])
    await user.act(id, *(("revertResize",) if reverts else ("resize", {"flavorRef": "2"})))
    await _struck(cloud, killable_host)
    await _only_host(user, killable_host.name, "enabled")
    await killable_host.kill()
    for _ in range(2):
        await user.admin.act(id, "os-resetState", {"state": "active"})
        assert (await user.admin.show(id))["OS-EXT-STS:task_state"] == "resize_reverting"
    await user.refused(409, "POST", f"/servers/{id}/action", {"os-stop": None})
    await killable_host.wait_until_down()
    await killable_host.start()
    await _as_before(cloud, user, killable_host, id)


async def test_a_reset_while_the_destination_of_a_revert_removes_its_guest(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    """The source runs its guest only when the destination has none any more; the audit names that one meanwhile."""
    await killable_host.start()
    id = (await user.boot(flavorRef="1", name="two"))["id"]
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "VERIFY_RESIZE")
    destination = await user.host_of(id)

    async def named() -> bool | None:
        return True if id in [each["subject"] for each in await run_audit(cloud.process)] else None

    async def runs() -> bool | None:
        guest = await killable_host.driver.info(id)
        return True if guest.power_state == 1 else None

    async with cloud.faults({"operation": "destroy", "kind": "delay", "delay": 4.0, "name": "two"}):
        await user.act(id, "revertResize")
        await cloud.fault_struck()
        await user.admin.act(id, "os-resetState", {"state": "active"})
        await cloud.until(named, "the audit to name the guest on the destination")
        assert await runs() is None
        await cloud.until(runs, "the guest on the source to run")
        assert id not in await cloud.guests(destination)
    await _as_before(cloud, user, killable_host, id)


@pytest.mark.parametrize("waits", [False, True])
async def test_another_reset_ends_an_undo_that_hangs(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, waits: bool
) -> None:
    """The source hangs, or the undo waits because the destination hangs. The server can be used again."""
    await killable_host.start()
    id = (await user.boot(flavorRef="1", name="hangs"))["id"]
    rules = [{"operation": "import_guest", "kind": "hang", "name": "hangs", "count": 1}]
    if waits:
        rules.append({"operation": "destroy", "kind": "delay", "delay": 6.0, "name": "hangs"})
    async with cloud.faults(*rules):
        await user.admin.act(id, "migrate")
        await cloud.fault_struck()
        if not waits:
            killable_host.driver.set_fault_rules([{"operation": "power_on", "kind": "hang", "name": "hangs"}])
        for _ in range(2):  # the second one comes at once: the undo does not hang yet
            await user.admin.act(id, "os-resetState", {"state": "active"})
            assert (await user.admin.show(id))["OS-EXT-STS:task_state"] == "resize_reverting"
        if not waits:
            await _struck(cloud, killable_host)

        async def ended() -> bool | None:
            await user.admin.act(id, "os-resetState", {"state": "active"})
            return True if (await user.admin.show(id))["OS-EXT-STS:task_state"] is None else None

        await cloud.until(ended, "the undo to be ended")
    killable_host.driver.set_fault_rules([])
    await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE", task=None)
    if waits:  # the audit names the guest until then

        async def removed() -> bool | None:
            left = await cloud.read(sa.select(departures).where(departures.c.instance_uuid == id))
            return None if list(left) else True

        await cloud.until(removed, "the destination to remove its guest")
    await _as_before(cloud, user, killable_host, id)


async def test_a_server_whose_move_is_undone_can_be_evacuated_and_deleted(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    """The host does not come back in time: nothing is left to undo."""
    for later in ("evacuate", "delete"):
        id = await _works(cloud, user, killable_host, "migrate", "export_disks", None)
        await killable_host.kill()
        await user.admin.act(id, "os-resetState", {"state": "active"})
        await killable_host.wait_until_down()
        if later == "evacuate":
            await user.admin.at(94).act(id, "evacuate", {}, 200)
            await user.wait_for(id, "ACTIVE", task=None)
            assert await user.host_of(id) != killable_host.name
            await cloud.settled()
        await user.delete(f"/servers/{id}")
        await user.gone(id)
        await cloud.settled()


async def test_a_live_migration_that_is_aborted_while_its_source_dies(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    id = await _works(cloud, user, killable_host, "os-migrateLive", "live_migrate", LIVE)
    [migration] = (await user.admin.at(24).get(f"/servers/{id}/migrations"))["migrations"]
    await killable_host.kill()
    await user.admin.at(24).request("DELETE", f"/servers/{id}/migrations/{migration['id']}")
    await killable_host.start()
    await _as_before(cloud, user, killable_host, id)
