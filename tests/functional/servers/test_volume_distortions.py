"""Operations on volumes end when messages are lost or doubled and when the conductor crashes after a step.

The audit finds nothing afterwards."""

import dataclasses
from random import Random
from typing import Any

import pytest

from micronova.conductor import heartbeat_transaction
from micronova.conductor.operations.engine import Crash
from micronova.objects.clock import SystemClock
from micronova.rpc.bus import Bus
from tests.distort import DistortedBus, Distortion
from tests.functional.cloud import Caller, Cloud, CloudOptions, one_process, only_in_one_process
from tests.functional.servers.embedded_services import image
from tests.functional.servers.test_volumes import Volumes, attachment, extended

pytestmark = only_in_one_process("distorts the bus, and crashes the conductor at chosen steps")

QUICK = CloudOptions(
    roles=("volume", "image"),
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 5.0},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)
BUSES = {
    "every cast is lost": Distortion(drop_casts=True),
    "messages come twice, late and in any order": Distortion(twice=True, longest_delay=0.1),
}


@pytest.fixture(autouse=True)
def resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a lost order again sooner than a real cloud does."""
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)


def _wrapped(distortion: Distortion) -> Any:
    def wrap(bus: Bus) -> Bus:
        return DistortedBus(bus, distortion, clock=SystemClock(), random=Random(7))

    return wrap


async def _story(cloud: Cloud) -> None:
    """Boot with volumes, attach one more, fail to attach, extend, swap, fail to swap, move, detach, delete."""
    user = cloud.caller()
    volumes = Volumes(user)
    first, second, source = await volumes.create(), await volumes.create(), await image(user)
    devices = [
        {"source_type": "image", "destination_type": "local", "boot_index": 0, "uuid": source},
        {"source_type": "volume", "destination_type": "volume", "uuid": first},
        {"source_type": "blank", "destination_type": "volume", "volume_size": 1, "delete_on_termination": True},
    ]
    server = (await user.boot(name="with-volumes", imageRef=source, block_device_mapping_v2=devices))["id"]
    path = f"/servers/{server}/os-volume_attachments"
    async with cloud.faults({"operation": "attach_volume", "kind": "fail", "name": "with-volumes"}):
        await user.at(100).refused(500, "POST", path, attachment(second))
    await volumes.until(second, "available")
    await user.at(100).post(path, attachment(second), 200)
    await volumes.until(second, "in-use")
    await volumes.request("POST", f"/volumes/{second}/action", {"os-extend": {"new_size": 2}})
    assert (await volumes.until(second, "in-use"))["size"] == 2
    await cloud.until(lambda: extended(user, server), "the guest to see the new size")
    larger = await volumes.create(size=2)
    await user.admin.put(f"{path}/{second}", attachment(larger), 202)
    await volumes.until(second, "available")
    await volumes.until(larger, "in-use")
    async with cloud.faults({"operation": "swap_volume", "kind": "fail", "name": "with-volumes"}):
        await user.admin.put(f"{path}/{larger}", attachment(second), 202)
        await volumes.until(second, "available")
        await volumes.until(larger, "in-use")
    await user.admin.put(f"{path}/{larger}", attachment(second), 202)
    await volumes.until(larger, "available")
    await volumes.until(second, "in-use")
    await _migrate(user, server)
    assert len((await user.get(path))["volumeAttachments"]) == 3
    await user.delete(f"{path}/{second}", 202)
    await volumes.until(second, "available")
    async with cloud.faults({"operation": "detach_volume", "kind": "fail", "name": "with-volumes"}):
        await user.delete(f"{path}/{first}", 202)
        await user.wait_for(server, "ACTIVE")
    await volumes.until(first, "in-use")
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    await volumes.until(first, "available")
    await cloud.assert_clean()

    async def only_ours() -> bool | None:
        return await volumes.ids() == {first, second, larger} or None

    await cloud.until(only_ours, "the blank volume to be deleted")
    assert await volumes.attachments() == []


async def _story_of_roots(cloud: Cloud) -> None:
    """Boot from a volume, make an image of it, shelve, unshelve, boot from the image, and rebuild."""
    user = cloud.caller()
    volumes = Volumes(user)
    source = await image(user)
    root = {
        "source_type": "image", "destination_type": "volume", "boot_index": 0, "uuid": source, "volume_size": 1,
        "delete_on_termination": True,
    }  # fmt: skip
    server = (await user.boot(name="from-volume", imageRef=None, block_device_mapping_v2=[root]))["id"]
    made = (await user.post(f"/servers/{server}/action", {"createImage": {"name": "safe"}}))["image_id"]
    [held] = (await user.get(f"/servers/{server}/os-volume_attachments"))["volumeAttachments"]
    await user.act(server, "shelve")
    await user.wait_for(server, "SHELVED_OFFLOADED")
    await volumes.until(held["volumeId"], "reserved")
    await user.act(server, "unshelve")
    await user.wait_for(server, "ACTIVE")
    await volumes.until(held["volumeId"], "in-use")
    other = (await user.boot(imageRef=made))["id"]
    await user.post(f"/servers/{server}/action", {"rebuild": {"imageRef": await image(user)}})
    await user.wait_for(server, "ACTIVE")
    await volumes.until(held["volumeId"], "in-use")
    for each in (await volumes.request("GET", "/snapshots"))["snapshots"]:  # volumes with snapshots are not deleted
        await volumes.request("DELETE", f"/snapshots/{each['id']}")

    async def no_snapshots() -> bool | None:
        return (await volumes.request("GET", "/snapshots"))["snapshots"] == [] or None

    await cloud.until(no_snapshots, "the snapshots to be deleted")
    for each in (server, other):
        await user.delete(f"/servers/{each}")
        await user.gone(each)

    async def none_left() -> bool | None:
        return await volumes.ids() == set() or None

    await cloud.until(none_left, "the volumes to be deleted")
    await cloud.assert_clean()


async def _migrate(user: Caller, server: str) -> None:
    await user.admin.act(server, "migrate")
    await user.wait_for(server, "VERIFY_RESIZE")
    await user.act(server, "confirmResize", None, 204)
    await user.wait_for(server, "ACTIVE")


@pytest.mark.parametrize("name", BUSES)
async def test_operations_end_when(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    options = dataclasses.replace(QUICK, wrap_bus=_wrapped(BUSES[name]))
    async with one_process(tmp_path_factory.mktemp("cloud"), options) as cloud:
        await _story(cloud)
        await _story_of_roots(cloud)


async def test_operations_end_when_the_conductor_crashes_after_a_step(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    due = {
        ("build", "connected"),
        ("build", "dispatched"),
        ("attach_volume", "connected"),
        ("attach_volume", "dispatched"),
        ("detach_volume", "dispatched"),
        ("extend_volume", "dispatched"),
        ("swap_volume", "connected"),
        ("swap_volume", "dispatched"),
        ("settle_volumes", "told"),
        ("migrate", "connected"),
        ("delete", "dispatched"),
        ("shelve", "dispatched"),
        ("shelve", "connected"),
        ("shelve", "offload"),
        ("unshelve_offloaded", "connected"),
        ("unshelve_offloaded", "dispatched"),
        ("rebuild", "prep"),
        ("rebuild", "connected"),
        ("rebuild", "asked"),
        ("rebuild", "dispatched"),
    }

    def crash(kind: str, step: str) -> None:
        if (kind, step) in due:
            due.discard((kind, step))
            raise Crash(f"{kind} {step}")

    options = dataclasses.replace(QUICK, after_commit=crash)
    async with one_process(tmp_path_factory.mktemp("cloud"), options) as cloud:
        await _story(cloud)
        await _story_of_roots(cloud)
    assert not due, f"nothing came to {due}"
