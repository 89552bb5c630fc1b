"""The driver without libvirt: what it does with guests' files."""

import asyncio
import errno
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from micronova.conf.libvirt import LibvirtSettings
from micronova.metadata.vendordata import VendorDataSource
from micronova.objects import power_state
from micronova.objects.errors import Conflict
from micronova.objects.image import ImageMeta
from micronova.virt.driver import DriverFailed, ImageCaching
from micronova.virt.libvirt.client.connection import Connection
from micronova.virt.libvirt.definition.types import Owner
from micronova.virt.libvirt.driver import LibvirtDriver
from micronova.virt.libvirt.guests.domains import DomainInfo
from micronova.virt.libvirt.storage import records
from micronova.virt.libvirt.storage.layout import Layout
from micronova.virt.libvirt.storage.records import GuestRecords
from tests.clocks import ManualClock
from tests.unit.virt.libvirt.world import IMAGE, UUID, guest_record, plan


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path)
    made.prepare()
    return made


@pytest.fixture
def driver(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> LibvirtDriver:
    """A driver whose libvirt knows no guests."""

    async def knows_none(self: Connection, *_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr(Connection, "change", knows_none)
    monkeypatch.setattr(Connection, "read", knows_none)
    record = guest_record()
    return LibvirtDriver(
        record.host,
        settings=LibvirtSettings(),
        layout=layout,
        uri="qemu:///system",
        daemon=None,
        cloud_id=record.cloud,
        clock=ManualClock(),
        vendor_data=VendorDataSource(),
    )


def _fail_for(name: str) -> Callable[[Path], None]:
    def fail(path: Path) -> None:
        if path.name == name:
            raise OSError(errno.EBUSY, "Device or resource busy")

    return fail


async def test_an_image_is_fetched_ahead_of_time(driver: LibvirtDriver, layout: Layout) -> None:
    data = bytes(510) + b"\x55\xaa"
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(data), data))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v2/images/i/file?ticket=t"
        image = ImageMeta(id="i", size=len(data), checksum=hashlib.md5(data, usedforsecurity=False).hexdigest())
        assert isinstance(driver, ImageCaching)
        assert await driver.cache_image(image, url)
        assert not await driver.cache_image(image, url)
    assert len(asked) == 1 and b"?ticket=t " in asked[0]
    [cached] = layout.base.iterdir()
    assert cached.read_bytes() == data


@pytest.mark.parametrize("file", ["disk", UUID])
async def test_files_that_could_not_be_removed_are_removed_by_the_next_attempt(
    driver: LibvirtDriver, layout: Layout, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    GuestRecords(layout).create(guest_record())
    (layout.guest(UUID) / "disk").write_bytes(b"data")
    layout.console_log(UUID).write_bytes(b"")
    with monkeypatch.context() as broken:
        broken.setattr(records, "remove", _fail_for(file))
        for _ in range(2):
            with pytest.raises(OSError, match="busy"):
                await driver.destroy(UUID)
    await driver.destroy(UUID)
    assert [*layout.instances.iterdir(), *layout.console.iterdir()] == []
    await driver.destroy(UUID)


async def test_files_with_a_damaged_record_are_not_reported_as_removed(driver: LibvirtDriver, layout: Layout) -> None:
    GuestRecords(layout).create(guest_record())
    (layout.guest(UUID) / "guest.json").write_bytes(b"{")
    with pytest.raises(DriverFailed, match="damaged"):
        await driver.destroy(UUID)
    assert layout.guest(UUID).exists()


async def test_a_guest_that_was_only_partly_made_is_not_rescued(driver: LibvirtDriver, layout: Layout) -> None:
    """A rebuild that failed has left it so."""
    GuestRecords(layout).create(guest_record())
    order = plan()
    order.rescue_image = IMAGE
    for attempt in (driver.rescue(order, 0.0), driver.unrescue(order)):
        with pytest.raises(Conflict, match="rebuild or delete"):
            await attempt
    assert [file.name for file in layout.guest(UUID).iterdir()] == ["guest.json"]


async def test_a_revert_that_comes_again_does_not_stop_the_guest(
    driver: LibvirtDriver, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its report was lost, and the guest runs again."""
    told: list[str] = []

    async def runs(self: Connection, *_: Any, **__: Any) -> DomainInfo:
        owner = Owner(uuid=UUID, epoch=1, cloud=guest_record().cloud, name="")
        return DomainInfo(uuid=UUID, owner=owner, power=power_state.RUNNING, active=True)

    async def note(self: Connection, uuid: str, function: Any, what: str, **_: Any) -> None:
        told.append(what)

    monkeypatch.setattr(Connection, "read", runs)
    monkeypatch.setattr(Connection, "change", note)
    GuestRecords(layout).create(guest_record(complete=True, epoch=plan().epoch))
    await driver.revert_resize(plan())
    assert told == []
