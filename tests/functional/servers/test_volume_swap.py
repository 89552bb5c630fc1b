"""A volume of a server is copied to another one, which takes its place; on the embedded volume service."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from micronova.clients.volume.client import VolumeClient
from micronova.notifications import unversioned, versioned
from micronova.objects.errors import Invalid
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.test_volumes import Volumes, attachment

CLOUD = CloudOptions(roles=("volume",), hosts=2)
pytestmark = only_in_one_process("the cluster of the tests has no volume service")


@pytest_asyncio.fixture(loop_scope="module")
async def volumes(user: Caller) -> AsyncIterator[Volumes]:
    yield Volumes(user)


class Swapping:
    """A server with a volume, and another volume."""

    def __init__(self, cloud: Cloud, user: Caller, volumes: Volumes) -> None:
        self.cloud, self.user, self.volumes = cloud, user, volumes
        self.name = f"vm-{uuid.uuid4().hex[:8]}"
        self.server = self.old = self.new = self.path = ""

    async def begin(self, **fields: Any) -> "Swapping":
        self.server = (await self.user.boot(name=self.name))["id"]
        self.path = f"/servers/{self.server}/os-volume_attachments"
        self.old, self.new = await self.volumes.create(), await self.volumes.create(**fields)
        await self.user.at(100).post(self.path, attachment(self.old, tag="data"), 200)
        await self.volumes.until(self.old, "in-use")
        return self

    async def ask(self, minor: int = 89, **fields: Any) -> None:
        """Ask for the swap."""
        await self.user.admin.at(minor).put(f"{self.path}/{self.old}", attachment(self.new, **fields), 202)

    async def ended(self, used: str, free: str) -> dict[str, Any]:
        """Wait until the server uses one volume and the other is free; return the attachment that compute shows."""
        await self.volumes.until(free, "available")
        await self.volumes.until(used, "in-use")
        await self.cloud.assert_clean()
        shown = await self.volumes.show(used)
        [listed] = (await self.user.get(self.path))["volumeAttachments"]
        [held] = await self.volumes.attachments()
        assert (held["id"], held["volume_id"], held["status"]) == (listed["attachment_id"], used, "attached")
        assert [each["attachment_id"] for each in shown["attachments"]] == [held["id"]]
        guest = (await self.cloud.guests(await self.user.host_of(self.server)))[self.server]
        assert guest.volumes == (used,)
        return dict(listed)

    async def event(self) -> dict[str, Any]:
        """Return the event of the swap."""
        actions = f"/servers/{self.server}/os-instance-actions"
        newest = (await self.user.get(actions))["instanceActions"][0]
        assert newest["action"] == "swap_volume"
        shown = (await self.user.admin.get(f"{actions}/{newest['request_id']}"))["instanceAction"]
        return dict(shown["events"][0])


@pytest_asyncio.fixture(loop_scope="module")
async def swapping(cloud: Cloud, user: Caller, volumes: Volumes) -> Swapping:
    return Swapping(cloud, user, volumes)


async def test_two_equal_requests(swapping: Swapping, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both get the same reservation; the one that is refused leaves it to the other one."""
    await swapping.begin()
    both, reserve, asked = asyncio.Event(), VolumeClient.reserve, 0

    async def together(self: VolumeClient, *args: Any, **fields: Any) -> str:
        nonlocal asked
        asked += 1
        if asked == 2:
            both.set()
        await both.wait()
        return await reserve(self, *args, **fields)

    monkeypatch.setattr(VolumeClient, "reserve", together)
    path, body = f"{swapping.path}/{swapping.old}", attachment(swapping.new)
    admin = swapping.user.admin.at(89)
    answers = await asyncio.gather(*(admin.request("PUT", path, body) for _ in range(2)))
    statuses = sorted(answer.status for answer in answers)
    assert statuses[0] == 202 and statuses[1] in (400, 404, 409), statuses
    await swapping.ended(swapping.new, swapping.old)


async def test_another_volume_takes_the_place(swapping: Swapping) -> None:
    await swapping.begin(size=2)
    [before] = (await swapping.user.get(swapping.path))["volumeAttachments"]
    await swapping.user.refused(403, "PUT", f"{swapping.path}/{swapping.old}", attachment(swapping.new))
    await swapping.ask(84)
    after = await swapping.ended(swapping.new, swapping.old)
    assert after == {**before, "volumeId": swapping.new, "attachment_id": after["attachment_id"]}
    event = await swapping.event()
    assert (event["event"], event["result"]) == ("compute_swap_volume", "Success")
    await swapping.user.refused(404, "DELETE", f"{swapping.path}/{swapping.old}")
    await swapping.user.delete(f"{swapping.path}/{swapping.new}", 202)
    await swapping.volumes.until(swapping.new, "available")


async def test_what_happens_at_the_end_of_the_server_changes_too(swapping: Swapping) -> None:
    await swapping.begin()
    await swapping.ask(85, delete_on_termination=True)
    assert (await swapping.ended(swapping.new, swapping.old))["delete_on_termination"] is True
    await swapping.user.delete(f"/servers/{swapping.server}")
    await swapping.user.gone(swapping.server)

    async def removed() -> bool | None:
        return await swapping.volumes.ids() == {swapping.old} or None

    await swapping.cloud.until(removed, "the volume to be deleted")


@pytest.mark.parametrize("state", ["paused", "resized"])
async def test_states_that_allow_it(swapping: Swapping, state: str) -> None:
    await swapping.begin()
    user, server = swapping.user, swapping.server
    if state == "paused":
        await user.act(server, "pause")
        await user.wait_for(server, "PAUSED")
    else:
        await user.admin.act(server, "migrate")
        await user.wait_for(server, "VERIFY_RESIZE")
    await swapping.ask()
    await swapping.ended(swapping.new, swapping.old)
    if state == "resized":
        await user.act(server, "revertResize")
        await user.wait_for(server, "ACTIVE")
        await swapping.ended(swapping.new, swapping.old)


async def test_a_copy_that_fails_changes_nothing(swapping: Swapping) -> None:
    await swapping.begin()
    fault = {"operation": "swap_volume", "name": swapping.name, "kind": "fail", "message": "the copy broke"}
    async with swapping.cloud.faults(fault):
        await swapping.ask()
        listed = await swapping.ended(swapping.old, swapping.new)
    assert listed["volumeId"] == swapping.old
    event = await swapping.event()
    assert event["result"] == "Error" and "the copy broke" in str(event["details"])
    assert (await swapping.user.show(swapping.server))["status"] == "ACTIVE"
    await swapping.ask()
    await swapping.ended(swapping.new, swapping.old)


async def test_a_volume_that_cannot_be_connected_changes_nothing(
    swapping: Swapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    await swapping.begin()

    async def refuse(*_: Any) -> None:
        raise Invalid("no such host")

    with monkeypatch.context() as refused:
        refused.setattr(VolumeClient, "connect", refuse)
        await swapping.ask()
        await swapping.ended(swapping.old, swapping.new)
    assert (await swapping.event())["result"] == "Error"


async def test_notifications(swapping: Swapping, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the names and the payload that Nova's instance.volume_swap has."""
    await swapping.begin()
    sent: list[tuple[str, dict[str, Any]]] = []

    def instance(
        event: str, row: Any, *, context: Any, fault: Any = None, details: Any = None, sender: Any = None
    ) -> None:
        assert unversioned.event_name(event) is None
        sent.append((event, versioned.instance_payload("volume_swap", row, context, fault, details)))

    monkeypatch.setattr(swapping.cloud.process.notifier, "enabled", True)
    monkeypatch.setattr(swapping.cloud.process.notifier, "instance", instance)
    async with swapping.cloud.faults({"operation": "swap_volume", "name": swapping.name, "kind": "fail"}):
        await swapping.ask()
        await swapping.ended(swapping.old, swapping.new)
    await swapping.ask()
    await swapping.ended(swapping.new, swapping.old)
    assert [event for event, _ in sent] == [f"volume_swap.{phase}" for phase in ("start", "error", "start", "end")]
    for event, payload in sent:
        assert (payload["nova_object.name"], payload["nova_object.version"]) == (
            "InstanceActionVolumeSwapPayload",
            "1.9",
        )
        data = payload["nova_object.data"]
        assert (data["old_volume_id"], data["new_volume_id"]) == (swapping.old, swapping.new)
        assert (data["fault"] is not None) == event.endswith("error")


async def test_a_server_that_is_deleted_meanwhile(swapping: Swapping) -> None:
    await swapping.begin()
    rule = {"operation": "swap_volume", "name": swapping.name, "kind": "hang"}
    async with swapping.cloud.faults(rule):
        await swapping.ask()
        await swapping.volumes.until(swapping.new, "attaching")
        await swapping.user.delete(f"/servers/{swapping.server}")
        await swapping.user.gone(swapping.server)
    for volume in (swapping.old, swapping.new):
        await swapping.volumes.until(volume, "available")
    assert await swapping.volumes.attachments() == []
    await swapping.cloud.assert_clean()


async def test_what_is_refused(swapping: Swapping) -> None:
    await swapping.begin()
    user, admin, volumes = swapping.user, swapping.user.admin, swapping.volumes
    one = f"{swapping.path}/{swapping.old}"
    await admin.refused(400, "PUT", one, attachment(str(uuid.uuid4())))
    await admin.refused(404, "PUT", f"{swapping.path}/{swapping.new}", attachment(swapping.old))
    await admin.at(84).refused(404, "PUT", f"{swapping.path}/{swapping.new}", attachment(swapping.old))
    assert "available" in await admin.at(84).refused(400, "PUT", one, attachment(swapping.old))
    used = await volumes.create()
    await user.at(100).post(swapping.path, attachment(used), 200)
    assert "available" in await admin.refused(400, "PUT", one, attachment(used))
    await volumes.until(used, "in-use")
    await user.delete(f"{swapping.path}/{used}", 202)
    large = await volumes.create(size=2)
    await user.at(100).post(swapping.path, attachment(large), 200)
    await volumes.until(large, "in-use")
    small = await admin.refused(400, "PUT", f"{swapping.path}/{large}", attachment(swapping.new))
    assert "2 GiB" in small
    await user.delete(f"{swapping.path}/{large}", 202)
    await user.wait_for(swapping.server, "ACTIVE")
    await admin.act(swapping.server, "lock")
    await admin.act(swapping.server, "unlock")
    await user.act(swapping.server, "os-stop")
    await user.wait_for(swapping.server, "SHUTOFF")
    await admin.refused(409, "PUT", one, attachment(swapping.new))
    assert (await volumes.show(swapping.old))["status"] == "in-use"
    assert (await volumes.show(swapping.new))["status"] == "available"
    await swapping.cloud.assert_clean()


async def test_a_volume_of_several_servers_is_refused(cloud: Cloud, user: Caller, volumes: Volumes) -> None:
    shared, other = await volumes.create(volume_type=await volumes.multiattach_type()), await volumes.create()
    servers = await user.boot_many(2)
    for server in servers:
        await user.at(100).post(f"/servers/{server}/os-volume_attachments", attachment(shared), 200)
    path = f"/servers/{servers[0]}/os-volume_attachments/{shared}"
    assert "several servers" in await user.admin.refused(400, "PUT", path, attachment(other))
    assert (await volumes.until(shared, "in-use"))["status"] == "in-use"
    assert (await volumes.show(other))["status"] == "available"
