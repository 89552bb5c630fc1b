"""Volumes that get another image (`os-reimage`): who may, when, and that compute is told; on both databases."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.embedded.volume.backend.exports import SimulatedExports
from micronova.http.client import ASGITransport, ServiceClient
from tests.unit.embedded.network.world import Compute, token
from tests.unit.embedded.volume.world import ALICE, BOB, READER, World, world

SERVICE = "nova@service/service"
NEW, OLD = b"new content", b"old content, which is longer"


class Reimaged:
    """A volume service, and the compute that it tells."""

    def __init__(self, cloud: World, compute: Compute) -> None:
        self.cloud = cloud
        self.compute = compute

    async def ask(self, volume_id: str, image: str, *, as_: str = ALICE, minor: int = 68, **fields: Any) -> int:
        """Ask for an image; return the status of the answer."""
        body = {"os-reimage": {"image_id": image, **fields}}
        return (await self.cloud.call("POST", f"/volumes/{volume_id}/action", body, token=as_, minor=minor)).status

    def content(self, volume_id: str) -> bytes:
        with (self.cloud.directory / "volumes" / volume_id).open("rb") as file:
            return file.read(64).rstrip(b"\0")


@pytest.fixture(params=["sqlite", "postgresql"])
async def found(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Reimaged]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    compute = Compute()
    client = ServiceClient(ASGITransport(compute), token, prefix="/v2.1")
    async with world(tmp_path, url, make_exports=lambda files: SimulatedExports(tmp_path), compute=client) as made:
        yield Reimaged(made, compute)


async def test_a_volume_gets_another_image(found: Reimaged) -> None:
    old, new = found.cloud.images.add(OLD, os_distro="zork"), found.cloud.images.add(NEW, os_type="linux")
    volume = (await found.cloud.create(imageRef=old))["id"]
    assert await found.ask(volume, new, minor=67) == 404  # it is not known yet
    assert await found.ask(volume, new, as_=READER) == 403
    assert await found.ask(volume, new, as_=BOB) == 404
    assert await found.ask(volume, str(uuid.uuid4())) == 400
    assert await found.ask(volume, found.cloud.images.add(NEW, min_disk=2)) == 400
    assert await found.ask(volume, found.cloud.images.add(NEW, owner=BOB)) == 400
    assert found.content(volume) == OLD
    assert await found.ask(volume, new) == 202
    await found.cloud.until(f"/volumes/{volume}", "available")
    shown = (await found.cloud.do("GET", f"/volumes/{volume}"))["volume"]
    metadata = shown["volume_image_metadata"]
    assert metadata["image_id"] == new and metadata["os_type"] == "linux" and "os_distro" not in metadata
    assert shown["bootable"] == "true" and found.content(volume) == NEW
    assert found.compute.events == []


async def test_a_reserved_volume_and_compute(found: Reimaged) -> None:
    """Compute asks for a volume that it has reserved, with an image that its user may see; it is told of the end."""
    new, server = found.cloud.images.add(NEW), str(uuid.uuid4())
    volume = (await found.cloud.create())["id"]
    body = {"attachment": {"volume_uuid": volume, "instance_uuid": server}}
    made = (await found.cloud.do("POST", "/attachments", body, token=SERVICE))["attachment"]["id"]
    await found.cloud.until(f"/volumes/{volume}", "reserved")
    assert await found.ask(volume, new) == 400
    hold = found.cloud.images.hold = asyncio.Event()
    assert await found.ask(volume, new, as_=SERVICE, reimage_reserved=True) == 202
    connector = {"attachment": {"connector": {"host": "h"}}}
    # The guest would use a file that is replaced.
    refused = await found.cloud.call("PUT", f"/attachments/{made}", connector, token=SERVICE)
    assert refused.status == 400 and b"downloading" in refused.body
    hold.set()
    await found.cloud.until(f"/volumes/{volume}", "reserved")
    assert found.content(volume) == NEW
    await found.compute.wait_for(1)
    assert found.compute.events == [("volume-reimaged", server, volume)]
    await found.cloud.do("PUT", f"/attachments/{made}", connector, token=SERVICE)
    await found.cloud.do("POST", f"/attachments/{made}/action", {"os-complete": None}, token=SERVICE)
    assert await found.ask(volume, new, as_=SERVICE, reimage_reserved=True) == 400  # a server uses it


async def test_an_image_that_is_refused(found: Reimaged) -> None:
    """The volume is what it was, and its status says that something is wrong; another image mends it."""
    volume = (await found.cloud.create(imageRef=found.cloud.images.add(OLD)))["id"]
    wrong = found.cloud.images.add(NEW, disk_format="qcow2")
    assert await found.ask(volume, wrong) == 202
    with pytest.raises(AssertionError, match="error"):
        await found.cloud.until(f"/volumes/{volume}", "available")
    assert found.content(volume) == OLD
    messages = (await found.cloud.do("GET", "/messages"))["messages"]
    assert messages[0]["resource_uuid"] == volume and "image" in messages[0]["user_message"]
    assert await found.ask(volume, found.cloud.images.add(NEW)) == 202
