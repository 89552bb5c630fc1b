"""An upload that is unsafe or does not have the declared format is refused and leaves nothing."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.conf.settings import load
from micronova.embedded.image.formats import check_format
from micronova.http.client import ASGITransport
from tests.unit.embedded.image.world import OCTETS, World, world
from tests.unit.imageformat import corpus
from tests.unit.imageformat.corpus import HONEST, HOSTILE, Sample

# Formats that clients cannot declare.
UPLOADS = [sample for sample in HOSTILE if sample.declared != "qed"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cloud(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    directory = tmp_path_factory.mktemp("images")
    async with world(directory, check=check_format) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def tool_calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put a qemu-img first in PATH that only records that it was called."""
    directory = tmp_path_factory.mktemp("tools")
    log = directory / "calls"
    shim = directory / "qemu-img"
    shim.write_text(f'#!/bin/sh\necho "$@" >>{log}\n')
    shim.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(directory), prepend=":")
        yield
    assert not log.exists(), log.read_text()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("sample", [each for each in UPLOADS if each.content], ids=str)
async def test_hostile_uploads_are_refused(cloud: World, sample: Sample) -> None:
    files = cloud.files
    image = await cloud.create(disk_format=sample.declared)
    answer = await cloud.upload(image["id"], sample.content)
    assert answer.status == 400
    assert sample.word in answer.json()["message"]
    shown = await cloud.show(image["id"])
    assert (shown["status"], shown["size"], shown["virtual_size"]) == ("queued", None, None)
    assert cloud.files == files
    assert (await cloud.call("GET", f"/v2/images/{image['id']}/file")).status == 204


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("sample", HONEST, ids=str)
async def test_honest_uploads_are_accepted(cloud: World, sample: Sample) -> None:
    image = await cloud.create(disk_format=sample.declared, data=sample.content)
    shown = await cloud.show(image["id"])
    assert shown["status"] == "active"
    assert shown["virtual_size"] is not None


@pytest.mark.asyncio(loop_scope="module")
async def test_a_second_upload_with_an_honest_file_succeeds(cloud: World) -> None:
    image = await cloud.create(disk_format="qcow2")
    assert (await cloud.upload(image["id"], corpus.BACKED)).status == 400
    assert (await cloud.upload(image["id"], corpus.QCOW2)).status == 204
    assert (await cloud.show(image["id"]))["virtual_size"] == 16 << 20


@pytest.mark.asyncio(loop_scope="module")
async def test_staged_data_is_inspected_as_well(cloud: World) -> None:
    image = await cloud.create(disk_format="raw")
    path = f"/v2/images/{image['id']}/stage"
    answer = await cloud.call("PUT", path, corpus.DATA_FILE, headers=OCTETS)
    assert answer.status == 400 and "qcow2" in answer.json()["message"]
    assert (await cloud.show(image["id"]))["status"] == "queued"


@pytest.mark.asyncio(loop_scope="module")
async def test_an_empty_upload_may_have_any_format(cloud: World) -> None:
    """A snapshot of a server that boots from a volume is an image without data."""
    image = await cloud.create(disk_format="qcow2", data=b"")
    assert (await cloud.show(image["id"]))["status"] == "active"


@pytest.mark.asyncio(loop_scope="module")
async def test_the_content_of_containers_is_not_checked(cloud: World) -> None:
    await cloud.create(disk_format="vmdk", container_format="ova", data=b"a tar file")
    image = await cloud.create(disk_format="vmdk", container_format="ovf")
    assert (await cloud.upload(image["id"], corpus.FLAT)).status == 400


async def uploaded(directory: Path, **settings: bool) -> int:
    """Upload a qcow2 with a backing file as raw, to a cloud with these settings; return the status."""
    chosen = load(environ={}, api={"auth_strategy": "noauth2"}, image_format=settings)
    process = Process(chosen, ["image"], StateDirectory(directory))
    await process.start()
    try:
        client = ASGITransport(process.apps["/image"])
        token = {"x-auth-token": "admin:admin"}
        body = b'{"name": "x", "disk_format": "raw", "container_format": "bare"}'
        made = await client.request("POST", "/v2/images", {**token, "content-type": "application/json"}, body)
        path = f"/v2/images/{made.json()['id']}/file"
        return (await client.request("PUT", path, {**token, **OCTETS}, corpus.BACKED)).status
    finally:
        await process.stop()


async def test_operators_can_switch_the_check_off(tmp_path: Path) -> None:
    assert await uploaded(tmp_path / "on") == 400
    assert await uploaded(tmp_path / "off", require_image_format_match=False) == 204
