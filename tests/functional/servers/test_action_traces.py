"""What actions leave behind: the events of the instance action, and the notifications with their senders.

The tables are those of Nova, per action and outcome. S is the host that a server is on, D the one that it moves to.
Where nothing is written, an event has succeeded.
"""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from micronova.compute.resource_tracker import ResourceTracker
from micronova.conductor.operations import engine
from micronova.notifications.notifier import BusNotifier
from micronova.objects.clock import SystemClock
from micronova.objects.errors import InsufficientResources
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import image

pytestmark = only_in_one_process("watches the notifier of the cloud's process")
CLOUD = CloudOptions(
    hosts=3,
    roles=("image",),
    settings={"default": {"report_interval": 0.1, "allow_resize_to_same_host": False, "shelved_offload_time": 0}},
)
LIVE = {"host": None, "block_migration": "auto"}
OLD_LIVE = {"host": None, "block_migration": True, "disk_over_commit": False}
PREPARED = ["D resize_prep.start", "D resize_prep.end"]
SENT = [*PREPARED, "S resize.start"]
ARRIVED = [*SENT, "S resize.end", "D resize_finish.start"]
PRE = ["D live_migration_pre.start", "D live_migration_pre.end"]
ROLLBACK = ["S live_migration_rollback.start", "S live_migration_rollback.end"]
ROLLBACK_DEST = ["D live_migration_rollback_dest.start", "D live_migration_rollback_dest.end"]
COLD_EVENTS = ["conductor_migrate_server", "cold_migrate", "compute_prep_resize", "compute_resize_instance"]
CHECKED = [
    "conductor_live_migrate_instance", "compute_check_can_live_migrate_destination",
    "compute_check_can_live_migrate_source", "compute_pre_live_migration",
]  # fmt: skip


class Told:
    """The versioned notifications about one server."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def put(self, notification: Callable[[], Any]) -> None:
        self.made += [msgspec.json.decode(message.body) for message in notification()]

    def messages(self, id: str) -> list[dict[str, Any]]:
        found = [msgspec.json.decode(each["oslo.message"]) for each in self.made]
        return [
            each
            for each in found
            if each["event_type"] == "compute.exception"  # which names no server
            or (id in str(each["payload"]) and each["event_type"] != "instance.exists")
        ]

    def lines(self, id: str, **places: str) -> list[str]:
        """Return sender and name of each; hosts by their letters, services by their names."""
        names = {f"nova-compute:{host}": letter for letter, host in places.items()}
        return [
            f"{names.get(each['publisher_id'], each['publisher_id'].partition(':')[0])} "
            f"{each['event_type'].removeprefix('instance.')}"
            for each in self.messages(id)
            if not each["event_type"].startswith("scheduler.")
        ]


@pytest.fixture
def told(cloud: OneProcess, monkeypatch: pytest.MonkeyPatch) -> Told:
    kept = Told()
    real = BusNotifier(
        kept,  # type: ignore[arg-type]
        host="controller",
        clock=SystemClock(),
        random=random.Random(1),
        versioned_topics=("versioned_notifications",),
    )
    notifier = cloud.process.notifier
    monkeypatch.setattr(notifier, "enabled", True)
    for method in ("instance", "announce"):
        monkeypatch.setattr(notifier, method, getattr(real, method))
    return kept


@asynccontextmanager
async def refusing(hosts: int) -> AsyncIterator[None]:
    """Let so many destinations refuse a cold move before they do anything."""
    left = hosts
    hold = ResourceTracker.hold

    def refused(tracker: ResourceTracker, order: Any) -> Any:
        nonlocal left
        if order.kind == "prep_resize" and left:
            left -= 1
            raise InsufficientResources("Too little memory.")
        return hold(tracker, order)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResourceTracker, "hold", refused)
        yield


async def _server(cloud: OneProcess, user: Caller, told: Told) -> tuple[str, str]:
    id = (await user.boot(name=user.project, flavorRef="2", imageRef=await image(user)))["id"]
    await cloud.settled()
    told.made.clear()
    return id, await user.host_of(id)


async def _events(user: Caller, id: str, number: int = 0) -> list[str]:
    """Return the events of the newest action, the first one first; failed ones with a minus."""
    path = f"/servers/{id}/os-instance-actions"
    action = (await user.get(path))["instanceActions"][number]
    shown = (await user.get(f"{path}/{action['request_id']}"))["instanceAction"]
    events = [("-" if each["result"] == "Error" else "") + each["event"] for each in reversed(shown["events"])]
    assert (shown["message"] == "Error") == any(each.startswith("-") for each in events), shown
    return events


async def _hosts(user: Caller, id: str) -> list[str | None]:
    """Return the hosts of the events of the newest action, that of the first one first."""
    path = f"/servers/{id}/os-instance-actions"
    action = (await user.get(path))["instanceActions"][0]
    events = (await user.admin.get(f"{path}/{action['request_id']}"))["instanceAction"]["events"]
    return [each["host"] for each in reversed(events)]


@pytest.mark.parametrize(
    ("fault", "events", "sent"),
    [
        (None, [*COLD_EVENTS, "compute_finish_resize"], [*ARRIVED, "D resize_finish.end"]),
        (
            "export_disks",
            [*COLD_EVENTS[:3], "-compute_resize_instance"],
            [*SENT, "S compute.exception"],
        ),
        ("import_guest", [*COLD_EVENTS, "-compute_finish_resize"], [*ARRIVED, "D compute.exception"]),
    ],
)
@pytest.mark.parametrize("action", ["resize", "migrate"])
async def test_cold_moves(
    cloud: OneProcess, user: Caller, told: Told, action: str, fault: str | None, events: list[str], sent: list[str]
) -> None:
    id, source = await _server(cloud, user, told)
    other = next(host for host in cloud.hosts if host != source)
    rules = [] if fault is None else [{"operation": fault, "kind": "fail", "name": user.project, "count": 1}]
    async with cloud.faults(*rules):
        if action == "resize":
            # One destination is enough to say which it is.
            third = next(host for host in cloud.hosts if host not in (source, other))
            async with _disabled(user, third):
                await user.act(id, "resize", {"flavorRef": "3"})
                await cloud.settled()
        else:
            await user.admin.act(id, "migrate", {"host": other})
            await cloud.settled()
    assert await _events(user, id) == events
    lines = told.lines(id, S=source, D=other)
    assert sorted(lines) == sorted(sent), lines
    assert [line for line in lines if "exception" not in line] == [line for line in sent if "exception" not in line]


@asynccontextmanager
async def _disabled(user: Caller, *hosts: str) -> AsyncIterator[None]:
    found = (await user.admin.get("/os-services?binary=nova-compute"))["services"]
    ids = [each["id"] for each in found if each["host"] in hosts]
    for id in ids:
        await user.admin.put(f"/os-services/{id}", {"status": "disabled"})
    try:
        yield
    finally:
        for id in ids:
            await user.admin.put(f"/os-services/{id}", {"status": "enabled"})


async def test_a_cold_move_without_a_host(cloud: OneProcess, user: Caller, told: Told) -> None:
    id, source = await _server(cloud, user, told)
    async with _disabled(user, *(host for host in cloud.hosts if host != source)):
        await user.act(id, "resize", {"flavorRef": "3"})
        await cloud.settled()
    assert await _events(user, id) == ["-conductor_migrate_server", "-cold_migrate"]
    assert told.lines(id, S=source) == ["nova-conductor compute_task.migrate_server.error"]
    [message] = told.messages(id)
    spec = message["payload"]["nova_object.data"]["request_spec"]["nova_object.data"]
    assert spec["flavor"]["nova_object.data"]["flavorid"] == "2"


@pytest.mark.parametrize("refusals", [1, 2])
async def test_destinations_that_refuse(cloud: OneProcess, user: Caller, told: Told, refusals: int) -> None:
    """Each of them has begun and ended its part; the failure of one is told if another may be tried."""
    id, source = await _server(cloud, user, told)
    async with refusing(refusals):
        await user.act(id, "resize", {"flavorRef": "3"})
        await cloud.settled()
    refused = ["resize_prep.start", "resize.error", "resize_prep.end"]
    lines = [line.partition(" ")[2] for line in told.lines(id) if "exception" not in line]
    assert lines[: 3 * refusals] == refused * refusals
    rest = ["resize_prep.start", "resize_prep.end", "resize.start", "resize.end", "resize_finish.start",
            "resize_finish.end"] if refusals == 1 else ["compute_task.migrate_server.error"]  # fmt: skip
    assert lines[3 * refusals :] == rest
    senders = [each["publisher_id"] for each in told.messages(id) if "resize_prep" in each["event_type"]]
    assert all(first == second for first, second in zip(senders[::2], senders[1::2], strict=True))
    assert f"nova-compute:{source}" not in senders
    attempt = ["conductor_migrate_server", "cold_migrate"]
    events = [*attempt, "-compute_prep_resize"] * refusals
    events += (
        [*COLD_EVENTS, "compute_finish_resize"] if refusals == 1 else ["-conductor_migrate_server", "-cold_migrate"]
    )
    assert sorted(await _events(user, id)) == sorted(events)


async def test_a_requested_destination_that_refuses(cloud: OneProcess, user: Caller, told: Told) -> None:
    id, source = await _server(cloud, user, told)
    other = next(host for host in cloud.hosts if host != source)
    async with refusing(1):
        await user.admin.act(id, "migrate", {"host": other})
        await cloud.settled()
    assert await _events(user, id) == ["conductor_migrate_server", "cold_migrate", "-compute_prep_resize"]
    assert await _hosts(user, id) == [None, None, other]


@pytest.mark.parametrize(
    ("fault", "kind", "events", "sent"),
    [
        (
            None,
            "",
            [*CHECKED, "compute_live_migration", "compute_post_live_migration_at_destination"],
            [*PRE, "S live_migration_post.start", "D live_migration_post_dest.start",
             "D live_migration_post_dest.end", "S live_migration_post.end"],
        ),
        (
            "check_live_migration",
            "fail",
            ["-conductor_live_migrate_instance", "-compute_check_can_live_migrate_destination"],
            ["D compute.exception", "nova-conductor compute_task.migrate_server.error"],
        ),
        (
            "live_migrate",
            "fail",
            [*CHECKED, "-compute_live_migration", "compute_rollback_live_migration_at_destination"],
            [*PRE, "S compute.exception", *ROLLBACK, *ROLLBACK_DEST],
        ),
    ],
)  # fmt: skip
async def test_live_migrations(
    cloud: OneProcess, user: Caller, told: Told, fault: str | None, kind: str, events: list[str], sent: list[str]
) -> None:
    id, source = await _server(cloud, user, told)
    other, third = [host for host in cloud.hosts if host != source]
    rules = [] if fault is None else [{"operation": fault, "kind": kind, "name": user.project}]
    async with _disabled(user, third), cloud.faults(*rules):
        await user.admin.act(id, "os-migrateLive", LIVE)
        await cloud.settled()
    assert sorted(await _events(user, id)) == sorted(events)
    lines = told.lines(id, S=source, D=other)
    assert sorted(lines) == sorted(sent), lines


async def test_a_live_migration_that_fails_on_its_destination(cloud: OneProcess, user: Caller, told: Told) -> None:
    """The guest was sent there: that it is removed is told once, when the host says so."""
    id, source = await _server(cloud, user, told)
    other = next(host for host in cloud.hosts if host != source)

    async def rolled_back() -> list[str] | None:
        lines = [line for line in told.lines(id, S=source, D=other) if "exception" not in line]
        return lines if ROLLBACK_DEST[-1] in lines and ROLLBACK[-1] in lines else None

    async with cloud.faults({"operation": "receive_live_guest", "kind": "fail", "name": user.project}):
        await user.admin.act(id, "os-migrateLive", {**LIVE, "host": other})
        lines = await cloud.until(rolled_back, "both hosts to tell of the failure")
    arriving = ["S live_migration_post.start", "D live_migration_post_dest.start"]
    assert sorted(lines) == sorted([*PRE, *arriving, *ROLLBACK, *ROLLBACK_DEST])
    await cloud.settled()
    assert await user.host_of(id) == source
    await cloud.assert_clean()


async def test_a_live_migration_without_a_host(cloud: OneProcess, user: Caller, told: Told) -> None:
    id, source = await _server(cloud, user, told)
    other = next(host for host in cloud.hosts if host != source)
    async with _disabled(user, *(host for host in cloud.hosts if host != source)):
        await user.admin.act(id, "os-migrateLive", LIVE)
        await cloud.settled()
        assert await _events(user, id) == ["-conductor_live_migrate_instance"]
        # Up to 2.33 the answer says it.
        body = {"os-migrateLive": OLD_LIVE}
        assert "No valid host" in await user.admin.at(24).refused(400, "POST", f"/servers/{id}/action", body)
        assert await _events(user, id) == ["-conductor_migrate_server"]
    assert told.lines(id, S=source) == ["nova-conductor compute_task.migrate_server.error"] * 2
    # So do the checks of the source and of a destination that is named.
    for minor, host in ((29, source), (34, source)):
        asked = {"os-migrateLive": {"host": host, "block_migration": "True"}}
        if minor <= 33:
            assert "current host" in await user.admin.at(minor).refused(400, "POST", f"/servers/{id}/action", asked)
        else:
            await user.admin.at(minor).act(id, "os-migrateLive", asked["os-migrateLive"])
            await cloud.settled()
        assert (await _events(user, id))[0].startswith("-conductor_")
    await cloud.healthy()
    async with cloud.forced_down(source):
        asked = {"os-migrateLive": {"host": other, "block_migration": "True"}}
        assert "unavailable" in await user.admin.at(33).refused(400, "POST", f"/servers/{id}/action", asked)
        await user.admin.act(id, "os-migrateLive", asked["os-migrateLive"])
        await cloud.settled()
        assert await _events(user, id) == ["-conductor_live_migrate_instance"]
    assert (await user.show(id))["status"] == "ACTIVE"
    await user.admin.at(24).act(id, "os-migrateLive", OLD_LIVE)
    await cloud.settled()
    assert "conductor_migrate_server" in await _events(user, id)
    await cloud.assert_clean()


async def test_an_abort_and_a_forced_end(cloud: OneProcess, user: Caller, told: Told) -> None:
    id, source = await _server(cloud, user, told)
    other = next(host for host in cloud.hosts if host != source)

    async def running() -> str | None:
        found = (await user.admin.get(f"/servers/{id}/migrations"))["migrations"]
        return f"/servers/{id}/migrations/{found[0]['id']}" if found and found[0]["status"] == "running" else None

    async def rolled_back() -> list[str] | None:
        lines = told.lines(id, S=source, D=other)
        return [line for line in lines if line.startswith("D ")] if ROLLBACK_DEST[-1] in lines else None

    async with cloud.faults({"operation": "live_migrate", "kind": "hang", "name": user.project, "count": 1}):
        await user.admin.act(id, "os-migrateLive", {**LIVE, "host": other})
        path = await cloud.until(running, "the live migration to run")
        await cloud.fault_struck()
        told.made.clear()
        await user.admin.delete(path, 202)
        await cloud.settled()
    assert await _events(user, id) == ["compute_live_migration_abort"]
    abort = [f"S live_migration_abort.{phase}" for phase in ("start", "end")]
    lines = [line for line in told.lines(id, S=source, D=other) if "exception" not in line]
    assert [line for line in lines if not line.startswith("D ")] == [*abort, *ROLLBACK]
    # The destination tells of its own part when it has nothing of the guest any more.
    assert await cloud.until(rolled_back, "the destination to have removed the guest") == ROLLBACK_DEST
    async with cloud.faults({"operation": "live_migrate", "kind": "hang", "name": user.project, "count": 1}):
        await user.admin.act(id, "os-migrateLive", LIVE)
        path = await cloud.until(running, "the live migration to run")
        await user.admin.post(f"{path}/action", {"force_complete": None})
        await cloud.settled()
    assert await _events(user, id) == ["compute_live_migration_force_complete"]


@pytest.mark.parametrize("minor", [94, 104])
async def test_an_evacuation(cloud: OneProcess, user: Caller, told: Told, minor: int) -> None:
    id, source = await _server(cloud, user, told)
    other = next(host for host in cloud.hosts if host != source)
    async with cloud.forced_down(source):
        await user.admin.at(minor).act(id, "evacuate", {"host": other}, 200)
        await cloud.settled()
    stops = ["D power_off.start", "D power_off.end"] if minor >= 95 else []
    assert told.lines(id, S=source, D=other) == [
        "nova-api evacuate", "nova-conductor rebuild_scheduled", "D rebuild.start", *stops, "D rebuild.end",
    ]  # fmt: skip
    payloads = {each["event_type"]: each["payload"]["nova_object.name"] for each in told.messages(id)}
    assert payloads["instance.rebuild_scheduled"] == "InstanceActionRebuildPayload"
    assert payloads["instance.evacuate"] == "InstanceActionPayload"
    events = ["rebuild_server", "compute_rebuild_instance", *(["compute_stop_instance"] if stops else [])]
    assert await _events(user, id) == events
    await cloud.assert_clean()


@pytest.mark.parametrize("why", ["no host", "the host fails"])
async def test_an_evacuation_that_fails(cloud: OneProcess, user: Caller, told: Told, why: str) -> None:
    id, source = await _server(cloud, user, told)
    other, third = [host for host in cloud.hosts if host != source]
    rule = {"operation": "spawn", "kind": "fail", "name": user.project}
    async with cloud.forced_down(source), _disabled(user, third, *([other] if why == "no host" else [])):
        async with cloud.faults(rule):
            await user.admin.act(id, "evacuate", {}, 200)
            await cloud.settled()
        [migration] = (await user.admin.get(f"/os-migrations?instance_uuid={id}"))["migrations"]
        lines = told.lines(id, S=source, D=other)
        if why == "no host":
            assert migration["status"] == "error"
            assert lines == ["nova-api evacuate", "nova-conductor compute_task.rebuild_server.error"]
            failed = told.messages(id)[-1]
            assert failed["payload"]["nova_object.data"]["request_spec"] is not None
            assert await _events(user, id) == ["-rebuild_server"]
        else:
            assert migration["status"] == "failed"
            assert [line for line in lines if "exception" not in line] == [
                "nova-api evacuate", "nova-conductor rebuild_scheduled", "D rebuild.start", "D rebuild.error",
            ]  # fmt: skip
            events = ["rebuild_server", "-compute_rebuild_instance", "-rebuild_server"]
            assert await _events(user, id) == events
            assert await _hosts(user, id) == [None, other, None]
    await user.admin.act(id, "os-resetState", {"state": "active"})


async def test_an_evacuation_begins_once_if_a_host_lacks_something(
    cloud: OneProcess, user: Caller, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host counts as one that was not tried."""
    monkeypatch.setattr(engine, "LONGEST_PAUSE", 0.1)
    id, source = await _server(cloud, user, told)
    async with cloud.forced_down(source):
        async with cloud.faults({"operation": "spawn", "kind": "unavailable", "name": user.project, "count": 1}):
            await user.admin.at(94).act(id, "evacuate", {}, 200)
            await user.wait_for(id, "ACTIVE", task=None)
        await cloud.settled()
    names = [line.partition(" ")[2] for line in told.lines(id) if "exception" not in line]
    assert names == ["evacuate", "rebuild_scheduled", "rebuild.start", "rebuild.end"]
    assert await _events(user, id) == ["rebuild_server", "-compute_rebuild_instance", "compute_rebuild_instance"]
    await cloud.assert_clean()


async def test_an_unshelve_begins_once_if_a_host_lacks_something(
    cloud: OneProcess, user: Caller, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LONGEST_PAUSE", 0.1)
    id, _ = await _server(cloud, user, told)
    await user.act(id, "shelve")
    await user.wait_for(id, "SHELVED_OFFLOADED")
    told.made.clear()
    async with cloud.faults({"operation": "spawn", "kind": "unavailable", "name": user.project, "count": 1}):
        await user.act(id, "unshelve")
        await user.wait_for(id, "ACTIVE")
    names = [line.partition(" ")[2] for line in told.lines(id) if "exception" not in line]
    assert names == ["unshelve.start", "unshelve.end"]
    assert await _events(user, id) == [
        "get_image_info", "schedule_instances", "-compute_unshelve_instance", "compute_unshelve_instance",
    ]  # fmt: skip
    await cloud.assert_clean()


@pytest.mark.parametrize(
    ("action", "call", "value", "status", "event"),
    [
        ("os-stop", "power_off", None, 202, "compute_stop_instance"),
        ("pause", "pause", None, 202, "compute_pause_instance"),
        ("suspend", "suspend", None, 202, "compute_suspend_instance"),
        ("rescue", "rescue", None, 200, "compute_rescue_instance"),
        ("trigger_crash_dump", "trigger_crash_dump", None, 202, "compute_trigger_crash_dump"),
        ("reboot", "reboot", {"type": "HARD"}, 202, "compute_reboot_instance"),
    ],
)
async def test_actions_that_fail(
    cloud: OneProcess, user: Caller, told: Told, action: str, call: str, value: Any, status: int, event: str
) -> None:
    """Of these only a reboot has a notification of its failure; compute.exception tells of all."""
    id, source = await _server(cloud, user, told)
    async with cloud.faults({"operation": call, "kind": "fail", "name": user.project}):
        await user.act(id, action, value, status)
        await cloud.settled()
    name = {"os-stop": "power_off"}.get(action, action)
    errors = ["S reboot.error"] if action == "reboot" else []
    assert sorted(told.lines(id, S=source)) == sorted([f"S {name}.start", "S compute.exception", *errors])
    assert await _events(user, id) == [f"-{event}"]


async def test_locks_and_shelving(cloud: OneProcess, user: Caller, told: Told) -> None:
    id, source = await _server(cloud, user, told)
    await user.act(id, "lock")
    await user.act(id, "unlock")
    assert told.lines(id, S=source) == ["nova-api lock", "nova-api unlock"]
    await user.act(id, "shelve")
    await user.wait_for(id, "SHELVED_OFFLOADED")
    async with _disabled(user, *cloud.hosts):
        await user.act(id, "unshelve")
        await cloud.settled()
        assert await _events(user, id) == ["get_image_info", "-schedule_instances"]
    await user.act(id, "unshelve")
    await user.wait_for(id, "ACTIVE")
    assert await _events(user, id) == ["get_image_info", "schedule_instances", "compute_unshelve_instance"]


async def test_a_build_without_a_host(cloud: OneProcess, user: Caller, told: Told) -> None:
    async with _disabled(user, *cloud.hosts):
        id = await user.create(imageRef=await image(user))
        await user.wait_for(id, "ERROR")
        await cloud.settled()
    assert told.lines(id) == ["nova-conductor compute_task.build_instances.error"]
    assert await _events(user, id) == ["-conductor_schedule_and_build_instances"]
