"""Images are fetched once, checked, and shared."""

import asyncio
import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from micronova.http.client import unix_url
from micronova.http.image_downloads import TicketRefused, stream
from micronova.imageformat.signatures import read_signature
from micronova.objects.errors import (
    BuildAborted,
    BuildFailed,
    InsufficientResources,
    MicronovaError,
    NotSupported,
    Unavailable,
)
from micronova.objects.image import ImageMeta
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.storage import image_cache, tools
from micronova.virt.libvirt.storage.fetch import fetch
from micronova.virt.libvirt.storage.image_cache import ImageCache, base_name
from micronova.virt.libvirt.storage.layout import Layout
from tests.certificates import Signer
from tests.clocks import ManualClock

MIB = 1024**2
DATA = b"boot" + bytes(506) + b"\x55\xaa" + bytes(MIB - 508)  # with a boot sector


KERNEL = b"MZ" + bytes(1022)  # with neither a boot sector nor a file system


def sha512(data: bytes) -> dict[str, Any]:
    return {"os_hash_algo": "sha512", "os_hash_value": hashlib.sha512(data).hexdigest()}


def raw(data: bytes = DATA, **changes: Any) -> ImageMeta:
    known: dict[str, Any] = {
        "id": "image-1",
        "disk_format": "raw",
        "size": len(data),
        "checksum": hashlib.md5(data).hexdigest(),
    }
    return ImageMeta(**{**known, **changes})


class Source:
    """An image service that counts downloads and can be made to wait or fail."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data = data
        self.asked: list[str] = []
        self._begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.refused: set[str] = set()

    async def fetch(self, image: ImageMeta, url: str, target: Path, files: ThreadPool) -> None:
        async def pieces(url: str) -> AsyncIterator[bytes]:
            self.asked.append(url)
            self._begun.set()
            await self.gate.wait()
            if url in self.refused:
                raise TicketRefused("too old")
            for start in range(0, len(self.data), 100_000):
                yield self.data[start : start + 100_000]

        await fetch(image, url, target, files, pieces)

    async def begun(self) -> None:
        """Wait until a download begins, or the next one."""
        await asyncio.wait_for(self._begun.wait(), 5)
        self._begun.clear()


class World:
    def __init__(self, root: Path) -> None:
        self.layout = Layout(root)
        self.layout.prepare()
        self.source = Source()
        self.clock = ManualClock()
        self.used: set[str] = set()  # by disks
        self.max_bytes = 1 << 40
        self.cache = ImageCache(
            self.layout,
            ThreadPool("files", 2),
            self.clock,
            fetcher=self.source.fetch,
            max_bytes=lambda: self.max_bytes,
            used_by_disks=lambda: self.used,
        )

    async def get(self, image: ImageMeta, ticket: str | None = "t1", limit: int | None = None) -> bytes:
        async with self.cache.image(image, ticket, limit) as base:
            return base.path.read_bytes()

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.layout.base.iterdir())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_once(world: World) -> None:
    assert await world.get(raw()) == DATA
    assert await world.get(raw(), "t2") == DATA
    assert await world.get(raw(), None) == DATA  # no ticket is needed for what is here
    assert world.source.asked == ["t1"]
    assert world.files == [base_name(raw())]
    assert os.stat(world.layout.base / world.files[0]).st_blocks * 512 < MIB  # zeros became a hole


async def test_kernels_and_what_they_boot_need_no_boot_sector(world: World) -> None:
    world.source.data = KERNEL
    kernel = raw(KERNEL, id="kernel", disk_format="aki", container_format="aki")
    with pytest.raises(NotSupported, match="aki"):
        await world.get(kernel)
    async with world.cache.image(kernel, "t1", None, is_disk=False) as base:
        assert base.path.read_bytes() == KERNEL
    disk = raw(KERNEL, id="disk", disk_format="ami", container_format="ami", kernel=kernel)
    assert await world.get(disk) == KERNEL
    with pytest.raises(BuildAborted, match="cannot be booted"):
        await world.get(raw(KERNEL, id="other"))
    with pytest.raises(BuildAborted, match="no kernel or ramdisk"):
        async with world.cache.image(raw(id="x", disk_format="qcow2"), "t1", None, is_disk=False):
            pass


async def test_a_signed_image_is_verified_before_anything_reads_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer = Signer("RSA-PSS")
    right = read_signature(signer.properties(DATA, "c"), signer.pem)
    wrong = read_signature(signer.properties(b"other data", "c"), signer.pem)
    assert await world.get(raw(signature=right)) == DATA
    assert await world.get(raw(signature=right), None) == DATA
    assert world.source.asked == ["t1"]
    # Neither a copy that nobody verified, nor one with another signature, does.
    assert await world.get(raw(), "t2") == DATA
    monkeypatch.setattr(image_cache, "check", pytest.fail)
    with pytest.raises(BuildAborted, match="image-1 is refused: its signature is not that of its data"):
        await world.get(raw(signature=wrong), "t3")
    with pytest.raises(BuildFailed, match="no URL"):
        await world.get(raw(signature=wrong), None)
    assert world.source.asked == ["t1", "t2", "t3"]
    assert world.files == sorted([base_name(raw()), base_name(raw(signature=right))])


async def test_ahead_of_time(world: World) -> None:
    assert await world.cache.fetch(raw(), "t1")
    os.utime(world.layout.base / world.files[0], (1, 1))
    assert not await world.cache.fetch(raw(), "t2")
    assert os.stat(world.layout.base / world.files[0]).st_mtime > 1  # it counts as a use
    assert await world.get(raw(), None) == DATA
    assert world.source.asked == ["t1"]


async def test_ahead_of_time_and_for_a_build_at_once(world: World) -> None:
    world.source.gate.clear()
    ahead = asyncio.create_task(world.cache.fetch(raw(), "t1"))
    await world.source.begun()
    build = asyncio.create_task(world.get(raw(), "t2"))
    world.source.gate.set()
    assert await ahead and await build == DATA
    assert world.source.asked == ["t1"]


async def test_a_cached_image_survives_a_loss_of_power(world: World, synced: list[Path]) -> None:
    await world.get(raw())
    assert synced == [world.layout.base]


async def test_builds_at_the_same_time_share_one_download(world: World) -> None:
    world.source.gate.clear()
    builds = [asyncio.create_task(world.get(raw(), f"t{number}")) for number in range(5)]
    await world.source.begun()
    world.source.gate.set()
    assert await asyncio.gather(*builds) == [DATA] * 5
    assert len(world.source.asked) == 1


async def test_one_of_several_gives_up(world: World) -> None:
    world.source.gate.clear()
    first, second = (asyncio.create_task(world.get(raw(), f"t{number}")) for number in range(2))
    await world.source.begun()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    world.source.gate.set()
    assert await second == DATA
    assert len(world.source.asked) == 1


async def test_when_all_give_up_nothing_is_left(world: World) -> None:
    world.source.gate.clear()
    builds = [asyncio.create_task(world.get(raw())) for _ in range(3)]
    await world.source.begun()
    for build in builds:
        build.cancel()
    results = await asyncio.gather(*builds, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert world.files == []
    world.source.gate.set()
    assert await world.get(raw(), "t9") == DATA


async def test_a_bad_ticket_is_not_everybodys(world: World) -> None:
    world.source.gate.clear()
    world.source.refused.add("old")
    first = asyncio.create_task(world.get(raw(), "old"))
    await world.source.begun()
    second = asyncio.create_task(world.get(raw(), "new"))
    await asyncio.sleep(0.01)
    world.source.gate.set()
    with pytest.raises(TicketRefused):
        await first
    assert await second == DATA
    assert world.source.asked == ["old", "new"]


async def test_a_small_flavor_does_not_decide_for_a_large_one(world: World) -> None:
    world.source.gate.clear()
    small = asyncio.create_task(world.get(raw(), "small", limit=MIB))
    await world.source.begun()
    large = asyncio.create_task(world.get(raw(), "large", limit=2 * MIB))
    await asyncio.sleep(0.01)
    world.source.gate.set()
    with pytest.raises(BuildAborted, match="at most 1048576"):
        await small
    assert await large == DATA


async def test_a_cached_image_can_be_too_large_for_a_flavor(world: World) -> None:
    big = DATA[:1024] + b"x"
    world.source.data = big
    await world.get(raw(big))
    with pytest.raises(BuildAborted, match="needs a disk of 1 GB; the flavor's has 0 GB"):
        await world.get(raw(big), limit=1024)


@pytest.mark.parametrize(
    ("image", "data", "error", "words"),
    [
        (raw(), DATA[:-1], BuildFailed, "only 1048579 of 1048580 bytes"),
        (raw(), DATA + b"x", BuildFailed, "longer than"),
        (raw(), b"tood" + bytes(MIB), BuildFailed, "damaged"),
        (raw(checksum=None, **sha512(DATA)), b"tood" + bytes(MIB), BuildFailed, "damaged: its sha512"),
        # What MD5 lets pass, the hash that the service names does not.
        (raw(**sha512(b"other")), DATA, BuildFailed, "damaged: its sha512"),
        (raw(os_hash_algo="zork", os_hash_value="00", checksum="00"), DATA, BuildFailed, "damaged: its md5"),
        (raw(disk_format="qcow2"), DATA, BuildAborted, "refused"),
        (raw(b"data" + bytes(MIB)), b"data" + bytes(MIB), BuildAborted, "no boot sector"),
        (raw(disk_format="ploop"), DATA, BuildAborted, "has the format ploop"),
        (raw(container_format="ova"), DATA, NotSupported, "bare images only"),
    ],
)
async def test_what_is_refused_leaves_nothing(
    world: World, image: ImageMeta, data: bytes, error: type[MicronovaError], words: str
) -> None:
    world.source.data = data
    with pytest.raises(error, match=words):
        await world.get(image)
    assert world.files == []


async def test_a_disk_that_cannot_be_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(Unavailable, match="run out of disk space"):
        await world.get(raw())
    assert world.files == []


async def test_without_a_ticket(world: World) -> None:
    with pytest.raises(BuildFailed, match="no URL of the image"):
        await world.get(raw(), None)


async def test_names_are_safe() -> None:
    assert "/" not in base_name(raw(id="../../etc/passwd", checksum="../x"))
    assert base_name(raw()) != base_name(raw(checksum="00")) != base_name(raw(checksum="00", **sha512(DATA)))


async def test_ageing(world: World) -> None:
    data = DATA[:512]
    other = raw(data, id="image-2")
    await world.get(raw())
    world.source.data = data
    await world.get(other)
    old = world.clock.now() - 100.0
    for name in world.files:
        os.utime(world.layout.base / name, (old, old))
    world.used = {base_name(raw())}
    assert await world.cache.remove_unused(age=200.0) == []
    world.used = set()
    async with world.cache.image(other, None, None):
        os.utime(world.layout.base / base_name(other), (old, old))
        assert await world.cache.remove_unused(age=50.0) == [base_name(raw())]
    os.utime(world.layout.base / base_name(other), (old, old))
    assert await world.cache.remove_unused(age=50.0) == [base_name(other)]
    assert world.files == []


async def test_half_done_downloads_are_swept(world: World) -> None:
    (world.layout.base / ".part-abc-image").write_bytes(b"half")
    await world.get(raw())
    world.cache.remove_incomplete()
    assert world.files == [base_name(raw())]


@pytest.mark.skipif(shutil.which("qemu-img") is None, reason="qemu-img is not installed")
async def test_other_formats_become_raw(world: World, tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.write_bytes(DATA + bytes(MIB))
    for format_, qemu_format in (("qcow2", "qcow2"), ("vhdx", "vhdx"), ("vdi", "vdi"), ("vmdk", "vmdk")):
        subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", qemu_format, plain, packed], check=True)
        data = packed.read_bytes()
        world.source.data = data
        got = await world.get(raw(data, id=format_, disk_format=format_))
        assert got[: len(DATA)] == DATA, format_
        assert not any(name.startswith(".") for name in world.files)


FULL = b"boot" + os.urandom(506) + b"\x55\xaa" + os.urandom(MIB - 512)  # without holes


async def test_the_longest_unused_images_make_room(world: World) -> None:
    world.source.data = FULL
    images = [raw(FULL, id=f"image-{number}") for number in range(4)]
    world.max_bytes = 3 * MIB + MIB // 2
    for number, image in enumerate(images[:3]):
        await world.get(image)
        os.utime(world.layout.base / base_name(image), (number, number))
    world.used = {base_name(images[0])}  # the longest unused has a disk
    await world.get(images[3])
    assert world.files == sorted(base_name(images[number]) for number in (0, 2, 3))


async def test_a_full_cache_refuses_and_keeps_what_is_used(world: World) -> None:
    world.source.data = FULL
    images = [raw(FULL, id=f"image-{number}") for number in range(3)]
    world.max_bytes = 2 * MIB + MIB // 2
    await world.get(images[0])
    world.used = {base_name(images[0])}
    async with world.cache.image(images[1], "t1", None):  # a build has it just now
        with pytest.raises(Unavailable, match="image cache of the server's host is full at the moment"):
            await world.get(images[2])
        assert world.files == sorted(base_name(image) for image in images[:2])
        assert len(world.source.asked) == 2, "it is refused before it is downloaded"
        world.used.add(base_name(images[1]))  # the build has made its disk
        with pytest.raises(InsufficientResources, match=r"image cache of the server's host is full\."):
            await world.get(images[2])
    world.used.remove(base_name(images[1]))
    await world.get(images[2])
    assert world.files == sorted(base_name(images[number]) for number in (0, 2))


async def test_downloads_at_the_same_time_count_together(world: World) -> None:
    world.source.data = FULL
    world.max_bytes = MIB + MIB // 2
    world.source.gate.clear()
    first = asyncio.create_task(world.get(raw(FULL, id="image-1")))
    await world.source.begun()
    with pytest.raises(Unavailable, match="at the moment"):  # the build is tried again later, and no attempt counts
        await world.get(raw(FULL, id="image-2"))
    world.source.gate.set()
    assert await first == FULL
    assert await world.get(raw(FULL, id="image-2")) == FULL


async def test_a_later_download_does_not_end_an_earlier_one(world: World) -> None:
    """Else both would end, and perhaps again after each pause."""
    world.source.data = FULL
    world.max_bytes = MIB + MIB // 2
    world.source.gate.clear()
    held, ended = asyncio.Event(), asyncio.Event()

    async def build() -> None:
        async with world.cache.image(raw(FULL, id="image-1"), "t1", None):
            held.set()
            await ended.wait()

    first = asyncio.create_task(build())
    await world.source.begun()
    second = asyncio.create_task(world.get(raw(FULL, id="image-2", size=0)))  # it seems to need no room
    await world.source.begun()
    world.source.gate.set()
    await asyncio.wait_for(held.wait(), 5)
    with pytest.raises(Unavailable, match="at the moment"):
        await second
    ended.set()
    await first


NEEDS_QEMU = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="qemu-img is not installed")


def packed(tmp_path: Path) -> bytes:
    """Return a small image of a disk with 4 MiB of data."""
    (tmp_path / "big.raw").write_bytes(FULL[:512] + b"x" * (4 * MIB - 512))
    command = ["qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", "big.raw", "small.qcow2"]
    subprocess.run(command, cwd=tmp_path, check=True)
    return (tmp_path / "small.qcow2").read_bytes()


CLUSTER = 1 << 16


def repetitive(size: int) -> bytes:
    """Return a qcow2 file of six clusters whose disk has `size` bytes of data: all entries name the same cluster."""
    tables = -(-size // (CLUSTER // 8 * CLUSTER))
    header = struct.pack(">4sIQIIQIIQQIIQ", b"QFI\xfb", 3, 0, 0, 16, size, 0, tables, CLUSTER, 2 * CLUSTER, 1, 0, 0)
    clusters = [
        header + struct.pack(">QQQII", 0, 0, 0, 4, 104),
        struct.pack(">Q", 4 * CLUSTER) * tables,  # the level 1 table
        struct.pack(">Q", 3 * CLUSTER),  # the table of reference counts, and its only block
        struct.pack(">H", 1) * 6,
        struct.pack(">Q", 5 * CLUSTER) * (CLUSTER // 8),  # the only level 2 table
        FULL[:CLUSTER],
    ]
    return b"".join(each.ljust(CLUSTER, b"\0") for each in clusters)


@NEEDS_QEMU
@pytest.mark.parametrize("make", [packed, lambda _: repetitive(64 * MIB)])
async def test_an_image_that_no_cache_can_hold_unpacked_is_refused_for_good(
    world: World, tmp_path: Path, make: Callable[[Path], bytes]
) -> None:
    world.source.data = make(tmp_path)
    assert len(world.source.data) < 2 * MIB
    world.max_bytes = 2 * MIB
    with pytest.raises(BuildAborted, match="larger than the 2 MB"):
        await world.get(raw(world.source.data, disk_format="qcow2"))
    assert world.files == []


@NEEDS_QEMU
async def test_what_an_image_becomes_unpacked_counts(world: World, tmp_path: Path) -> None:
    world.source.data = FULL
    await world.get(raw(FULL, id="image-1"))
    world.used = {base_name(raw(FULL, id="image-1"))}
    world.source.data = packed(tmp_path)
    world.max_bytes = 4 * MIB + MIB // 2
    with pytest.raises(InsufficientResources):  # another host may have room
        await world.get(raw(world.source.data, disk_format="qcow2"))
    assert world.files == [base_name(raw(FULL, id="image-1"))]


async def test_unpacking_ends_as_soon_as_the_cache_is_full(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()

    async def convert(source: Path, source_format: str, target: Path, size: int) -> None:
        target.write_bytes(FULL * 3)
        try:
            await asyncio.Event().wait()  # it would write more
        finally:
            ended.set()

    monkeypatch.setattr(tools, "convert", convert)
    world.source.data = repetitive(64 * MIB)
    world.max_bytes = 2 * MIB
    with pytest.raises(BuildAborted):
        await asyncio.wait_for(world.get(raw(world.source.data, disk_format="qcow2")), 10)
    assert ended.is_set() and world.files == []


async def test_a_download_of_unknown_size_ends_as_soon_as_the_cache_is_full(world: World) -> None:
    class Endless(Source):
        async def fetch(self, image: ImageMeta, url: str, target: Path, files: ThreadPool) -> None:
            target.write_bytes(FULL * 3)
            await asyncio.Event().wait()

    world.cache._fetch = Endless().fetch
    world.max_bytes = 2 * MIB
    with pytest.raises(BuildAborted):
        await asyncio.wait_for(world.get(raw(FULL, size=0)), 10)
    assert world.files == []


async def test_an_order_names_no_other_socket_than_that_of_the_image_service(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nimage")
        writer.close()

    service = f"{unix_url(tmp_path / 's')}/image"
    async with await asyncio.start_unix_server(answer, tmp_path / "s"):
        assert b"".join([part async for part in stream(f"{service}/v2/images/x/file", service)]) == b"image"
        for url, known in ((f"{unix_url(tmp_path / 's')}/other", service), (f"{service}/v2/images/x/file", "")):
            with pytest.raises(BuildFailed, match="does not know its image service"):
                [part async for part in stream(url, known)]


@pytest.mark.parametrize("status", [b"429 Too Many Requests", b"500 Internal Server Error", b"503 Unavailable", b""])
async def test_an_image_service_that_restarts_is_waited_for(tmp_path: Path, status: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n" if status else b"")
        writer.close()

    service = f"{unix_url(tmp_path / 's')}/image"
    async with await asyncio.start_unix_server(answer, tmp_path / "s"):
        with pytest.raises(Unavailable, match="The image cannot be fetched"):
            [part async for part in stream(f"{service}/v2/images/x/file", service)]


async def test_an_image_service_that_is_away_is_waited_for(tmp_path: Path) -> None:
    service = f"{unix_url(tmp_path / 's')}/image"
    with pytest.raises(Unavailable, match="does not answer"):
        [part async for part in stream(f"{service}/v2/images/x/file", service)]
