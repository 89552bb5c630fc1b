"""An operation that hangs ends at its deadline, and the host cancels its work."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.cli.audit import run_audit
from micronova.clients.network.client import NetworkClient
from micronova.compute import host
from micronova.conductor.operations import engine
from micronova.conductor.operations.health import Health
from micronova.db.tables import allocations, departures
from micronova.objects import power_state
from micronova.objects.errors import Forbidden, Unavailable
from tests.functional.cloud import Caller, Cloud, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import network, ports_left

pytestmark = [pytest.mark.thorough, only_in_one_process("builds and actions have one second")]

CLOUD = CloudOptions(
    hosts=2,
    roles=("network",),
    settings={
        "default": {"instance_build_timeout": 1.0, "report_interval": 0.1, "allow_resize_to_same_host": False},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)


def _name() -> str:
    return f"h{uuid.uuid4().hex[:10]}"


async def test_a_build(cloud: Cloud, user: Caller) -> None:
    name = _name()
    async with cloud.faults({"operation": "spawn", "kind": "hang", "name": name}):
        id = await user.create(name=name)
        server = await user.wait_for(id, "ERROR")
        assert "in time" in server["fault"]["message"]

        async def undone() -> bool | None:
            held = [host for host in cloud.hosts if id in await cloud.guests(host)]
            return None if held else True

        await cloud.until(undone, "the host to let go of the guest")
    assert not await cloud.read(sa.select(allocations).where(allocations.c.consumer_uuid == id))
    await cloud.assert_clean()


async def test_a_build_whose_hosts_lack_something_says_what(cloud: Cloud, user: Caller) -> None:
    name = _name()
    rule = {"operation": "spawn", "kind": "unavailable", "name": name, "message": "Libvirt cannot be reached."}
    async with cloud.faults(rule):
        id = await user.create(name=name)
        server = await user.wait_for(id, "ERROR")
    assert "in time" in server["fault"]["message"]
    assert "Libvirt cannot be reached." in server["fault"]["message"]
    await cloud.assert_clean()


async def test_an_action_whose_host_lacks_something_says_what(cloud: Cloud, user: Caller) -> None:
    name = _name()
    id = (await user.boot(name=name))["id"]
    rule = {"operation": "reboot", "kind": "unavailable", "name": name, "message": "Libvirt cannot be reached."}
    async with cloud.faults(rule):
        await user.act(id, "reboot", {"type": "HARD"})
        server = await user.wait_for(id, "ERROR", task=None)
    assert "Libvirt cannot be reached." in server["fault"]["message"]
    await cloud.assert_clean()


@pytest.mark.parametrize("error", [Unavailable("no answer"), Forbidden("not for you")], ids=repr)
async def test_the_fault_of_a_build_stays_however_long_its_ports_cannot_be_deleted(
    cloud: OneProcess,
    user: Caller,
    notifications: list[tuple[str, Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    name = _name()
    net = await network(user)
    late = 0

    async def refuse(*_: Any, **__: Any) -> None:
        nonlocal late
        [row] = await cloud.open_operations()
        late += row.deadline < cloud.process.clock.now() * 1e6
        raise error

    monkeypatch.setattr(engine, "LONGEST_PAUSE", 0.1)
    with monkeypatch.context() as refused:
        refused.setattr(NetworkClient, "deallocate", refuse)
        async with cloud.faults({"operation": "spawn", "kind": "abort", "name": name, "message": "the disk is small"}):
            id = await user.create(name=name, networks=[{"uuid": net["id"]}])
            before = await user.wait_for(id, "ERROR")
        await cloud.until(_holds(lambda: late > 2), "further attempts after the deadline")
        [found] = await run_audit(cloud.process)
        assert (found["kind"], found["message"]) == ("operation", f"build of {id} is past its deadline.")
    assert before["fault"]["message"] == (await user.show(id))["fault"]["message"] == "the disk is small"
    await cloud.settled()
    assert await ports_left(user) == []
    assert [event for event, _, _ in notifications if event == "create.error"] == ["create.error"]
    await cloud.assert_clean()


async def test_an_outage_costs_time_only(cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conductor that has just had an outage, or whose clock was set, ends no work of hosts by its deadline."""
    name = _name()
    monkeypatch.setattr(Health, "undisturbed_for", lambda _: 0.0)
    async with cloud.faults({"operation": "spawn", "kind": "delay", "delay": 3.0, "name": name}):
        id = await user.create(name=name)
        await cloud.until(_past_deadline(cloud), "the deadline")
        assert await run_audit(cloud.process) == []
        await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


def _past_deadline(cloud: Cloud) -> Callable[[], Any]:
    async def probe() -> Any:
        found = await cloud.open_operations()
        return found if found and found[0].deadline < cloud.process.clock.now() * 1e6 else None

    return probe


@pytest.mark.parametrize(
    ("operation", "action", "value", "after"),
    [
        ("power_off", "os-stop", None, "ACTIVE"),
        ("reboot", "reboot", {"type": "SOFT"}, "ACTIVE"),
        ("reboot", "reboot", {"type": "HARD"}, "ERROR"),
        ("pause", "pause", None, "ACTIVE"),
        ("suspend", "suspend", None, "ERROR"),
    ],
)
async def test_an_action(
    cloud: OneProcess,
    user: Caller,
    operation: str,
    action: str,
    value: Any,
    after: str,
    notifications: list[tuple[str, Any, Any]],
) -> None:
    name = _name()
    id = (await user.boot(name=name))["id"]
    await cloud.until(_holds(lambda: len(notifications) > 1), "the end of the build")
    notifications.clear()
    async with cloud.faults({"operation": operation, "kind": "hang", "name": name, "count": 1}):
        await user.act(id, action, value)
        await user.wait_for(id, after)
        [last, *_] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
        assert last["message"] == "Error"
        # Of these, Nova has an error of reboots only.
        sent = {"os-stop": ["power_off.start"], "reboot": ["reboot.start", "reboot.error"]}.get(
            action, [f"{action}.start"]
        )
        await cloud.until(_holds(lambda: len(notifications) >= len(sent)), "the notifications")
        assert [event for event, _, _ in notifications] == sent
        assert action != "reboot" or "in time" in notifications[1][2]["message"]
        # A host does one order for a server at a time, so the order that hung must have ended before the next can run.
        await user.act(id, "reboot", {"type": "HARD"})
        await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_an_attach_that_hangs(cloud: Cloud, user: Caller) -> None:
    name = _name()
    net = await network(user)
    id = (await user.boot(name=name))["id"]
    async with cloud.faults({"operation": "attach_interface", "kind": "hang", "name": name, "count": 1}):
        body = {"interfaceAttachment": {"net_id": net["id"]}}
        assert "in time" in await user.refused(500, "POST", f"/servers/{id}/os-interface", body)
        assert await ports_left(user) == []
        assert (await user.show(id))["addresses"] == {}
        await user.act(id, "reboot", {"type": "HARD"})
        await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_a_detach_that_hangs(cloud: Cloud, user: Caller) -> None:
    name = _name()
    net = await network(user)
    id = (await user.boot(name=name, networks=[{"uuid": net["id"]}]))["id"]
    [port] = await ports_left(user)
    async with cloud.faults({"operation": "detach_interface", "kind": "hang", "name": name, "count": 1}):
        await user.delete(f"/servers/{id}/os-interface/{port['id']}", 202)
        await user.wait_for(id, "ACTIVE")
        [last, *_] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
        assert (last["action"], last["message"]) == ("detach_interface", "Error")
        assert [each["id"] for each in await ports_left(user)] == [port["id"]]
        await user.delete(f"/servers/{id}/os-interface/{port['id']}", 202)
        await user.wait_for(id, "ACTIVE")
    assert await ports_left(user) == []
    await cloud.assert_clean()


def _holds(condition: Callable[[], bool]) -> Callable[[], Any]:
    async def probe() -> bool | None:
        return True if condition() else None

    return probe


async def test_a_delete_has_no_deadline(cloud: Cloud, user: Caller) -> None:
    name = _name()
    id = (await user.boot(name=name))["id"]
    async with cloud.faults({"operation": "destroy", "kind": "delay", "delay": 2.5, "name": name, "count": 1}):
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    await cloud.assert_clean()


@pytest.mark.parametrize(
    ("end", "kind"), [("confirmResize", "hang"), ("revertResize", "hang"), ("revertResize", "unavailable")]
)
async def test_a_place_that_was_left_does_not_remove_its_guest_in_time(
    cloud: Cloud, user: Caller, end: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is on its other host; a source does not start its guest as long as another one may run."""
    monkeypatch.setattr(host, "FIRST_PAUSE", 0.05)
    name = _name()
    id = (await user.boot(name=name))["id"]
    await user.act(id, "resize", {"flavorRef": "2"})
    await user.wait_for(id, "VERIFY_RESIZE")
    rule = {"operation": "destroy", "kind": kind, "name": name, "message": "Libvirt cannot be reached."}
    async with cloud.faults({**rule, "count": 1} if kind == "hang" else rule):
        await user.act(id, end, status=204 if end == "confirmResize" else 202)
        if kind == "unavailable":

            async def left() -> bool | None:
                return True if list(await cloud.read(its_departures)) else None

            its_departures = sa.select(departures).where(departures.c.instance_uuid == id)
            await cloud.until(left, "the revert to go on without the destination")
            source = await user.host_of(id)
            assert (await cloud.guests(source))[id].power_state == power_state.SHUTDOWN
        else:
            await user.wait_for(id, "ACTIVE")
    server = await user.wait_for(id, "ACTIVE")
    assert "fault" not in server
    place = await user.host_of(id)

    async def removed() -> bool | None:
        return True if [each for each in cloud.hosts if id in await cloud.guests(each)] == [place] else None

    await cloud.until(removed, "the other host to remove its guest")
    await cloud.assert_clean()


async def test_a_destination_that_does_not_make_a_guest_in_time(cloud: Cloud, user: Caller) -> None:
    """The guest may run there: the source starts its own only when that one is removed."""
    name = _name()
    id = (await user.boot(name=name))["id"]
    source = await user.host_of(id)
    rules = [
        {"operation": "power_on", "kind": "hang", "name": name, "count": 1},
        {"operation": "destroy", "kind": "delay", "delay": 3.0, "name": name},
    ]
    async with cloud.faults(*rules):
        await user.act(id, "resize", {"flavorRef": "2"})
        await cloud.fault_struck()

        async def runs() -> bool | None:
            return True if (await cloud.guests(source))[id].power_state == power_state.RUNNING else None

        await cloud.until(runs, "the guest to run on its source again")
        assert [each for each in cloud.hosts if id in await cloud.guests(each)] == [source]
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()
