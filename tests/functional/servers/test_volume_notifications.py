"""instance.volume_attach, instance.volume_detach and volume.usage, in both formats."""

import uuid
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import msgspec
import pytest

from micronova.conductor import volume_usage
from micronova.db import periodic_jobs, volume_usages
from micronova.notifications.notifier import BusNotifier
from micronova.objects.clock import SystemClock, micros
from micronova.objects.volume import VolumeStatistics
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.test_volumes import Volumes, attachment
from tests.schemas import notifications as schema

CLOUD = CloudOptions(hosts=2, roles=("volume",), settings={"default": {"volume_usage_poll_interval": 0.1}})
pytestmark = only_in_one_process("watches the notifier of the cloud's process")

COUNTERS = volume_usages.COUNTERS


class Kept:
    """Keeps the notifications instead of a broker."""

    sent = dropped = unheard = 0

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def put(self, make: Callable[[], list[Any]]) -> None:
        self.messages += make()

    async def wait_for_room(self) -> None:
        """There always is."""


class Told:
    """What was told, of both formats."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    def _of(self, topic: str) -> list[tuple[str, str, Any]]:
        found = []
        for message in self._kept.messages:
            if message.routing_key.partition(".")[0] == topic:
                body = msgspec.json.decode(msgspec.json.decode(message.body)["oslo.message"])
                found.append((body["event_type"], body["priority"], body["payload"]))
        return found

    def versioned(self, name: str) -> list[tuple[str, Any]]:
        """Return the events of a family with their data, which has Nova's form."""
        return [
            (f"{event} {priority}", schema.check(payload))
            for event, priority, payload in self._of("versioned_notifications")
            if event.startswith(name)
        ]

    def old(self, name: str) -> list[tuple[str, Any]]:
        return [(event, payload) for event, _, payload in self._of("notifications") if name in event]


@pytest.fixture
def told(cloud: OneProcess, monkeypatch: pytest.MonkeyPatch) -> Told:
    kept = Kept()
    real = BusNotifier(
        kept,  # type: ignore[arg-type]
        host="controller",
        clock=SystemClock(),
        random=Random(1),
        unversioned_topics=("notifications",),
        versioned_topics=("versioned_notifications",),
    )
    for name in ("enabled", "instance", "announce", "wait_for_room"):
        monkeypatch.setattr(cloud.process.notifier, name, getattr(real, name))
    return Told(kept)


async def test_attach_and_detach(cloud: OneProcess, user: Caller, told: Told) -> None:
    server, volumes = (await user.boot())["id"], Volumes(user)
    volume, other = await volumes.create(), await volumes.create()
    path = f"/servers/{server}/os-volume_attachments"
    await user.at(100).post(path, attachment(volume), 200)
    await volumes.until(volume, "in-use")
    async with cloud.faults({"operation": "attach_volume", "kind": "fail", "count": 1}):
        await user.at(100).refused(500, "POST", path, attachment(other))
    async with cloud.faults({"operation": "detach_volume", "kind": "fail", "count": 1}):
        await user.delete(f"{path}/{volume}", 202)
        await cloud.settled()
    await user.delete(f"{path}/{volume}", 202)
    await cloud.settled()
    found = told.versioned("instance.volume_")
    assert [(event.removeprefix("instance.volume_"), data["volume_id"]) for event, data in found] == [
        ("attach.start INFO", volume), ("attach.end INFO", volume),
        ("attach.start INFO", other), ("attach.error ERROR", other),
        ("detach.start INFO", volume),  # the failure is told by compute.exception
        ("detach.start INFO", volume), ("detach.end INFO", volume),
    ]  # fmt: skip
    assert {data["uuid"] for _, data in found} == {server}
    assert found[3][1]["fault"] is not None and found[1][1]["fault"] is None
    assert [(event, data["volume_id"], data["instance_id"]) for event, data in told.old("compute.instance.volume")] == [
        ("compute.instance.volume.attach", volume, server),
        ("compute.instance.volume.detach", volume, server),
    ]


async def test_usage(cloud: OneProcess, user: Caller, told: Told) -> None:
    server, volumes = (await user.boot())["id"], Volumes(user)
    volume = await volumes.create()
    path = f"/servers/{server}/os-volume_attachments"
    await user.at(100).post(path, attachment(volume), 200)

    def usages() -> list[Any]:
        return [data for _, data in told.versioned("volume.usage") if data["volume_id"] == volume]

    async def polled(count: int) -> bool | None:
        return len(usages()) >= count or None

    await cloud.until(partial(polled, 2), "two notifications")
    first = usages()[0]
    assert (first["project_id"], first["user_id"], first["instance_uuid"]) == (user.project, user.user, server)
    assert first["reads"] >= 1 and first["read_bytes"] == 512 * first["reads"] and first["last_refreshed"]
    [event, old] = told.old("volume.usage")[0]
    assert event == "volume.usage" and set(old) == {
        "volume_id", "tenant_id", "user_id", "availability_zone", "instance_id", "last_refreshed", *COUNTERS,
    }  # fmt: skip
    # A guest that does not run is not counted; one that is started again counts from zero.
    await user.act(server, "os-stop")
    await user.wait_for(server, "SHUTOFF")
    await user.act(server, "os-start")
    await user.wait_for(server, "ACTIVE")
    await cloud.until(partial(polled, len(usages()) + 1), "another notification")
    await user.delete(f"{path}/{volume}", 202)
    await volumes.until(volume, "available")
    await cloud.settled()
    events = [event for event, data in told.versioned("") if data.get("volume_id") == volume]
    assert events[-3:] == ["instance.volume_detach.start INFO", "volume.usage INFO", "instance.volume_detach.end INFO"]
    for name in COUNTERS:
        counts = [usage[name] for usage in usages()]
        assert counts == sorted(counts), name
    # The next server goes on from there.
    last, before = usages()[-1], len(usages())
    other = (await user.boot())["id"]
    await user.at(100).post(f"/servers/{other}/os-volume_attachments", attachment(volume), 200)
    await cloud.until(partial(polled, before + 1), "a notification of the next server")
    assert usages()[-1]["instance_uuid"] == other and usages()[-1]["reads"] > last["reads"]
    assert cloud.process.database is not None
    run = [job for job in await cloud.process.database.read(periodic_jobs.list_) if job.name == volume_usage.NAME]
    assert run and run[0].began_at and not run[0].error


async def test_a_host_that_cannot_measure_stops_nothing(cloud: OneProcess, user: Caller, told: Told) -> None:
    server, volumes = (await user.boot())["id"], Volumes(user)
    volume = await volumes.create()
    path = f"/servers/{server}/os-volume_attachments"
    async with cloud.faults({"operation": "diagnostics", "kind": "fail"}):
        await user.at(100).post(path, attachment(volume), 200)
        await volumes.until(volume, "in-use")
        await user.delete(f"{path}/{volume}", 202)
        await volumes.until(volume, "available")
        await cloud.settled()
    assert not [data for _, data in told.versioned("volume.usage") if data["volume_id"] == volume]


async def test_what_hosts_say_of_other_volumes_is_ignored(cloud: OneProcess, user: Caller) -> None:
    server, volumes = await user.boot(), Volumes(user)
    volume, now = await volumes.create(), micros(SystemClock().now())
    id, strange = server["id"], str(uuid.uuid4())
    await user.at(100).post(f"/servers/{id}/os-volume_attachments", attachment(volume), 200)
    host = (await user.admin.get(f"/servers/{id}"))["server"]["OS-EXT-SRV-ATTR:host"]
    counts: dict[str, int] = dict.fromkeys(COUNTERS, 5)
    measured = {id: [VolumeStatistics(volume_id=each, **counts) for each in (volume, strange)], strange: []}

    database = cloud.process.database
    assert database is not None

    async def record(host: str) -> list[str]:
        return [usage.volume_id for usage in await database.write(volume_usages.record, host, measured, now)]

    assert await record("elsewhere") == []
    assert await record(host) == [volume]
    assert await database.write(volume_usages.purge, now + 1) >= 1
