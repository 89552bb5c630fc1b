"""Operations of the volume service: whose turn it is, what is repeated, what a cancelled one gives back."""

import asyncio
import errno
import os
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from micronova.embedded.volume.backend import files as backend
from micronova.embedded.volume.backend.exports import OnProgress
from micronova.embedded.volume.backend.files import VOLUMES, Files
from micronova.embedded.volume.model import Operation
from micronova.embedded.volume.operations import engine
from micronova.embedded.volume.operations.base import Apply, OperationKind
from tests.unit.embedded.volume.world import ADMIN, ALICE, BOB, World, world

GIB = 1 << 30


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made


@pytest.fixture
def no_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service sweeps when a test asks for it, and at no other time."""
    monkeypatch.setattr(engine, "SWEEP", 3600.0)


class Gate:
    """Holds calls of a function until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached, self.calls = asyncio.Event(), asyncio.Event(), 0

    def before(self, original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Return a function that waits before the original one."""

        async def held(*arguments: Any) -> Any:
            self.calls += 1
            self.reached.set()
            await self.opened.wait()
            return await original(*arguments)

        return held


def hold(monkeypatch: pytest.MonkeyPatch, name: str) -> Gate:
    gate = Gate()
    monkeypatch.setattr(Files, name, gate.before(getattr(Files, name)))
    return gate


async def usage(cloud: World, token: str = ALICE) -> dict[str, int]:
    project = token.partition("@")[2]
    found = (await cloud.do("GET", f"/os-quota-sets/{project}?usage=true", token=ADMIN))["quota_set"]
    return {name: each["in_use"] for name, each in found.items() if name != "id" and each["in_use"]}


async def until_idle(cloud: World) -> None:
    async with asyncio.timeout(20):
        while cloud.role.engine._running:
            await asyncio.sleep(0.005)


async def look_again(cloud: World) -> None:
    """Return when the engine has looked for operations several times after it has tried those that there are."""
    for _ in range(3):
        await cloud.create()
        await until_idle(cloud)


async def test_much_work_of_one_project_does_not_stop_another(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"quota_set": {"volumes": 1000}}
    await cloud.do("PUT", "/os-quota-sets/p1", limits, token=ADMIN)
    source = await cloud.create()
    gate = hold(monkeypatch, "create_copy")
    for _ in range(engine.MOST_RUNNING + 20):
        await cloud.create(source_volid=source["id"], wait=None)
    await asyncio.wait_for(gate.reached.wait(), 10)
    await cloud.create(token=BOB)  # it is made although all that Alice has begun still runs or waits
    assert gate.calls == engine.MOST_RUNNING_OF_PROJECT
    for volume in (await cloud.do("GET", "/volumes"))["volumes"]:
        if volume["id"] != source["id"]:
            await cloud.do("POST", f"/volumes/{volume['id']}/action", {"os-force_delete": {}}, token=ADMIN)
    gate.opened.set()


@pytest.mark.usefixtures("no_sweeps")
async def test_what_waits_is_not_read_for_each_operation(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One project has much to do: each look at what waits reads all of it."""
    monkeypatch.setattr(engine, "MOST_LISTED", 50)
    count = 150
    await cloud.do("PUT", "/os-quota-sets/p1", {"quota_set": {"volumes": 1000}}, token=ADMIN)
    gate = hold(monkeypatch, "create_blank")
    made = [(await cloud.create(wait=None))["id"] for _ in range(count)]
    looks = cloud.role.core.database.statistics.by_function
    assert gate.calls == engine.MOST_RUNNING_OF_PROJECT
    assert looks["ready"] <= engine.MOST_LISTED + 10, "more of the same project let the engine look again"
    other = await cloud.create(wait=None, token=BOB)  # is found although so much waits
    async with asyncio.timeout(20):
        while gate.calls == engine.MOST_RUNNING_OF_PROJECT:
            await asyncio.sleep(0.005)
    before = looks["ready"]
    gate.opened.set()
    for id in made:
        await cloud.until(f"/volumes/{id}", "available")
    await cloud.until(f"/volumes/{other['id']}", "available")
    assert looks["ready"] - before <= count // 4


async def test_copies_take_turns(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """More copies than there are threads are under way for as long as they like; another one ends meanwhile."""
    large, small = await cloud.create(name="large"), await cloud.create(name="small")
    for volume in (large, small):
        with (cloud.directory / "volumes" / volume["id"]).open("r+b") as stream:
            for part in range(4):
                stream.seek(part << 24)
                stream.write(b"x" * 4096)
    endless, inode = True, (cloud.directory / "volumes" / large["id"]).stat().st_ino
    original = backend._copy_slice

    def copy_slice(source: int, target: int, at: int, report: OnProgress) -> int | None:
        following = original(source, target, at, report)
        return at if endless and os.fstat(source).st_ino == inode else following

    monkeypatch.setattr(backend, "SLICE", 1)
    monkeypatch.setattr(backend, "_copy_slice", copy_slice)
    copies = [await cloud.create(source_volid=large["id"], wait=None) for _ in range(5)]
    copies.append(await cloud.create(source_volid=small["id"]))
    endless = False
    for each in copies:
        await cloud.until(f"/volumes/{each['id']}", "available")
        with (cloud.directory / "volumes" / each["id"]).open("rb") as stream:
            assert [os.pread(stream.fileno(), 1, part << 24) for part in range(5)] == [b"x"] * 4 + [b"\0"]


@pytest.mark.usefixtures("no_sweeps")
async def test_an_operation_of_another_process_is_not_tried_all_the_time(cloud: World) -> None:
    volume = await cloud.create()
    original = cloud.role.files.lock
    tried: list[str] = []

    def refuse_first(name: str) -> int | None:
        tried.append(name)
        return None if name == tried[0] else original(name)

    cloud.role.files.lock = refuse_first  # type: ignore[method-assign]
    await cloud.do("DELETE", f"/volumes/{volume['id']}")
    await look_again(cloud)
    assert tried.count(tried[0]) == 1
    cloud.role.files.lock = original  # type: ignore[method-assign]
    await cloud.role.engine.sweep()
    await cloud.until(f"/volumes/{volume['id']}", "")


@pytest.mark.usefixtures("no_sweeps")
async def test_an_error_of_the_record_is_not_repeated_all_the_time(
    cloud: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    reached = asyncio.Event()
    original = engine.Engine._finish

    async def break_first(self: engine.Engine, kind: OperationKind, operation: Operation, apply: Apply) -> bool:
        tried.append(operation.id)
        reached.set()
        if operation.id == tried[0]:
            raise RuntimeError("broken")
        return await original(self, kind, operation, apply)

    with monkeypatch.context() as patch:
        patch.setattr(engine.Engine, "_finish", break_first)
        volume = await cloud.create(wait=None)
        await asyncio.wait_for(reached.wait(), 10)
        await look_again(cloud)
        assert tried.count(tried[0]) == 1
    await cloud.role.engine.sweep()
    await cloud.until(f"/volumes/{volume['id']}", "available")


@pytest.mark.parametrize("lack", [OSError(errno.EMFILE, "too many"), MemoryError()], ids=["descriptors", "memory"])
async def test_a_lack_that_passes_only_delays(cloud: World, monkeypatch: pytest.MonkeyPatch, lack: Exception) -> None:
    failed = asyncio.Event()

    async def lacking(self: Files, *_: Any) -> None:
        failed.set()
        raise lack

    with monkeypatch.context() as patch:
        patch.setattr(Files, "create_blank", lacking)
        volume = await cloud.create(wait=None)
        await asyncio.wait_for(failed.wait(), 10)
    async with asyncio.timeout(20):
        while (shown := (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"])["status"] != "available":
            assert shown["status"] == "creating"
            cloud.clock.time += 1
            await cloud.role.engine.sweep()


async def test_a_cancelled_extend_gives_its_quota_back(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = await cloud.create()
    gate = hold(monkeypatch, "grow")
    assert (await cloud.act(volume["id"], "os-extend", new_size=7)).status == 202
    await asyncio.wait_for(gate.reached.wait(), 10)
    assert (await usage(cloud))["gigabytes"] == 7
    assert (await cloud.act(volume["id"], "os-force_delete", token=ADMIN)).status == 202
    gate.opened.set()
    await cloud.until(f"/volumes/{volume['id']}", "")
    assert await usage(cloud) == {}


async def test_two_extends_after_a_reset_charge_once(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = await cloud.create()
    gate = hold(monkeypatch, "grow")
    for size in (3, 5):
        assert (await cloud.act(volume["id"], "os-extend", new_size=size)).status == 202
        await cloud.act(volume["id"], "os-reset_status", token=ADMIN, status="available")
    gate.opened.set()
    async with asyncio.timeout(20):
        while (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]["size"] != 5:
            await asyncio.sleep(0.005)
    assert (await usage(cloud))["gigabytes"] == 5
    assert (cloud.directory / "volumes" / volume["id"]).stat().st_size == 5 * GIB


async def test_a_cancelled_backup_gives_its_volume_back(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = await cloud.create()
    gate = hold(monkeypatch, "create_copy")
    backup = (await cloud.do("POST", "/backups", {"backup": {"volume_id": volume["id"]}}))["backup"]
    await asyncio.wait_for(gate.reached.wait(), 10)
    await cloud.do("POST", f"/backups/{backup['id']}/action", {"os-force_delete": {}}, token=ADMIN)
    gate.opened.set()
    await cloud.until(f"/backups/{backup['id']}", "")
    await cloud.until(f"/volumes/{volume['id']}", "available")
    assert cloud.files("backups") == []
    assert "backups" not in await usage(cloud)


async def test_a_cancelled_restore_gives_its_backup_back(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = await cloud.create()
    backup = (await cloud.do("POST", "/backups", {"backup": {"volume_id": volume["id"]}}))["backup"]
    await cloud.until(f"/backups/{backup['id']}", "available")
    gate = hold(monkeypatch, "replace_by_copy")
    restored = (await cloud.do("POST", f"/backups/{backup['id']}/restore", {"restore": {}}))["restore"]
    await asyncio.wait_for(gate.reached.wait(), 10)
    await cloud.act(restored["volume_id"], "os-force_delete", token=ADMIN)
    gate.opened.set()
    await cloud.until(f"/volumes/{restored['volume_id']}", "")
    await cloud.until(f"/backups/{backup['id']}", "available")
    assert cloud.files() == [volume["id"]]


async def test_a_restore_leaves_a_backup_that_is_deleted_meanwhile(
    cloud: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it could be restored once more in the moment before its file goes."""
    volume = await cloud.create()
    path = f"/backups/{(await cloud.do('POST', '/backups', {'backup': {'volume_id': volume['id']}}))['backup']['id']}"
    await cloud.until(path, "available")
    gate, removing = hold(monkeypatch, "replace_by_copy"), hold(monkeypatch, "remove")
    restored = (await cloud.do("POST", f"{path}/restore", {"restore": {}}))["restore"]
    await asyncio.wait_for(gate.reached.wait(), 10)
    await cloud.do("POST", f"{path}/action", {"os-force_delete": {}}, token=ADMIN)
    gate.opened.set()
    await cloud.until(f"/volumes/{restored['volume_id']}", "available")
    await asyncio.wait_for(removing.reached.wait(), 10)
    assert (await cloud.do("GET", path))["backup"]["status"] == "deleting"
    removing.opened.set()
    await cloud.until(path, "")


async def test_a_copy_that_is_not_wanted_any_more_ends(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forced delete does not wait until the copy is complete."""
    source = await cloud.create()
    with (cloud.directory / "volumes" / source["id"]).open("r+b") as stream:
        stream.write(b"x" * (32 << 20))
    gate = hold(monkeypatch, "replace_by_copy")
    published: list[str] = []
    original = Files.complete

    async def complete(self: Files, part: Path, kind: str, id: str, size: int) -> None:
        published.append(id)
        await original(self, part, kind, id, size)

    monkeypatch.setattr(Files, "complete", complete)
    volume = await cloud.create(source_volid=source["id"], wait=None)
    await asyncio.wait_for(gate.reached.wait(), 10)
    await cloud.act(volume["id"], "os-force_delete", token=ADMIN)
    async with asyncio.timeout(10):
        while not any(each.cancelled for each in cloud.role.engine._attempts.values()):
            await asyncio.sleep(0.005)
    gate.opened.set()
    await cloud.until(f"/volumes/{volume['id']}", "")
    assert published == []
    assert cloud.files() == [source["id"]]


async def test_a_task_that_is_cancelled_waits_for_its_thread(tmp_path: Path) -> None:
    """Else it would close descriptors that the thread still writes to."""
    files = Files(tmp_path)
    await files.start()
    begun, go_on, ended = asyncio.Event(), threading.Event(), False
    loop = asyncio.get_running_loop()

    def write() -> None:
        nonlocal ended
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(10)
        ended = True

    task = asyncio.create_task(files.run_long(write))
    await begun.wait()
    task.cancel()
    loop.call_soon(go_on.set)
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() and ended
    await files.stop()


async def test_what_is_recorded_of_files_survives_a_loss_of_power(
    cloud: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that ended before the directory was written is repeated, also if it has made or removed the file."""
    synced: list[str] = []
    original, lacks = backend._sync_directory, True

    def sync(directory: Path) -> None:
        nonlocal lacks
        lacked, lacks = lacks, False
        if lacked:
            raise OSError(errno.EMFILE, "Too many open files")
        original(directory)
        synced.append(directory.name)

    async def until(answers: Callable[[Any], bool]) -> None:
        async with asyncio.timeout(20):
            while not answers(await cloud.call("GET", path)):
                cloud.clock.time += 1
                await cloud.role.engine.sweep()

    monkeypatch.setattr(backend, "_sync_directory", sync)
    path = f"/volumes/{(await cloud.create(wait=None))['id']}"
    await until(lambda answer: answer.json()["volume"]["status"] == "available")
    assert "volumes" in synced, "before it was available"
    synced.clear()
    lacks = True
    await cloud.do("DELETE", path)
    await until(lambda answer: answer.status == 404)
    assert "volumes" in synced, "before the row was removed"


async def test_a_source_that_grows_meanwhile(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new volume is made of it as it is when the request is recorded, and is as large."""
    source = await cloud.create()
    [route] = [r for r in cloud.role.service.routes if r.label == "POST /volumes"]
    handlers: Any = route.handler.__self__  # type: ignore[attr-defined]
    original, grown = handlers.draft, False

    async def grow_before(*arguments: Any, **named: Any) -> Any:
        nonlocal grown
        if not grown:
            grown = True
            await cloud.act(source["id"], "os-extend", new_size=2)
            await cloud.until(f"/volumes/{source['id']}", "available")
        return await original(*arguments, **named)

    monkeypatch.setattr(handlers, "draft", grow_before)
    made = await cloud.create(source_volid=source["id"])
    assert made["size"] == 2
    assert (cloud.directory / VOLUMES / made["id"]).stat().st_size == 2 * GIB


async def attached(cloud: World, volume_id: str) -> str:
    """Attach a volume to a server; return the attachment."""
    body = {"attachment": {"volume_uuid": volume_id, "instance_uuid": str(uuid.uuid4())}}
    made = str((await cloud.do("POST", "/attachments", body))["attachment"]["id"])
    await cloud.do("POST", f"/attachments/{made}/action", {"os-complete": {}})
    await cloud.until(f"/volumes/{volume_id}", "in-use")
    return made


async def begin_to_read(cloud: World, monkeypatch: pytest.MonkeyPatch, volume_id: str, how: str) -> Gate:
    """Begin a backup or an image of a volume that is in use; return what holds the work."""
    if how == "backup":
        gate = hold(monkeypatch, "create_copy")
        await cloud.do("POST", "/backups", {"backup": {"volume_id": volume_id, "force": True}})
    else:
        gate = Gate()

        async def upload(image_id: str, *_: Any) -> None:
            cloud.images.documents[image_id]["status"] = "active"

        monkeypatch.setattr(cloud.images, "upload", gate.before(upload))
        assert (await cloud.act(volume_id, "os-volume_upload_image", image_name="i", force=True)).status == 202
    await asyncio.wait_for(gate.reached.wait(), 10)
    return gate


@pytest.mark.parametrize("how", ["backup", "image"])
async def test_a_volume_that_is_detached_while_it_is_read(
    cloud: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It is free afterwards: not in use by nobody for ever."""
    volume = await cloud.create()
    attachment = await attached(cloud, volume["id"])
    gate = await begin_to_read(cloud, monkeypatch, volume["id"], how)
    await cloud.do("DELETE", f"/attachments/{attachment}")
    gate.opened.set()
    await until_idle(cloud)
    shown = (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]
    assert (shown["status"], shown["attachments"]) == ("available", [])
    await cloud.do("DELETE", f"/volumes/{volume['id']}")
    await cloud.until(f"/volumes/{volume['id']}", "")


@pytest.mark.parametrize("how", ["backup", "image"])
async def test_a_volume_that_stays_attached_while_it_is_read(
    cloud: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    volume = await cloud.create()
    await attached(cloud, volume["id"])
    gate = await begin_to_read(cloud, monkeypatch, volume["id"], how)
    gate.opened.set()
    await until_idle(cloud)
    assert (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]["status"] == "in-use"


@pytest.mark.parametrize("what", ["volume", "snapshot"])
async def test_the_end_of_a_backup_leaves_a_source_that_is_deleted(
    cloud: World, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Else a server could get it in the moment before its file goes."""
    volume = await cloud.create()
    snapshot = await cloud.snapshot(volume["id"]) if what == "snapshot" else None
    path = f"/volumes/{volume['id']}" if snapshot is None else f"/snapshots/{snapshot['id']}"
    gate = hold(monkeypatch, "create_copy")
    wanted = {"volume_id": volume["id"], **({} if snapshot is None else {"snapshot_id": snapshot["id"]})}
    await cloud.do("POST", "/backups", {"backup": wanted})
    await asyncio.wait_for(gate.reached.wait(), 10)
    removing = hold(monkeypatch, "remove")
    await cloud.do("POST", f"{path}/action", {"os-force_delete": {}}, token=ADMIN)
    gate.opened.set()
    await asyncio.wait_for(removing.reached.wait(), 10)
    [shown] = (await cloud.do("GET", path)).values()
    assert shown["status"] == "deleting"
    removing.opened.set()
    await cloud.until(path, "")


async def test_a_volume_that_is_copied_is_not_given_away(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a volume that is written to has what it is at the end: the next project's data."""
    volume = await cloud.create()
    gate = hold(monkeypatch, "create_copy")
    await cloud.create(source_volid=volume["id"], wait=None)
    await asyncio.wait_for(gate.reached.wait(), 10)
    offer = {"transfer": {"volume_id": volume["id"]}}
    refused = await cloud.call("POST", "/volume-transfers", offer)
    assert refused.status == 400, refused.body
    assert "being read" in refused.body.decode()
    gate.opened.set()
    await until_idle(cloud)
    await cloud.do("POST", "/volume-transfers", offer)


async def test_a_volume_that_a_server_has_is_not_given_away(cloud: World) -> None:
    """Not even if an administrator has set its status."""
    volume = await cloud.create()
    await attached(cloud, volume["id"])
    await cloud.act(volume["id"], "os-reset_status", token=ADMIN, status="available")
    refused = await cloud.call("POST", "/volume-transfers", {"transfer": {"volume_id": volume["id"]}})
    assert refused.status == 400, refused.body
