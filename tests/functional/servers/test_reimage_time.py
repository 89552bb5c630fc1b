"""How long a rebuild waits until the volume service has written the image to the root volume."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from micronova.clients.volume.client import VolumeClient
from micronova.embedded.volume.operations.base import Apply, Attempt
from micronova.embedded.volume.operations.volume_work import ReimageVolume
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import image
from tests.functional.servers.test_volumes import Volumes

WAIT = 0.5  # seconds for a volume that is made, and for each GiB of one that gets an image at least 1
CLOUD = CloudOptions(
    roles=("volume", "image"),
    settings={"cinder": {"creation_timeout": WAIT}, "default": {"reimage_timeout_per_gb": 1}},
)
pytestmark = only_in_one_process("the cluster of the tests has no volume service")


@pytest_asyncio.fixture(loop_scope="module")
async def volumes(user: Caller) -> AsyncIterator[Volumes]:
    yield Volumes(user)


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let the volume service write no image before this is set."""
    event, run = asyncio.Event(), ReimageVolume.run

    async def slow(self: ReimageVolume, attempt: Attempt) -> Apply:
        await event.wait()
        return await run(self, attempt)

    monkeypatch.setattr(ReimageVolume, "run", slow)
    return event


async def _server(user: Caller, volumes: Volumes, size: int) -> tuple[str, str]:
    """Boot a server from a volume of this size; return it and its image."""
    source = await image(user)
    root = await volumes.create(size=size, imageRef=source)
    boots = {"uuid": root, "source_type": "volume", "destination_type": "volume", "boot_index": 0}
    return (await user.boot(imageRef=None, block_device_mapping_v2=[boots]))["id"], source


async def test_it_waits_longer_for_larger_volumes(
    cloud: Cloud, user: Caller, volumes: Volumes, go_on: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, source = await _server(user, volumes, 60)
    clock, ask, begun = asyncio.get_running_loop().time, VolumeClient.volume, list[float]()

    async def volume(self: VolumeClient, *args: Any, **more: Any) -> Any:
        found = await ask(self, *args, **more)
        if found.status == "downloading":
            begun.append(clock())
            if begun[-1] > begun[0] + 2 * WAIT:
                go_on.set()
        return found

    monkeypatch.setattr(VolumeClient, "volume", volume)
    await user.act(server, "rebuild", {"imageRef": source})
    await user.wait_for(server, "ACTIVE")
    assert begun[-1] > begun[0] + 2 * WAIT
    await cloud.assert_clean()


async def test_it_does_not_wait_for_ever(cloud: Cloud, user: Caller, volumes: Volumes, go_on: asyncio.Event) -> None:
    server, source = await _server(user, volumes, 1)
    await user.act(server, "rebuild", {"imageRef": source})
    shown = await user.wait_for(server, "ERROR")
    assert "after we waited 1 seconds" in shown["fault"]["message"]
    go_on.set()
