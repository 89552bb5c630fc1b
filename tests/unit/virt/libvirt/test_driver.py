"""The driver without libvirt: what it does with guests' files."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from micronova.conf.libvirt import LibvirtSettings
from micronova.metadata.vendordata import VendorDataSource
from micronova.virt.driver import DriverFailed
from micronova.virt.libvirt.client.connection import Connection
from micronova.virt.libvirt.driver import LibvirtDriver
from micronova.virt.libvirt.storage import records
from micronova.virt.libvirt.storage.layout import Layout
from micronova.virt.libvirt.storage.records import GuestRecords
from tests.unit.compute.agent_harness import ManualClock
from tests.unit.virt.libvirt.world import UUID, guest_record


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
