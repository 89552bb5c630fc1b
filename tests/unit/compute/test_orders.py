"""Orders: carried out once, however often they arrive, and never when they are stale."""

import errno
from typing import Any

import msgspec
import pytest

from micronova.compute.handlers.table import HANDLERS
from micronova.compute.host import SLOW_CALLS
from micronova.objects import power_state
from micronova.objects.errors import Unavailable
from micronova.objects.image import ImageMeta, ImageSignature
from micronova.objects.orders import HostReply
from tests.clocks import settle
from tests.unit.compute.agent_harness import AgentHarness, again, order


async def test_a_build_runs_the_guest_and_is_reported(harness: AgentHarness) -> None:
    report = await harness.carry_out(order())
    assert (report.outcome, report.power_state, report.epoch, report.host) == ("done", 1, 2, "host-1")
    guest = await harness.guest("i-1")
    assert guest is not None
    assert (guest.power_state, guest.epoch) == (power_state.RUNNING, 2)
    await settle()
    assert harness.running_operations() == []


async def test_the_handler_returns_while_the_work_runs_on(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "delay", "delay": 30})
    build = order()
    await harness.send(build)
    assert harness.running_operations() == [build.operation_id]
    assert harness.conductor.reports.empty()
    await harness.clock.advance(30)
    assert (await harness.conductor.next_report()).outcome == "done"


async def test_a_duplicate_is_carried_out_once(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "delay", "delay": 1})
    build = order()
    await harness.send(build)
    await harness.send(build)
    await harness.clock.advance(1)
    await harness.conductor.next_report()
    await harness.send(build)
    assert harness.conductor.reports.empty()
    assert harness.driver.fault_rules()[0]["hits"] == 1


async def test_a_lost_order_comes_with_the_heartbeat(harness: AgentHarness) -> None:
    build = order()
    await harness.beat(reply=HostReply(host="host-1", orders=(build,)))
    report = await harness.conductor.next_report()
    assert (report.operation_id, report.outcome) == (build.operation_id, "done")


async def test_a_running_order_that_comes_with_the_heartbeat_is_a_duplicate(harness: AgentHarness) -> None:
    await harness.rules({"operation": "reboot", "kind": "delay", "delay": 60})
    await harness.carry_out(order())
    reboot = order("reboot", epoch=3)
    await harness.send(reboot)
    await harness.beat(reply=HostReply(host="host-1", orders=(reboot,)))
    await harness.clock.advance(60)
    assert (await harness.conductor.next_report()).outcome == "done"
    assert harness.conductor.reports.empty()
    assert (await harness.driver.get_console_output("i-1", None)).count("Linux version") == 2


async def test_a_stale_order_is_dropped(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=5))
    await harness.send(order("delete", epoch=4))
    assert harness.conductor.reports.empty()
    assert await harness.guest("i-1") is not None


async def test_an_order_of_a_restored_database_is_carried_out_when_it_is_offered_again(harness: AgentHarness) -> None:
    """The database was read after the heartbeat was sent: it has forgotten what the host did before."""
    await harness.carry_out(order(epoch=2))
    await harness.carry_out(order("stop", epoch=9))
    start = order("start", epoch=3)
    await harness.send(start)
    assert harness.conductor.reports.empty()
    await harness.beat(reply=HostReply(host="host-1", orders=(start,)))
    report = await harness.conductor.next_report()
    assert (report.operation_id, report.epoch, report.outcome) == (start.operation_id, 3, "done")
    assert (await harness.carry_out(order("delete", epoch=4))).outcome == "done"
    assert await harness.guest("i-1") is None


async def test_an_order_that_is_refused_for_the_first_time_in_a_reply_is_stale(harness: AgentHarness) -> None:
    """The reply may be older than what the host has done since it sent the heartbeat."""
    await harness.carry_out(order(epoch=5))
    delete = order("delete", epoch=4)
    await harness.beat(reply=HostReply(host="host-1", orders=(delete,)))
    await harness.beat(reply=HostReply(host="host-1"))  # the database does not offer it any more
    await harness.beat(reply=HostReply(host="host-1", orders=(delete,)))
    assert harness.conductor.reports.empty()
    assert await harness.guest("i-1") is not None


async def test_a_message_is_never_a_proof_that_the_database_was_restored(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=5))
    delete = order("delete", epoch=4)
    for _ in range(3):
        await harness.send(delete)
        await harness.beat(reply=HostReply(host="host-1"))
    assert harness.conductor.reports.empty()
    assert await harness.guest("i-1") is not None


async def test_messages_from_before_the_database_was_restored_are_ignored(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=2))
    await harness.carry_out(order("stop", epoch=9))
    start = order("start", epoch=3)
    await harness.send(start)
    harness.conductor.now = 100.0
    await harness.beat(reply=HostReply(host="host-1", orders=(start,)))
    await harness.conductor.next_report()
    await harness.send(order("delete", epoch=8, issued_at=99.0))
    assert harness.conductor.reports.empty()
    assert await harness.guest("i-1") is not None
    assert (await harness.carry_out(order("delete", epoch=4, issued_at=101.0))).outcome == "done"


async def test_an_order_is_carried_out_again_whose_report_a_restored_database_has_forgotten(
    harness: AgentHarness,
) -> None:
    """The guest that it made is kept: it may hold data."""
    build = order(epoch=2)
    await harness.carry_out(build)
    await harness.carry_out(order("stop", epoch=5))
    await settle()
    for _ in range(2):
        await harness.beat(reply=HostReply(host="host-1", orders=(build,)))
    report = await harness.conductor.next_report()
    assert (report.operation_id, report.outcome, report.power_state) == (
        build.operation_id,
        "done",
        power_state.SHUTDOWN,
    )
    assert harness.conductor.reports.empty()


@pytest.mark.parametrize("kind", ["build", "rebuild", "shelve_offload"])
async def test_a_restored_database_costs_no_newer_guest(harness: AgentHarness, kind: str) -> None:
    await harness.carry_out(order(epoch=6))
    older = order(kind, epoch=4)
    await harness.send(older)
    await harness.beat(reply=HostReply(host="host-1", orders=(older,)))
    report = await harness.conductor.next_report()
    assert (report.outcome, report.unchanged) == ("error", True) and "restored from a backup" in (report.message or "")
    guest = await harness.guest("i-1")
    assert guest is not None and guest.epoch == 6


async def test_a_delete_of_a_restored_database_removes_a_newer_guest(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=6))
    delete = order("delete", epoch=4)
    await harness.send(delete)
    await harness.beat(reply=HostReply(host="host-1", orders=(delete,)))
    assert (await harness.conductor.next_report()).outcome == "done"
    assert await harness.guest("i-1") is None


async def test_a_build_after_the_delete_is_dropped(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=2))
    await harness.carry_out(order("delete", epoch=3))
    await harness.send(order(epoch=2))
    assert harness.conductor.reports.empty()
    assert await harness.guest("i-1") is None


async def test_an_order_for_another_host_is_ignored(harness: AgentHarness) -> None:
    await harness.send(order())
    manager = harness.manager._agents["host-1"]
    manager.begin(order(uuid="i-2", host="host-2"))
    await settle()
    assert await harness.guest("i-2") is None


async def test_an_unknown_kind_is_refused_with_a_reason(harness: AgentHarness) -> None:
    await harness.beat(reply=HostReply(host="host-1", orders=(order("levitate"),)))
    report = await harness.conductor.next_report()
    assert (report.outcome, report.error_code) == ("error", "not_supported")
    assert report.message == "The server's host runs an older version, which knows no levitate orders: upgrade it."


async def test_a_delete_of_nothing_is_done(harness: AgentHarness) -> None:
    assert (await harness.carry_out(order("delete"))).outcome == "done"


async def test_a_delete_stops_a_running_build_first(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "hang"})
    await harness.send(order(epoch=2))
    assert (await harness.guest("i-1")) is not None
    report = await harness.carry_out(order("delete", epoch=3))
    assert (report.outcome, report.epoch) == ("done", 3)
    assert harness.conductor.reports.empty()  # the build is not reported
    assert await harness.guest("i-1") is None
    await settle()
    assert harness.running_operations() == []


async def test_a_delete_waits_until_the_build_is_undone(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "hang"}, {"operation": "destroy", "kind": "delay", "delay": 3})
    await harness.send(order(epoch=2))
    await harness.send(order("delete", epoch=3))
    await harness.clock.advance(2)
    assert harness.conductor.reports.empty()
    await harness.clock.advance(1)
    assert harness.driver.fault_rules()[1]["hits"] == 1  # the build's own; the delete found nothing
    assert (await harness.conductor.next_report()).outcome == "done"
    assert await harness.guest("i-1") is None


async def test_two_deletes_during_the_undoing_of_a_build(harness: AgentHarness) -> None:
    """The second must not begin before the build is undone, although the first is cancelled."""
    await harness.rules(
        {"operation": "spawn", "kind": "hang"},
        {"operation": "destroy", "kind": "delay", "delay": 3, "count": 1},
    )
    await harness.send(order(epoch=2))
    await harness.send(order("delete", epoch=3))
    await harness.send(order("delete", epoch=4))
    assert harness.conductor.reports.empty()
    await harness.clock.advance(3)
    report = await harness.conductor.next_report()
    assert (report.outcome, report.epoch) == ("done", 4)
    assert harness.conductor.reports.empty()


async def test_the_same_operation_at_a_newer_epoch_replaces_the_old_work(harness: AgentHarness) -> None:
    await harness.rules({"operation": "spawn", "kind": "hang", "count": 1})
    build = order(epoch=2)
    await harness.send(build)
    await harness.send(again(build, epoch=4))
    report = await harness.conductor.next_report()
    assert (report.outcome, report.epoch) == ("done", 4)
    guest = await harness.guest("i-1")
    assert guest is not None
    assert guest.epoch == 4


async def test_stop_start_and_reboot(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=2))
    for number, (kind, power) in enumerate([("stop", 4), ("stop", 4), ("start", 1), ("start", 1)], 3):
        report = await harness.carry_out(order(kind, epoch=number))
        assert (report.outcome, report.power_state) == ("done", power)
        guest = await harness.guest("i-1")
        assert guest is not None
        assert guest.power_state == power
    for number, kind in enumerate(["SOFT", "HARD"], 7):
        report = await harness.carry_out(order("reboot", epoch=number, parameters={"type": kind}))
        assert (report.outcome, report.power_state) == ("done", 1)


@pytest.mark.parametrize("kind", ["stop", "start", "reboot"])
async def test_power_orders_without_a_guest_are_errors(harness: AgentHarness, kind: str) -> None:
    report = await harness.carry_out(order(kind))
    assert (report.outcome, report.error_code) == ("error", "instance_not_found")


async def test_a_failed_stop_is_an_error_and_can_be_repeated(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=2))
    await harness.rules({"operation": "power_off", "kind": "fail", "count": 1, "message": "the plug is stuck"})
    stop = order("stop", epoch=3)
    report = await harness.carry_out(stop)
    assert (report.outcome, report.error_code, report.message) == (
        "error",
        "driver_failed",
        "the plug is stuck",
    )
    assert (await harness.carry_out(stop)).outcome == "done"  # the same operation, sent again


async def test_a_guest_that_does_not_react_is_switched_off(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=2))
    await harness.rules({"operation": "shutdown", "kind": "hang"})
    await harness.send(order("stop", epoch=3))
    await harness.clock.advance(59)
    assert harness.conductor.reports.empty()
    await harness.clock.advance(1)
    assert (await harness.conductor.next_report()).power_state == power_state.SHUTDOWN


async def test_a_delete_that_fails_is_tried_again_and_then_reported(harness: AgentHarness) -> None:
    await harness.carry_out(order(epoch=2))
    await harness.rules({"operation": "destroy", "kind": "fail", "count": 2})
    await harness.send(order("delete", epoch=3))
    await harness.clock.advance(3)
    assert (await harness.conductor.next_report()).outcome == "done"
    await harness.carry_out(order(epoch=4))
    await harness.rules({"operation": "destroy", "kind": "fail"})
    delete = order("delete", epoch=5)
    await harness.send(delete)
    await harness.clock.advance(3)
    assert (await harness.conductor.next_report()).outcome == "error"
    await harness.rules()
    assert (await harness.carry_out(delete)).outcome == "done"


@pytest.mark.parametrize("kind", ["build", "start", "delete"])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOSPC, "No space left on device"),
        MemoryError(),
        RuntimeError("can't start new thread"),
        Unavailable("Libvirt cannot be reached."),
    ],
    ids=repr,
)
async def test_a_lack_of_the_host_is_reported_as_temporary(
    harness: AgentHarness, monkeypatch: pytest.MonkeyPatch, kind: str, error: Exception
) -> None:
    async def lacking(*_: Any) -> None:
        raise error

    if kind != "build":
        await harness.carry_out(order())
    for call in ("spawn", "info"):
        with monkeypatch.context() as lack:
            lack.setattr(harness.driver, call if kind == "build" else "info", lacking)
            report = await harness.carry_out(order(kind, epoch=3))
        assert report.temporary, report
    wanted = await harness.carry_out(order(kind, epoch=4))
    assert (wanted.outcome, wanted.temporary) == ("done", False)


async def test_a_password_needs_a_guest_that_runs(harness: AgentHarness) -> None:
    await harness.carry_out(order())
    report = await harness.carry_out(order("change_password", epoch=3, admin_password="secret"))
    assert (report.outcome, report.power_state) == ("done", None)
    harness.driver.guest_stops("i-1")
    report = await harness.carry_out(order("change_password", epoch=4, admin_password="secret"))
    assert (report.outcome, report.error_code) == ("error", "conflict")
    assert "does not run" in (report.message or "")
    report = await harness.carry_out(order("trigger_crash_dump", epoch=5))
    assert (report.outcome, report.error_code) == ("error", "conflict")


@pytest.mark.parametrize(
    ("kind", "call"),
    [("change_password", "set_admin_password"), ("suspend", "suspend"), ("resume", "resume")],
)
async def test_one_project_leaves_slow_calls_to_others(harness: AgentHarness, kind: str, call: str) -> None:
    """Its guests decide how long their agents take to answer, and how much memory is saved."""
    projects = dict.fromkeys([f"a-{number}" for number in range(SLOW_CALLS + 1)], "a") | {"b": "b"}
    for uuid, project in projects.items():
        assert (await harness.carry_out(order(uuid=uuid, instance_project_id=project))).outcome == "done"
        if kind == "resume":
            suspended = await harness.carry_out(order("suspend", uuid, 3, instance_project_id=project))
            assert suspended.outcome == "done"
    await harness.rules({"operation": call, "kind": "delay", "delay": 10})
    for uuid, project in projects.items():
        await harness.send(order(kind, uuid, 4, instance_project_id=project, admin_password="secret"))
    await harness.clock.advance(10)
    first = {(await harness.conductor.next_report()).instance_uuid for _ in range(SLOW_CALLS)}
    assert "b" in first and harness.conductor.reports.empty()
    await harness.clock.advance(10)
    rest = {(await harness.conductor.next_report()).instance_uuid for _ in range(2)}
    assert first | rest == projects.keys()


@pytest.mark.parametrize("kind", ["build", "rebuild", "rescue"])
async def test_a_driver_that_verifies_no_signatures_gets_no_image_that_has_one(
    harness: AgentHarness, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind != "build":
        await harness.carry_out(order())
    able = harness.driver.capabilities() - {"trusted_certs"}
    monkeypatch.setattr(harness.driver, "capabilities", lambda: able)
    signature = ImageSignature(signature=b"", hash_method="SHA-256", key_type="DSA", public_key=b"")
    picture = ImageMeta(id="signed", signature=signature)
    wanted = order(kind, epoch=3, rescue_image=picture)
    report = await harness.carry_out(
        msgspec.structs.replace(wanted, instance=msgspec.structs.replace(wanted.instance, image=picture))
    )
    assert report.outcome == ("abort" if kind == "build" else "error")
    assert (
        report.message == "The server's host does not verify signatures of images, and image signed has to be verified."
    )


@pytest.mark.parametrize("capable", [True, False])
@pytest.mark.parametrize("kind", sorted(HANDLERS))
async def test_no_report_of_a_failure_names_the_host(
    harness: AgentHarness, monkeypatch: pytest.MonkeyPatch, kind: str, capable: bool
) -> None:
    """The owner of a server sees the message; where servers are is known to administrators."""
    if not capable:
        monkeypatch.setattr(harness.driver, "capabilities", frozenset)
    report = await harness.carry_out(order(kind, uuid="never-built"))
    assert "host-1" not in (report.message or "")
