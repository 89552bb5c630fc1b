"""Image data: failed uploads leave nothing, memory stays small, the event loop is never blocked, limits hold."""

import asyncio
import errno
import os
import threading
import tracemalloc
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from micronova.embedded.image import queries
from micronova.embedded.image.data import Uploaded
from micronova.embedded.image.model import ACTIVE, SAVING
from micronova.embedded.image.store import Upload
from micronova.http.tickets import Tickets, upload_subject
from micronova.objects.errors import Invalid, TooLarge
from tests.unit.embedded.image.world import ADMIN, ALICE, BOB, KEY, OCTETS, READER, World, world


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


async def is_as_new(cloud: World, image_id: str) -> bool:
    """Return whether nothing is left of an upload."""
    shown = await cloud.show(image_id)
    return shown["status"] == "queued" and shown["size"] is None and shown["checksum"] is None and cloud.files == []


async def test_a_body_without_a_length_is_read_to_its_end(cloud: World) -> None:
    image = await cloud.create()
    answer = await cloud.stream("PUT", f"/v2/images/{image['id']}/file", [b"a" * 70_000, b"b"], headers=OCTETS)
    assert answer.status == 204
    assert (await cloud.call("GET", f"/v2/images/{image['id']}/file")).body == b"a" * 70_000 + b"b"


@pytest.mark.parametrize("length", [None, "4000000"])
async def test_a_client_that_disconnects_leaves_nothing(cloud: World, length: str | None) -> None:
    image = await cloud.create()
    headers = {**OCTETS, **({"content-length": length} if length else {})}
    parts = [b"x" * 65_536] * 40
    answer = await cloud.stream("PUT", f"/v2/images/{image['id']}/file", parts, headers=headers, disconnect=True)
    assert answer.status == 400
    assert await is_as_new(cloud, image["id"])
    assert (await cloud.upload(image["id"], b"second try")).status == 204


async def test_stores_that_do_not_exist(cloud: World) -> None:
    image = await cloud.create()
    path = f"/v2/images/{image['id']}"
    for store, status in (("nope", 400), ("file", 204)):
        headers = {**OCTETS, "x-image-meta-store": store}
        assert (await cloud.call("PUT", f"{path}/file", b"data", headers=headers)).status == status
    body = {"method": {"name": "glance-direct"}, "stores": ["nope"]}
    answer = await cloud.call("POST", f"{path}/import", body)
    assert answer.status == 400 and b"nope" in answer.body


async def test_a_cancelled_upload_leaves_nothing(cloud: World) -> None:
    """A server that shuts down cancels its requests."""
    image = await cloud.create()
    arrived = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"x" * 2_000_000
        arrived.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(cloud.stream("PUT", f"/v2/images/{image['id']}/file", slow(), headers=OCTETS))
    await arrived.wait()
    assert (await cloud.show(image["id"]))["status"] == "saving"
    assert len(cloud.files) == 1
    assert (await cloud.upload(image["id"], b"meanwhile")).status == 409
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await is_as_new(cloud, image["id"])


async def test_a_client_that_sends_nothing_times_out(tmp_path: Path) -> None:
    async def silent() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    async with world(tmp_path, idle_timeout=0.05) as cloud:
        image = await cloud.create()
        answer = await cloud.stream("PUT", f"/v2/images/{image['id']}/file", silent(), headers=OCTETS)
        assert answer.status == 408
        assert await is_as_new(cloud, image["id"])


async def test_the_announced_size_is_checked(cloud: World) -> None:
    image = await cloud.create()
    file = f"/v2/images/{image['id']}/file"
    short = {**OCTETS, "x-openstack-image-size": "100"}
    assert (await cloud.stream("PUT", file, [b"x" * 99], headers=short)).status == 400
    assert (await cloud.call("PUT", file, b"x" * 99, headers=short)).status == 400
    for bad in ("-1", "many", "1e3", "9" * 30):
        answer = await cloud.call("PUT", file, b"x", headers={**OCTETS, "x-openstack-image-size": bad})
        assert answer.status == 400
    assert await is_as_new(cloud, image["id"])
    assert (await cloud.stream("PUT", file, [b"x" * 100], headers=short)).status == 204


async def test_other_content_types_are_refused(cloud: World) -> None:
    image = await cloud.create()
    for kind in ("application/json", "text/plain", ""):
        answer = await cloud.call("PUT", f"/v2/images/{image['id']}/file", b"x", headers={"content-type": kind})
        assert answer.status == 415
    assert await is_as_new(cloud, image["id"])


async def test_an_image_deleted_during_its_upload_is_gone(cloud: World) -> None:
    image = await cloud.create()

    async def interrupted() -> AsyncIterator[bytes]:
        yield b"x" * 2_000_000
        assert (await cloud.call("DELETE", f"/v2/images/{image['id']}")).status == 204
        yield b"y"

    answer = await cloud.stream("PUT", f"/v2/images/{image['id']}/file", interrupted(), headers=OCTETS)
    assert answer.status == 410
    assert cloud.files == []
    assert (await cloud.call("GET", "/v2/info/usage")).json()["usage"]["image_size_total"]["usage"] == 0


async def test_the_size_of_an_image_is_limited(tmp_path: Path) -> None:
    async with world(tmp_path, max_size=1_000_000) as cloud:
        image = await cloud.create()
        file = f"/v2/images/{image['id']}/file"
        assert (await cloud.upload(image["id"], b"x" * 1_000_001)).status == 413
        answer = await cloud.stream("PUT", file, [b"x" * 65_536] * 16, headers=OCTETS)
        assert answer.status == 413
        assert await is_as_new(cloud, image["id"])
        assert (await cloud.upload(image["id"], b"x" * 1_000_000)).status == 204


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_project_has_a_limit_that_holds_in_a_race(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("module_database_url") if kind == "postgresql" else None
    async with world(tmp_path, url, project_bytes=450_000) as cloud:
        images = [await cloud.create(name=str(n)) for n in range(8)]
        parts = [b"x" * 50_000] * 2  # without a length, so that nothing is refused before it arrives
        answers = await asyncio.gather(
            *(cloud.stream("PUT", f"/v2/images/{i['id']}/file", parts, headers=OCTETS) for i in images)
        )
        assert sorted(answer.status for answer in answers) == [204] * 4 + [413] * 4
        assert len(cloud.files) == 4
        assert len(await cloud.names("status=queued")) == 4
        other = await cloud.create(token=BOB, data=b"x" * 450_000)  # another project has its own limit
        assert (await cloud.upload((await cloud.create(token=BOB))["id"], b"x", token=BOB)).status == 413
        # Deleting an image, or giving it to another project, reduces the usage.
        assert (await cloud.call("DELETE", f"/v2/images/{other['id']}", token=BOB)).status == 204
        await cloud.create(token=BOB, data=b"x" * 50_000)
        mine = next(i["id"] for i, answer in zip(images, answers, strict=True) if answer.status == 204)
        assert (await cloud.patch(mine, {"op": "replace", "path": "/owner", "value": "p9"}, token=ADMIN)).status == 200
        await cloud.create(data=b"x" * 100_000)
        assert (await cloud.upload((await cloud.create())["id"], b"x" * 60_000)).status == 413


class Slow:
    """An upload that stays under way until it may go on."""

    def __init__(self, cloud: World, image_id: str, size: int, declared: int | None = None) -> None:
        self._arrived, self._go_on = asyncio.Event(), asyncio.Event()
        headers = OCTETS if declared is None else {**OCTETS, "content-length": str(declared)}
        self._parts = [b"x" * min(50_000, size - begin) for begin in range(0, size, 50_000)]
        path = f"/v2/images/{image_id}/file"
        self._task = asyncio.create_task(cloud.stream("PUT", path, self._send(), headers=headers))

    async def _send(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        self._arrived.set()  # the service asks for the next part when it has counted those
        await self._go_on.wait()

    async def under_way(self) -> "Slow":
        async with asyncio.timeout(60):
            await self._arrived.wait()
        return self

    async def end(self) -> int:
        self._go_on.set()
        return (await asyncio.wait_for(self._task, 60)).status


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize("declared", [None, 300_000])
async def test_what_uploads_under_way_have_sent_or_declared_counts(
    kind: str, declared: int | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("module_database_url") if kind == "postgresql" else None
    async with world(tmp_path, url, project_bytes=450_000) as cloud:
        first, second, third = [(await cloud.create(name=str(n)))["id"] for n in range(3)]
        slow = await Slow(cloud, first, 50_000 if declared else 300_000, declared).under_way()
        for data in (b"x" * 200_000, [b"x" * 100_000] * 2):  # with a length and without
            refused = (
                await cloud.upload(second, data)
                if isinstance(data, bytes)
                else await cloud.stream("PUT", f"/v2/images/{second}/file", data, headers=OCTETS)
            )
            assert refused.status == 413
        assert len(cloud.files) == 1, "only the upload under way has a file"
        assert await slow.end() == (400 if declared else 204)  # the declared one sends less than it has declared
        assert (await cloud.upload(second, b"x" * (450_000 if declared else 150_000))).status == 204
        assert (await cloud.upload(third, b"x")).status == 413


async def test_an_upload_whose_image_is_deleted_ends_when_it_needs_more_room(tmp_path: Path) -> None:
    async with world(tmp_path, project_bytes=450_000) as cloud:
        image_id = (await cloud.create())["id"]

        async def parts() -> AsyncIterator[bytes]:
            yield b"x" * 50_000
            assert (await cloud.call("DELETE", f"/v2/images/{image_id}")).status == 204
            while True:
                yield b"x" * 50_000

        answer = await asyncio.wait_for(cloud.stream("PUT", f"/v2/images/{image_id}/file", parts(), headers=OCTETS), 60)
        assert answer.status == 410 and cloud.files == []
        await cloud.create(data=b"x" * 450_000)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_project_has_so_many_uploads_under_way(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("module_database_url") if kind == "postgresql" else None
    async with world(tmp_path, url, project_uploads=2) as cloud:
        images = [await cloud.create(name=str(n)) for n in range(6)]
        refused, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b"x"
            await go_on.wait()

        async def upload(id: str) -> int:
            status = (await cloud.stream("PUT", f"/v2/images/{id}/file", slow(), headers=OCTETS)).status
            tally.append(status)
            if tally.count(413) == 4:
                refused.set()
            return status

        tally: list[int] = []
        uploads = asyncio.gather(*(upload(image["id"]) for image in images))
        await asyncio.wait_for(refused.wait(), 60)
        assert tally == [413] * 4  # the other two are still under way
        await cloud.create(token=BOB, data=b"x")  # another project has its own
        go_on.set()
        assert sorted(await uploads) == [204] * 2 + [413] * 4
        await cloud.create(data=b"x")
        assert len(cloud.files) == 4


async def test_a_full_disk_is_not_an_internal_error(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Upload, blocks: list[bytes]) -> None:
        raise OSError(28, "No space left on device")

    image = await cloud.create()
    monkeypatch.setattr(Upload, "write", full)
    assert (await cloud.upload(image["id"], b"x")).status == 413
    monkeypatch.undo()
    assert await is_as_new(cloud, image["id"])


async def test_a_file_is_checked_before_it_can_be_downloaded(tmp_path: Path) -> None:
    seen: list[Uploaded] = []

    def check(uploaded: Uploaded) -> int | None:
        assert threading.current_thread().name.startswith("image-data")
        seen.append(uploaded)
        if uploaded.path.read_bytes().startswith(b"bad"):
            raise Invalid("This is not a raw disk.")
        return 12_345

    async with world(tmp_path, check=check) as cloud:
        image = await cloud.create()
        answer = await cloud.upload(image["id"], b"bad content")
        assert answer.status == 400
        assert answer.json()["message"] == "This is not a raw disk."
        assert await is_as_new(cloud, image["id"])
        assert (await cloud.upload(image["id"], b"good content")).status == 204
        assert (await cloud.show(image["id"]))["virtual_size"] == 12_345
        assert [(each.disk_format, each.size) for each in seen] == [("raw", 11), ("raw", 12)]


async def test_uploads_write_in_threads_while_the_loop_runs(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write waits for a hundred turns of the loop, so it would never end if it ran on the loop."""
    turns = 0
    turned = threading.Condition()
    names: set[str] = set()
    write = Upload.write

    def patient(self: Upload, blocks: list[bytes]) -> None:
        names.add(threading.current_thread().name)
        with turned:
            until = turns + 100
            assert turned.wait_for(lambda: turns >= until, timeout=60)
        write(self, blocks)

    async def turn() -> None:
        nonlocal turns
        while True:
            with turned:
                turns += 1
                turned.notify_all()
            await asyncio.sleep(0)

    monkeypatch.setattr(Upload, "write", patient)
    turning = asyncio.create_task(turn())
    images = [await cloud.create() for _ in range(6)]
    parts = [b"x" * 65_536] * 40
    answers = await asyncio.gather(
        *(cloud.stream("PUT", f"/v2/images/{i['id']}/file", parts, headers=OCTETS) for i in images)
    )
    turning.cancel()
    assert {answer.status for answer in answers} == {204}
    assert len(names) <= 4
    assert all(name.startswith("image-data") for name in names)


async def test_200_megabytes_need_little_memory(cloud: World) -> None:
    image = await cloud.create()
    piece, pieces = 65_536, 3200

    def body() -> Iterator[bytes]:
        for n in range(pieces):
            yield n.to_bytes(4, "big") * (piece // 4)  # each piece is a new allocation, as from a socket

    await cloud.upload((await cloud.create())["id"], b"warm")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        answer = await cloud.stream("PUT", f"/v2/images/{image['id']}/file", body(), headers=OCTETS)
        assert answer.status == 204
        assert tracemalloc.get_traced_memory()[1] - before < 8 << 20
        assert (await cloud.show(image["id"]))["size"] == piece * pieces
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        stream = await cloud.role._store.open_download(image["id"], 0, piece * pieces)
        total = 0
        async for block in stream:
            total += len(block)
        await stream.close()
        assert total == piece * pieces
        assert tracemalloc.get_traced_memory()[1] - before < 8 << 20
    finally:
        tracemalloc.stop()


async def test_ranges(cloud: World) -> None:
    data = bytes(range(100))
    image = await cloud.create(data=data)
    file = f"/v2/images/{image['id']}/file"
    for asked, status, content_range, body in [
        ("bytes=0-9", 206, "bytes 0-9/100", data[:10]),
        ("bytes=90-", 206, "bytes 90-99/100", data[90:]),
        ("bytes=90-1000", 206, "bytes 90-99/100", data[90:]),
        ("bytes=-10", 206, "bytes 90-99/100", data[90:]),
        ("bytes=-1000", 206, "bytes 0-99/100", data),
        ("bytes=100-", 416, "bytes */100", None),
        ("bytes=50-40", 416, "bytes */100", None),
        ("bytes=-0", 416, "bytes */100", None),
        ("bytes=-", 200, None, data),
        ("bytes=0-1,5-6", 200, None, data),
        ("lines=1-2", 200, None, data),
        ("bytes=\N{ARABIC-INDIC DIGIT THREE}-", 200, None, data),
    ]:
        answer = await cloud.call("GET", file, headers={"range": asked})
        assert (answer.status, answer.headers.get("content-range")) == (status, content_range), asked
        if body is not None:
            assert answer.body == body
            assert answer.headers["content-length"] == str(len(body))


async def test_no_data_is_no_content(cloud: World) -> None:
    image = await cloud.create()
    assert (await cloud.call("GET", f"/v2/images/{image['id']}/file")).status == 204
    empty = await cloud.create(data=b"")
    assert (await cloud.show(empty["id"]))["status"] == "active"
    assert (await cloud.call("GET", f"/v2/images/{empty['id']}/file")).status == 204


async def test_downloads_close_their_files(cloud: World) -> None:
    def open_files() -> int:
        links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return sum(os.path.exists(link) and image["id"] in os.readlink(link) for link in links)

    image = await cloud.create(data=b"x" * 3_000_000)
    for _ in range(20):
        assert (await cloud.call("GET", f"/v2/images/{image['id']}/file")).status == 200
    assert open_files() == 0
    stream = await cloud.role._store.open_download(image["id"], 0, 10)
    assert open_files() == 1
    del stream  # never sent, because the client has disconnected
    assert open_files() == 0


@pytest.mark.parametrize("limit", [None, 1 << 30])
async def test_a_host_uploads_with_two_transactions(tmp_path: Path, limit: int | None) -> None:
    """The first sets the formats, which only the host knows, and reserves the size that it has announced."""
    async with world(tmp_path, project_bytes=limit) as cloud:
        image = await cloud.create(disk_format=None, container_format=None)
        ticket = Tickets(KEY).issue(upload_subject(image["id"], "host1"), cloud.clock.time + 60)
        query = f"host=host1&ticket={ticket}&disk_format=raw&container_format=bare"
        path = f"/v2/images/{image['id']}/file?{query}"
        before, reads = cloud.database.statistics.writes, cloud.database.statistics.reads
        answer = await cloud.call("PUT", path, b"data", headers=OCTETS, token=None)
        assert answer.status == 204
        assert cloud.database.statistics.writes - before == 2
        assert cloud.database.statistics.reads == reads, "the first transaction reads the image"
        shown = await cloud.show(image["id"])
        assert (shown["status"], shown["disk_format"], shown["container_format"]) == ("active", "raw", "bare")


async def test_what_a_host_uploads_is_refused_as_that_of_a_user(cloud: World) -> None:
    async def put(image_id: str, formats: str = "&disk_format=raw&container_format=bare") -> tuple[int, bytes]:
        ticket = Tickets(KEY).issue(upload_subject(image_id, "host1"), cloud.clock.time + 60)
        path = f"/v2/images/{image_id}/file?host=host1&ticket={ticket}{formats}"
        answer = await cloud.call("PUT", path, b"data", headers=OCTETS, token=None)
        return answer.status, answer.body

    missing = str(uuid.uuid4())
    status, body = await put(missing)
    assert status == 404 and missing.encode() in body
    image_id = (await cloud.create(disk_format=None, container_format=None))["id"]
    for formats in ("", "&disk_format=raw", "&disk_format=nonsense&container_format=bare"):
        assert (await put(image_id, formats))[0] == 400
        assert (await cloud.show(image_id))["status"] == "queued"
    assert (await put(image_id))[0] == 204
    status, body = await put(image_id)
    assert status == 409 and b"is active" in body
    assert cloud.files == [image_id]


async def test_an_image_has_the_formats_that_its_data_is_checked_against(cloud: World) -> None:
    """A change of the formats may come between the begin of a request with data and the begin of its upload."""
    image_id = (await cloud.create(disk_format="raw"))["id"]
    read = await cloud.database.read(queries.get, image_id, "")
    assert read is not None
    change = {"op": "replace", "path": "/disk_format", "value": "iso"}
    assert (await cloud.patch(image_id, change)).status == 200
    await cloud.role._data.receive(read, _parts(b"data"), None, SAVING, ACTIVE)
    assert (await cloud.show(image_id))["disk_format"] == "raw"


async def _parts(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_a_ticket_allows_one_download_for_a_short_time(cloud: World) -> None:
    image, other = await cloud.create(data=b"data", visibility="private"), await cloud.create(data=b"other")
    tickets = Tickets(KEY)
    ticket = tickets.issue(image["id"], cloud.clock.time + 60)

    async def fetch(image_id: str, ticket: str, token: str | None = None) -> tuple[int, bytes]:
        answer = await cloud.call("GET", f"/v2/images/{image_id}/file?ticket={ticket}", token=token)
        return answer.status, answer.body if answer.status == 200 else b""

    assert await fetch(image["id"], ticket) == (200, b"data")
    assert (await fetch(other["id"], ticket))[0] == 401
    forged = Tickets(b"another key of enough bytes").issue(image["id"], cloud.clock.time + 60)
    later = f"{int(cloud.clock.time) + 999}.{ticket.partition('.')[2]}"
    for bad in ("", "x", forged, later, ticket + "A", ticket[:-1], "9" * 99 + "." + "A" * 43):
        assert (await fetch(image["id"], bad))[0] == 401, bad
        assert (await fetch(image["id"], bad, token=BOB))[0] == 401  # not with a token either
    # It is valid for nothing else.
    for method, path in (("GET", ""), ("PUT", "/file"), ("DELETE", ""), ("GET", "/members")):
        assert (await cloud.call(method, f"/v2/images/{image['id']}{path}?ticket={ticket}", token=None)).status == 401
    await cloud.call("POST", f"/v2/images/{image['id']}/actions/deactivate")
    assert (await fetch(image["id"], ticket))[0] == 403
    await cloud.call("POST", f"/v2/images/{image['id']}/actions/reactivate")
    cloud.clock.time += 60
    assert (await fetch(image["id"], ticket))[0] == 401
    fresh = tickets.issue(image["id"], cloud.clock.time + 60)
    await cloud.call("DELETE", f"/v2/images/{image['id']}")
    assert (await fetch(image["id"], fresh))[0] == 404


async def test_a_reader_may_show_but_not_download(cloud: World) -> None:
    image = await cloud.create(data=b"data")
    assert (await cloud.call("GET", f"/v2/images/{image['id']}", token=READER)).status == 200
    assert (await cloud.call("GET", f"/v2/images/{image['id']}/file", token=READER)).status == 403
    assert (await cloud.call("GET", f"/v2/images/{image['id']}/file", token=ALICE)).status == 200


class _Unreadable(bytes):
    def __getitem__(self, key: Any) -> Any:
        raise OSError(errno.ENOSPC, "the disk is full")


async def test_several_workers_ensure_an_image_at_once(cloud: World) -> None:
    with pytest.raises(TooLarge):
        await cloud.role.ensure_image("tiny", _Unreadable(b"tiny disk"), owner="p0")
    made = await asyncio.gather(*(cloud.role.ensure_image("tiny", b"tiny disk", owner="p0") for _ in range(4)))
    assert len(set(made)) == 1
    assert (await cloud.call("GET", f"/v2/images/{made[0]}/file")).body == b"tiny disk"


async def test_an_ensured_image_is_created_once(cloud: World) -> None:
    made = await cloud.role.ensure_image("tiny", b"tiny disk", owner="p0", properties={"os_distro": "tiny"})
    assert await cloud.role.ensure_image("tiny", b"tiny disk", owner="p0") == made
    shown = await cloud.show(made)
    assert (shown["visibility"], shown["status"], shown["os_distro"]) == ("public", "active", "tiny")
    assert (await cloud.call("GET", f"/v2/images/{made}/file")).body == b"tiny disk"
    assert (await cloud.call("DELETE", f"/v2/images/{made}", token=ADMIN)).status == 204
    assert await cloud.role.ensure_image("tiny", b"tiny disk", owner="p0") == made
    assert await cloud.names() == []  # a deleted image does not come back
