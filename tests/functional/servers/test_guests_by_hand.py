"""Power changes that no request caused, and hosts whose hypervisor lacks capabilities."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from micronova.cli.audit import run_audit
from micronova.objects.context import Context
from micronova.virt.fake.driver import FakeDriver
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.killable_host import KillableHost

pytestmark = only_in_one_process("changes guests in the driver, and what the driver can do")
CLOUD = CloudOptions(hosts=2, settings={"default": {"report_interval": 0.1, "service_down_time": 1.0}})


async def test_what_is_done_to_a_guest_by_hand_is_seen_at_once(cloud: OneProcess, user: Caller, tmp_path: Path) -> None:
    host = KillableHost(cloud, "by-hand", tmp_path)
    await host.start()
    id = (await user.admin.boot(availability_zone="nova:by-hand"))["id"]
    for event, status, power in (
        ("paused", "PAUSED", 3), ("resumed", "ACTIVE", 1), ("suspended", "SUSPENDED", 7), ("resumed", "ACTIVE", 1),
        ("paused", "PAUSED", 3), ("stopped", "SHUTOFF", 4), ("started", "ACTIVE", 1),
    ):  # fmt: skip
        host.driver.guest_becomes(id, event)
        server = await user.wait_for(id, status)
        assert server["OS-EXT-STS:power_state"] == power
    await cloud.assert_clean()
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await host.stop()


async def test_the_audit_sees_guests_that_differ_from_their_servers(
    cloud: OneProcess, user: Caller, tmp_path: Path
) -> None:
    """Their host does not report it: an order that nobody ended may have left them so. A set state hides nothing."""
    host = KillableHost(cloud, "differs", tmp_path)
    await host.start()
    id = (await user.admin.boot(availability_zone="nova:differs", flavorRef="1"))["id"]
    await cloud.assert_clean()
    guest = await host.driver.info(id)
    larger = {"memory_mb": 4 * guest.memory_mb}
    cases: list[tuple[str, dict[str, int]]] = [("", {"power_state": 3}), ("", {"power_state": 0}), ("", larger)]
    cases += [("active", {"power_state": 3}), ("active", larger), ("error", larger)]
    for state, wrong in cases:
        if state:
            await user.admin.act(id, "os-resetState", {"state": state})
        different = msgspec.structs.replace(guest, **wrong)

        async def guests(shown: Any = different) -> list[Any]:
            return [shown]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host.driver, "list_guests", guests)
            findings = await run_audit(cloud.process)
        assert [each["subject"] for each in findings if each["kind"] == "guest"] == [id], (state, wrong)
    await user.admin.act(id, "os-resetState", {"state": "active"})
    await cloud.assert_clean()
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await host.stop()


async def _last_action(user: Caller, id: str) -> tuple[str, str, str]:
    """Return a server's newest action, its event's result and details, as an admin sees them."""
    action = (await user.admin.get(f"/servers/{id}/os-instance-actions"))["instanceActions"][0]
    shown = (await user.admin.get(f"/servers/{id}/os-instance-actions/{action['request_id']}"))["instanceAction"]
    [event] = shown["events"]
    return action["action"], event["result"], event["details"]


async def _runs_again(cloud: OneProcess, user: Caller, id: str) -> None:
    """Wait until a server is ACTIVE that is in ERROR now."""

    async def probe() -> dict[str, Any] | None:
        server = await user.show(id)
        return server if server["status"] == "ACTIVE" and server["OS-EXT-STS:task_state"] is None else None

    assert "fault" not in await cloud.until(probe, f"{id} to run again")


async def test_a_guest_that_panics_is_a_fault_of_its_server(cloud: OneProcess, user: Caller, tmp_path: Path) -> None:
    host = KillableHost(cloud, "panics", tmp_path)
    await host.start()
    id = (await user.admin.boot(availability_zone="nova:panics"))["id"]
    host.driver.guest_becomes(id, "crashed")
    server = await user.wait_for(id, "ERROR")
    assert server["OS-EXT-STS:power_state"] == 6
    assert "operating system panicked" in server["fault"]["message"]
    action, result, details = await _last_action(user, id)
    assert (action, result) == ("stop", "Error") and "operating system panicked" in details
    await user.act(id, "reboot", {"type": "HARD"})
    await _runs_again(cloud, user, id)
    host.driver.guest_becomes(id, "crashed")
    await user.wait_for(id, "ERROR")
    host.driver.guest_becomes(id, "started")  # by an operator on the host
    await _runs_again(cloud, user, id)
    await cloud.assert_clean()
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await host.stop()


async def test_a_guest_that_ends_by_itself_is_in_its_servers_history(
    cloud: OneProcess, user: Caller, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = KillableHost(cloud, "ends", tmp_path)
    await host.start()
    id = (await user.admin.boot(availability_zone="nova:ends"))["id"]
    for event, status, action in (
        ("stopped", "SHUTOFF", "stop"), ("started", "ACTIVE", "start"), ("paused", "PAUSED", "pause"),
    ):  # fmt: skip
        host.driver.guest_becomes(id, event)
        await user.wait_for(id, status)
        found = await _last_action(user, id)
        assert found[:2] == (action, "Success")
    assert f"server {id} is stopped on host ends without a request" in caplog.text
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await host.stop()


async def test_a_guest_that_changes_by_itself_notifies_in_nobodys_name(
    cloud: OneProcess, user: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = KillableHost(cloud, "notifies", tmp_path)
    await host.start()
    id = (await user.admin.boot(availability_zone="nova:notifies"))["id"]
    sent: list[tuple[Any, ...]] = []

    def instance(
        event: str, row: Any, *, context: Context, fault: Any = None, details: Any = None, sender: Any = None
    ) -> None:
        state = row["vm_state"], row["task_state"], row["power_state"]
        sent.append((event, *state, context.user_id, context.project_id, context.request_id))

    monkeypatch.setattr(cloud.process.notifier, "instance", instance)
    for event, status, expected in (
        ("stopped", "SHUTOFF", [
            ("power_off.start", "active", "powering-off", 4), ("power_off.end", "stopped", None, 4),
        ]),
        ("started", "ACTIVE", [("power_on.start", "stopped", "powering-on", 1), ("power_on.end", "active", None, 1)]),
        ("paused", "PAUSED", [("pause.start", "active", "pausing", 3), ("pause.end", "paused", None, 3)]),
        ("stopped", "SHUTOFF", [
            ("power_off.start", "paused", "powering-off", 4), ("power_off.end", "stopped", None, 4),
        ]),
    ):  # fmt: skip
        sent.clear()
        host.driver.guest_becomes(id, event)
        await user.wait_for(id, status)
        action = (await user.admin.get(f"/servers/{id}/os-instance-actions"))["instanceActions"][0]
        assert (action["user_id"], action["project_id"]) == (None, None)
        assert sent == [(*each, "", "", action["request_id"]) for each in expected]
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await host.stop()


@pytest.mark.parametrize("there", ["pause", "suspend"])
async def test_an_action_that_the_host_cannot_do_is_refused(
    cloud: OneProcess, user: Caller, there: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    able = FakeDriver.capabilities
    monkeypatch.setattr(FakeDriver, "capabilities", lambda driver: able(driver) - {there})
    host = KillableHost(cloud, f"plain-{there}", tmp_path)
    await host.start()
    try:
        id = (await user.admin.boot(availability_zone=f"nova:plain-{there}"))["id"]
        message = await user.refused(501, "POST", f"/servers/{id}/action", {there: None})
        assert id in message and "not able" in message
        shown = await user.show(id)
        assert (shown["status"], shown["OS-EXT-STS:task_state"]) == ("ACTIVE", None)
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    finally:
        await host.stop()
