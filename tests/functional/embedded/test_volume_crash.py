"""Operations survive the death of their process: the next start goes on with them, and nothing is left over."""

import asyncio
import errno
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.embedded.volume.backend.files import Files, Interrupted
from micronova.embedded.volume.operations.engine import Engine
from micronova.embedded.volume.operations.leftover_files import remove_leftovers
from tests.unit.embedded.volume.world import TIMEOUT, World, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made


async def restart(cloud: World) -> None:
    """Let the work of this process end where it is, and let another one begin."""
    await cloud.role.engine.stop()
    await remove_leftovers(cloud.role.core, cloud.role.files)
    await cloud.role.engine.start()


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", [
    "blank", "copy", "image", "snapshot", "delete", "delete snapshot", "extend", "revert", "upload", "backup",
    "restore", "delete backup", "reimage",
])  # fmt: skip
async def test_a_death_in_each_operation(cloud: World, monkeypatch: pytest.MonkeyPatch, what: str, done: bool) -> None:
    source = await cloud.create(name="source")
    snapshot = await cloud.snapshot(source["id"])
    image = cloud.images.add(b"content")
    body = {"backup": {"volume_id": source["id"]}}
    backup = (await cloud.do("POST", "/backups", body))["backup"]
    await cloud.until(f"/backups/{backup['id']}", "available")
    method = {
        "blank": "create_blank", "copy": "create_copy", "image": "complete", "snapshot": "create_copy",
        "extend": "grow", "revert": "replace_by_copy", "reimage": "complete", "backup": "create_copy",
        "restore": "replace_by_copy",
    }  # fmt: skip
    reached = asyncio.Event()
    owner: Any = Files if what != "upload" else type(cloud.images)
    name = method.get(what, "remove") if what != "upload" else "upload"
    original = getattr(owner, name)

    async def dying(self: Any, *arguments: Any) -> Any:
        if done:
            await original(self, *arguments)
        reached.set()
        raise Interrupted

    monkeypatch.setattr(owner, name, dying)
    path, status = "", "available"
    match what:
        case "blank" | "copy" | "image":
            fields = {"copy": {"source_volid": source["id"]}, "image": {"imageRef": image}}.get(what, {})
            path = f"/volumes/{(await cloud.create(wait=None, **fields))['id']}"
        case "snapshot":
            body = {"snapshot": {"volume_id": source["id"]}}
            path = f"/snapshots/{(await cloud.do('POST', '/snapshots', body))['snapshot']['id']}"
        case "extend" | "revert" | "upload" | "reimage":
            path = f"/volumes/{source['id']}"
            action, fields = {
                "extend": ("os-extend", {"new_size": 2}),
                "revert": ("revert", {"snapshot_id": snapshot["id"]}),
                "upload": ("os-volume_upload_image", {"image_name": "x"}),
                "reimage": ("os-reimage", {"image_id": image}),
            }[what]
            assert (await cloud.act(source["id"], action, **fields)).status == 202
        case "backup":
            path = f"/backups/{(await cloud.do('POST', '/backups', body))['backup']['id']}"
        case "restore":
            restored = (await cloud.do("POST", f"/backups/{backup['id']}/restore", {"restore": {}}))["restore"]
            path = f"/volumes/{restored['volume_id']}"
        case "delete backup":
            path, status = f"/backups/{backup['id']}", ""
            await cloud.do("DELETE", path)
        case _:
            path = f"/snapshots/{snapshot['id']}" if "snapshot" in what else f"/volumes/{source['id']}?cascade=1"
            status = ""
            await cloud.do("DELETE", path)
            path = path.partition("?")[0]
    await asyncio.wait_for(reached.wait(), TIMEOUT)
    monkeypatch.undo()
    await restart(cloud)
    await cloud.until(path, status)
    for kind in ("volumes", "snapshots", "backups"):
        listed = (await cloud.do("GET", f"/{kind}/detail"))[kind]
        assert {each["status"] for each in listed} <= {"available"}
        sizes = {each["id"]: each["size"] << 30 for each in listed}
        assert {path.name: path.stat().st_size for path in (cloud.directory / kind).iterdir()} == sizes
    assert cloud.files("locks") == []


async def test_parts_of_files_that_nothing_completes_are_removed(cloud: World) -> None:
    """A whole file without a row is kept: it may be all that is left after the loss of a database."""
    volume, unknown = await cloud.create(), str(uuid.uuid4())
    for name in (unknown, f"{uuid.uuid4()}.{uuid.uuid4()}.part", f"{volume['id']}.{uuid.uuid4()}.image.part"):
        (cloud.directory / "volumes" / name).write_bytes(b"left over")
    (cloud.directory / "volumes" / "README").write_bytes(b"not ours")
    assert await remove_leftovers(cloud.role.core, cloud.role.files) == 2
    assert cloud.files() == sorted(["README", volume["id"], unknown])


async def test_two_processes_do_not_do_the_same(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds the lock works."""
    calls = 0
    original = Files.create_blank

    async def counting(self: Files, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        await original(self, *arguments)

    monkeypatch.setattr(Files, "create_blank", counting)
    second = Engine(cloud.role.core, cloud.role.files, cloud.role.engine._kinds.values())
    first_wakes = cloud.role.core.on_operation
    await second.start()
    second_wakes = cloud.role.core.on_operation
    cloud.role.core.on_operation = lambda: (first_wakes(), second_wakes())[0]
    try:
        await asyncio.gather(*(cloud.create(name=str(number)) for number in range(8)))
    finally:
        await second.stop()
    assert calls == 8


async def test_a_full_file_system(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The volume shows an error, a message says why, and nothing is left of it."""

    async def full(self: Files, *_: Any) -> None:
        part = self.part("volumes", *_[1:3])
        part.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", "/some/path")

    monkeypatch.setattr(Files, "create_blank", full)
    volume = await cloud.create(wait=None)
    while (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]["status"] == "creating":
        await asyncio.sleep(0.005)
    assert (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]["status"] == "error"
    assert cloud.files() == []
    monkeypatch.undo()
    await cloud.do("DELETE", f"/volumes/{volume['id']}")
    await cloud.until(f"/volumes/{volume['id']}", "")


async def test_hostile_images(cloud: World) -> None:
    """They are refused before any tool reads them."""
    for data, fields in (
        (b"QFI\xfb" + (3).to_bytes(4, "big") + bytes(500), {"disk_format": "raw"}),
        (b"QFI\xfb" + (3).to_bytes(4, "big") + b"\0" * 7 + b"\x68" + bytes(500), {"disk_format": "qcow2"}),
        (b"x" * (2 << 20), {"disk_format": "qcow2"}),
    ):
        image = cloud.images.add(data, **fields)
        volume = await cloud.create(wait=None, imageRef=image)
        while (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]["status"] != "error":
            await asyncio.sleep(0.005)
        assert cloud.files() == []
        await cloud.do("DELETE", f"/volumes/{volume['id']}")
        await cloud.until(f"/volumes/{volume['id']}", "")


async def test_a_killed_process(tmp_path: Path) -> None:
    """kill -9 in the middle of a download; the next start finishes the volume."""
    script = textwrap.dedent(
        """
        import asyncio, sys
        from pathlib import Path
        from tests.unit.embedded.volume.world import world

        async def main():
            async with world(Path(sys.argv[1])) as cloud:
                cloud.images.hold = asyncio.Event()
                image = cloud.images.add(b"x" * 3_000_000)
                volume = await cloud.create(imageRef=image, wait="downloading")
                print(image, volume["id"], flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert process.stdout is not None
    image_id, volume_id = (await asyncio.to_thread(process.stdout.readline)).decode().split()
    process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(process.wait)
    process.stdout.close()
    async with world(tmp_path) as cloud:
        document = {"id": image_id, "name": "x", "status": "active", "disk_format": "raw", "size": 3_000_000}
        cloud.images.documents[image_id], cloud.images.data[image_id] = document, b"y" * 3_000_000
        await restart(cloud)
        volume = await cloud.until(f"/volumes/{volume_id}", "available")
        assert cloud.files() == [volume["id"]]
        with (cloud.directory / "volumes" / volume_id).open("rb") as stream:
            assert stream.read(3_000_001) == b"y" * 3_000_000 + b"\0"
