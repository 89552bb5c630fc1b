"""The table of docs/notifications.md has every notification of Nova, and what it calls sent is sent."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from micronova.notifications import unversioned
from micronova.notifications.resources import Announcement
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import image, network
from tests.functional.servers.killable_host import KillableHost
from tests.functional.servers.test_action_traces import refusing
from tests.functional.servers.test_live_migration import _running
from tests.functional.servers.test_shelve import boot
from tests.schemas import notifications as schemas

pytestmark = only_in_one_process("watches the notifier of the cloud's process")
CLOUD = CloudOptions(
    hosts=3,
    roles=("network", "image"),
    settings={
        "compute": {"resource_interval": 0.5},
        "default": {
            "compute_monitors": ["cpu.virt_driver"],
            "allow_resize_to_same_host": False, "shelved_offload_time": -1, "reclaim_instance_interval": 3600,
        },
    },
)  # fmt: skip
ROOT = Path(__file__).parents[3]
# What this module does not make happen, and the tests that do.
ELSEWHERE = {
    "libvirt.connect": "tests/functional/servers/test_notification_families.py",
    **dict.fromkeys(
        ("aggregate.", "flavor.", "keypair.", "server_group.", "service.", "instance.update"),
        "tests/integration/test_resource_notifications.py",
    ),
    "aggregate.cache_images": "tests/functional/servers/test_image_caching.py",
    "scheduler.select_destinations": "tests/integration/test_notifications.py",
    "instance.evacuate": "tests/functional/servers/test_evacuate.py",
    "instance.volume_swap": "tests/functional/servers/test_volume_swap.py",
    **dict.fromkeys(
        ("instance.volume_attach", "instance.volume_detach", "volume.usage"),
        "tests/functional/servers/test_volume_notifications.py",
    ),
}


def families() -> dict[str, tuple[list[str], str, str]]:
    """Return the rows of the table: the name with its events, the unversioned name and the state."""
    text = (ROOT / "docs" / "notifications.md").read_text().partition("## All notifications of Nova")[2]
    found = {}
    row = re.compile(r"^\| ([\w.]+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
    for name, phases, old, state in row.findall(text):
        events = [f"{name}.{phase}" for phase in phases.split(", ")] if phases else [name]
        found[name] = events, old, state
    return found


@pytest.fixture
def sent(cloud: OneProcess, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The notifications that are sent during the test: the versioned names with the unversioned ones."""
    seen: dict[str, str] = {}

    def instance(event: str, row: Any, **more: Any) -> None:
        name = {"rebuild.scheduled": "rebuild_scheduled"}.get(event, event)
        old = unversioned.event_name(event)
        seen[f"instance.{name}"] = "" if old is None else f"compute.instance.{old}"

    def announce(context: Any, make: Callable[[], Any]) -> None:
        made = make()
        seen[made.event] = made.old_event

    monkeypatch.setattr(cloud.process.notifier, "enabled", True)
    for method in (instance, announce):
        monkeypatch.setattr(cloud.process.notifier, method.__name__, method)
    return seen


async def test_what_the_table_calls_sent_is_sent(cloud: OneProcess, user: Caller, sent: dict[str, str]) -> None:
    net = await network(user)
    id = await boot(user, name=user.project, networks=[{"uuid": net["id"]}])
    admin = user.admin

    async def act(action: str, value: Any, *statuses: str, by: Caller = user, status: int = 202) -> None:
        await by.act(id, action, value, status)
        await user.wait_for(id, *statuses)

    for action, status in (
        ("pause", "PAUSED"), ("unpause", "ACTIVE"), ("suspend", "SUSPENDED"), ("resume", "ACTIVE"),
        ("os-stop", "SHUTOFF"), ("os-start", "ACTIVE"), ("trigger_crash_dump", "ACTIVE"), ("lock", "ACTIVE"),
        ("unlock", "ACTIVE"), ("shelve", "SHELVED"), ("shelveOffload", "SHELVED_OFFLOADED"), ("unshelve", "ACTIVE"),
    ):  # fmt: skip
        await act(action, None, status, by=admin)
    await act("reboot", {"type": "HARD"}, "ACTIVE")
    await act("rescue", {"rescue_image_ref": await image(user)}, "RESCUE", status=200)
    await act("unrescue", None, "ACTIVE")
    await act("createImage", {"name": "made"}, "ACTIVE")
    await act("rebuild", {"imageRef": await image(user)}, "ACTIVE")
    await act("resize", {"flavorRef": "2"}, "VERIFY_RESIZE")
    await act("revertResize", None, "ACTIVE")
    await act("migrate", None, "VERIFY_RESIZE", by=admin)
    await act("confirmResize", None, "ACTIVE", status=204)
    await act("os-migrateLive", {"host": None, "block_migration": "auto"}, "ACTIVE", by=admin)
    attached = {"interfaceAttachment": {"net_id": net["id"]}}
    port = (await user.post(f"/servers/{id}/os-interface", attached, 200))["interfaceAttachment"]["port_id"]
    await user.delete(f"/servers/{id}/os-interface/{port}", 202)
    await user.wait_for(id, "ACTIVE")
    await _failures(cloud, user, id, attached)
    await user.delete(f"/servers/{id}")
    await user.wait_for(id, "SOFT_DELETED")
    await act("restore", None, "ACTIVE")
    await _delete(user, id)
    await cloud.settled()

    async def measured() -> bool | None:
        return True if "metrics.update" in sent else None

    await cloud.until(measured, "metrics of hosts")
    table = families()
    wrong = {event: sent[event] for name, row in table.items() for event in sent if _differs(name, event, row[1], sent)}
    assert not wrong
    wanted = {
        event
        for name, (events, _, state) in table.items()
        if state == "sent" and not any(name.startswith(prefix) for prefix in ELSEWHERE)
        for event in events
    }
    assert wanted <= set(sent), sorted(wanted - set(sent))
    assert not set(sent) - {event for events, _, state in table.values() if state == "sent" for event in events}


async def test_usage_is_told_before_it_changes(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rebuild, rescue, shelve and resizes send instance.exists of the present period, a rebuild with the old image."""
    old = await image(user)
    id = await boot(user, imageRef=old)
    await cloud.settled()
    told: list[tuple[str, Any]] = []

    def announce(context: Any, make: Callable[[], Any]) -> None:
        made = make()
        told.append((made.event, made.payload["nova_object.data"]))

    monkeypatch.setattr(cloud.process.notifier, "enabled", True)
    monkeypatch.setattr(cloud.process.notifier, "announce", announce)
    monkeypatch.setattr(cloud.process.notifier, "instance", lambda event, row, **_: told.append((event, row)))
    await user.act(id, "rebuild", {"imageRef": await image(user)})
    await user.wait_for(id, "ACTIVE")
    await user.act(id, "rescue", {"rescue_image_ref": await image(user)}, 200)
    await user.wait_for(id, "RESCUE")
    await user.act(id, "unrescue")
    await user.wait_for(id, "ACTIVE")
    await user.act(id, "resize", {"flavorRef": "2"})
    await user.wait_for(id, "VERIFY_RESIZE")
    await user.act(id, "revertResize")
    await user.wait_for(id, "ACTIVE")
    await user.act(id, "shelve")
    await user.wait_for(id, "SHELVED")
    await cloud.settled()
    own = [(event, data) for event, data in told if data.get("uuid") == id]
    followed = [after for (event, _), (after, _) in itertools.pairwise(own) if event == "instance.exists"]
    assert followed == ["rebuild.start", "rescue.end", "resize_prep.start", "resize_revert.start", "shelve.start"]
    first = next(data for event, data in own if event == "instance.exists")
    period = first["audit_period"]["nova_object.data"]
    assert first["image_uuid"] == old and period["audit_period_beginning"] < period["audit_period_ending"]
    await _delete(user, id)


async def test_a_host_that_loses_its_libvirt(
    cloud: OneProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is told once, in the name of the host, with its address."""
    told: list[Announcement] = []
    monkeypatch.setattr(cloud.process.notifier, "enabled", True)
    monkeypatch.setattr(cloud.process.notifier, "announce", lambda _, make: told.append(make()))
    host = KillableHost(cloud, "without-libvirt", tmp_path)
    await host.start()
    host.lose_hypervisor("Cannot connect to libvirt.\nIt is away.")

    def of_host() -> list[Announcement]:
        return [each for each in told if each.event == "libvirt.connect.error"]

    async def found() -> bool | None:
        return True if of_host() else None

    await cloud.until(found, "the notification")
    [lost] = of_host()
    data = schemas.check(lost.payload, "LibvirtErrorPayload")
    found_hosts = await cloud.caller().admin.get("/os-hypervisors/detail?hypervisor_hostname_pattern=without-libvirt")
    assert data["ip"] == found_hosts["hypervisors"][0]["host_ip"]
    reason = schemas.check(data["reason"], "ExceptionPayload")
    assert reason["exception_message"].startswith("Cannot connect to libvirt.")
    assert (lost.host, lost.source, lost.failed) == ("without-libvirt", "nova-compute", True)
    assert (lost.old_event, lost.old_publisher) == ("compute.libvirt.error", "compute.without-libvirt")
    assert lost.old_payload["ip"] == data["ip"]
    host.lose_hypervisor("It is away again.")

    async def again() -> bool | None:
        return True if len(of_host()) > 1 else None

    await cloud.until(again, "the next one")
    messages = [each.old_payload["reason"] for each in of_host()]
    assert messages == [reason["exception_message"], "It is away again."]
    await host.stop()


def _differs(name: str, event: str, old: str, sent: dict[str, str]) -> bool:
    """Return whether an event of a family has another unversioned name than the table says."""
    if not (event == name or event.startswith(f"{name}.")) or name == "compute.exception":
        return False
    said = "" if old == "none" else old
    return sent[event].removesuffix(event.removeprefix(name)) != said


async def _delete(user: Caller, id: str) -> None:
    await user.act(id, "forceDelete")
    await user.gone(id)


async def _failures(cloud: OneProcess, user: Caller, id: str, attached: Any) -> None:
    """Let what can fail fail on the host; the server is as before at the end."""

    def rule(operation: str) -> dict[str, Any]:
        return {"operation": operation, "kind": "fail", "name": user.project}

    async with cloud.faults(rule("attach_interface")):
        await user.refused(500, "POST", f"/servers/{id}/os-interface", attached)
    async with cloud.faults(rule("reboot")):
        await user.act(id, "reboot", {"type": "HARD"})
        await user.wait_for(id, "ERROR")
    await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE")
    for operation in ("export_disks", "import_guest"):
        async with cloud.faults({**rule(operation), "count": 1}):
            await user.act(id, "resize", {"flavorRef": "2"})
            await user.wait_for(id, "ACTIVE")
    async with refusing(1):
        await user.act(id, "resize", {"flavorRef": "2"})
        await user.wait_for(id, "VERIFY_RESIZE")
    await user.act(id, "revertResize")
    await user.wait_for(id, "ACTIVE")
    for action, operation, value, status in (
        ("pause", "pause", None, 202), ("suspend", "suspend", None, 202), ("os-stop", "power_off", None, 202),
        ("rescue", "rescue", None, 200), ("trigger_crash_dump", "trigger_crash_dump", None, 202),
        ("createImage", "snapshot", {"name": "none"}, 202), ("shelve", "snapshot", None, 202),
    ):  # fmt: skip
        async with cloud.faults(rule(operation)):
            await user.act(id, action, value, status)
            await cloud.settled()
        await user.act(id, "reboot", {"type": "HARD"})
        await user.wait_for(id, "ACTIVE")
    huge = {"flavor": {"name": f"huge-{user.project}", "ram": 2**30, "vcpus": 1, "disk": 1}}
    flavor = (await user.admin.post("/flavors", huge, 200))["flavor"]["id"]
    await user.act(id, "resize", {"flavorRef": flavor})
    await user.wait_for(id, "ACTIVE")
    other = await user.create(flavorRef=flavor, imageRef=await image(user))
    await user.wait_for(other, "ERROR")
    await _delete(user, other)
    async with cloud.faults(rule("rebuild")):
        await user.act(id, "rebuild", {"imageRef": await image(user)})
        await user.wait_for(id, "ERROR")
    await user.act(id, "rebuild", {"imageRef": await image(user, hw_architecture="aarch64")})
    await user.wait_for(id, "ERROR")
    await user.act(id, "rebuild", {"imageRef": await image(user)})
    await user.wait_for(id, "ACTIVE")
    async with cloud.faults(rule("spawn")):
        other = await user.create(name=user.project, imageRef=await image(user))
        await user.wait_for(other, "ERROR")
    await _delete(user, other)
    live = {"host": None, "block_migration": "auto"}
    async with cloud.faults(rule("live_migrate")):
        await user.admin.act(id, "os-migrateLive", live)
        await user.wait_for(id, "ACTIVE")
    for end in ("forced", "aborted"):
        async with cloud.faults({**rule("live_migrate"), "kind": "hang", "count": 1}):
            await user.admin.act(id, "os-migrateLive", live)
            await cloud.fault_struck()
            path = f"/servers/{id}/migrations/{(await _running(user, id))['id']}"
            if end == "forced":
                await user.admin.post(f"{path}/action", {"force_complete": None})
            else:
                await user.admin.delete(path, 202)
            await user.wait_for(id, "ACTIVE")


async def test_tests_elsewhere_name_their_families() -> None:
    for name, path in ELSEWHERE.items():
        assert name.removeprefix("instance.").removesuffix(".") in (ROOT / path).read_text(), (name, path)
