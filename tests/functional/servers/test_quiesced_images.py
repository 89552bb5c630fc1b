"""Images of servers whose root disk is a volume and whose guest has an agent: it is frozen for the snapshots."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from micronova.clients.volume.client import VolumeClient
from micronova.compute import quiesced_guests
from micronova.compute.manager import ComputeManager
from micronova.embedded.volume.operations.base import Apply, Attempt
from micronova.embedded.volume.operations.snapshot_work import CreateSnapshot
from micronova.servers import quiescing
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import image
from tests.functional.servers.test_boot_from_volume import device
from tests.functional.servers.test_volume_images import _make, _nothing_left, _snapshots
from tests.functional.servers.test_volumes import Volumes

CLOUD = CloudOptions(roles=("volume", "image"), settings={"conductor": {"lease": 1.0, "sweep_interval": 0.1}})
pytestmark = only_in_one_process("the cluster of the tests has no volume service")

AGENT: dict[str, Any] = {"hw_qemu_guest_agent": "yes"}
REQUIRED: dict[str, Any] = {**AGENT, "os_require_quiesce": "yes"}
BODY = {"createImage": {"name": "i"}}


@pytest_asyncio.fixture(loop_scope="module")
async def volumes(user: Caller) -> AsyncIterator[Volumes]:
    yield Volumes(user)


async def _server(user: Caller, properties: dict[str, Any], **fields: Any) -> str:
    """Boot a server from a volume that is made of an image with these properties, with a second volume."""
    source = await image(user, **properties)
    blank = {"source_type": "blank", "destination_type": "volume", "volume_size": 1, "delete_on_termination": True}
    mapping = [device(source, delete_on_termination=True), blank]
    return str((await user.boot(imageRef=None, block_device_mapping_v2=mapping, **fields))["id"])


def _is_frozen(cloud: OneProcess, server: str) -> bool:
    managers = [role for role in cloud.process.started if isinstance(role, ComputeManager)]
    drivers: list[Any] = [agent.host.driver for manager in managers for agent in manager._agents.values()]
    return any(guest.frozen for driver in drivers for guest in driver._store if guest.uuid == server)


async def _thawed(cloud: OneProcess, server: str) -> None:
    async def is_thawed() -> bool | None:
        return not _is_frozen(cloud, server) or None

    await cloud.until(is_thawed, "the guest to be thawed")


@pytest.fixture
def copies(cloud: OneProcess, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """For each server: whether its guest was frozen whenever a snapshot was complete."""
    seen: dict[str, bool] = {}
    run = CreateSnapshot.run

    async def watched(self: CreateSnapshot, attempt: Attempt) -> Apply:
        applied = await run(self, attempt)
        for server in list(seen):
            seen[server] &= _is_frozen(cloud, server)
        return applied

    monkeypatch.setattr(CreateSnapshot, "run", watched)
    return seen


async def test_the_guest_is_frozen_until_all_snapshots_are_complete(
    cloud: OneProcess, user: Caller, copies: dict[str, bool], volumes: Volumes
) -> None:
    server = await _server(user, REQUIRED)
    copies[server] = True
    await _make(user, server)
    assert len(await _snapshots(volumes)) == 2
    assert copies == {server: True}
    assert not _is_frozen(cloud, server)


@pytest.mark.parametrize("properties", [{}, {"hw_qemu_guest_agent": "no"}])
async def test_a_guest_without_an_agent_is_not_frozen(
    user: Caller, copies: dict[str, bool], properties: dict[str, Any]
) -> None:
    server = await _server(user, properties)
    copies[server] = False
    await _make(user, server)
    assert copies == {server: False}


async def test_a_server_that_is_off_needs_no_freezing(user: Caller) -> None:
    server = await _server(user, REQUIRED)
    await user.act(server, "os-stop")
    await user.wait_for(server, "SHUTOFF")
    await _make(user, server)


async def test_an_image_that_requires_an_agent_and_has_none(user: Caller) -> None:
    server = await _server(user, {"os_require_quiesce": "yes"})
    message = await user.refused(400, "POST", f"/servers/{server}/action", BODY)
    assert "hw_qemu_guest_agent" in message


@pytest.mark.parametrize(("action", "status"), [("pause", "PAUSED"), ("suspend", "SUSPENDED")])
async def test_a_guest_at_rest_with_open_files_cannot_be_frozen(user: Caller, action: str, status: str) -> None:
    server = await _server(user, REQUIRED)
    await user.act(server, action)
    await user.wait_for(server, status)
    assert "os_require_quiesce" in await user.refused(409, "POST", f"/servers/{server}/action", BODY)


async def test_a_guest_that_cannot_be_frozen(cloud: OneProcess, user: Caller, volumes: Volumes) -> None:
    """The request is refused only if the image requires that the guest is frozen."""
    strict, lenient = await _server(user, REQUIRED, name="strict"), await _server(user, AGENT, name="lenient")
    async with cloud.faults({"operation": "quiesce", "name": "strict|lenient"}):
        message = await user.refused(409, "POST", f"/servers/{strict}/action", BODY)
        assert "os_require_quiesce" in message and "Simulated fault" in message
        await _nothing_left(cloud, user, strict, volumes)
        await _make(user, lenient)
    assert len(await _snapshots(volumes)) == 2
    await _make(user, strict)


async def test_a_host_that_cannot_thaw_tries_again(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiesced_guests, "FIRST_PAUSE", 0.01)
    server = await _server(user, REQUIRED, name="cold")
    async with cloud.faults({"operation": "unquiesce", "name": "cold", "kind": "unavailable", "count": 3}):
        await _make(user, server)
    assert not _is_frozen(cloud, server)


async def test_a_failure_in_the_middle_thaws_the_guest(
    cloud: OneProcess, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("micronova.servers.images.IMAGE_CREATION_TIME", 2.0)
    monkeypatch.setattr("micronova.conductor.operations.create_image.IMAGE_CREATION_TIME", 2.0)
    server = await _server(user, REQUIRED)
    with monkeypatch.context() as patched:
        patched.setattr(VolumeClient, "create_snapshot", _dies)
        with pytest.raises(asyncio.CancelledError):
            await user.request("POST", f"/servers/{server}/action", BODY)
    await _thawed(cloud, server)
    await _nothing_left(cloud, user, server, volumes)


async def test_a_guest_that_nobody_thaws_is_thawed_by_its_host(
    cloud: OneProcess, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshots take longer than a guest may be frozen: what its image requires does not hold."""
    monkeypatch.setattr(quiesced_guests, "LIMIT", 0.05)
    server, create = await _server(user, REQUIRED), VolumeClient.create_snapshot
    lenient = await _server(user, AGENT)

    async def late(self: VolumeClient, volume: str, *args: Any, **more: Any) -> str:
        made = await create(self, volume, *args, **more)
        await _thawed(cloud, server)
        await _thawed(cloud, lenient)
        return made

    monkeypatch.setattr(VolumeClient, "create_snapshot", late)
    message = await user.refused(409, "POST", f"/servers/{server}/action", BODY)
    assert "thawed before" in message
    await _nothing_left(cloud, user, server, volumes)
    await _make(user, lenient)


async def test_snapshots_that_take_too_long(
    cloud: OneProcess, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiescing, "SNAPSHOT_TIME", 0.05)
    go_on, run = asyncio.Event(), CreateSnapshot.run

    async def slow(self: CreateSnapshot, attempt: Attempt) -> Apply:
        await go_on.wait()
        return await run(self, attempt)

    strict, lenient = await _server(user, REQUIRED), await _server(user, AGENT)
    monkeypatch.setattr(CreateSnapshot, "run", slow)
    await _make(user, lenient)
    await _thawed(cloud, lenient)
    message = await user.refused(409, "POST", f"/servers/{strict}/action", BODY)
    assert "not complete" in message
    await _thawed(cloud, strict)
    go_on.set()

    async def cleaned() -> bool | None:
        return len(await _snapshots(volumes)) == 2 or None

    await cloud.until(cleaned, "the snapshots of the refused request to be deleted")


async def _dies(*args: Any, **more: Any) -> str:
    raise asyncio.CancelledError
