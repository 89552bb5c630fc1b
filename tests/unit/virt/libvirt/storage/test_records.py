"""Records of guests: they are found again whatever happened."""

from pathlib import Path

import msgspec
import pytest

from micronova.virt.libvirt.storage.layout import Layout
from micronova.virt.libvirt.storage.records import DiskRecord, GuestRecords
from tests.unit.virt.libvirt.world import OTHER_UUID, UUID, guest_record


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "root", seen_as=Path("/var/lib/libvirt"))
    made.prepare()
    return made


def test_a_record_comes_first_and_goes_last(layout: Layout) -> None:
    store = GuestRecords(layout)
    store.create(guest_record())
    with pytest.raises(FileExistsError):
        store.create(guest_record())
    disk = DiskRecord(file="disk", format="qcow2", role="root", backing="base")
    store.save(guest_record(complete=True, disks=(disk,)))
    assert GuestRecords(layout).load(UUID) == guest_record(complete=True, disks=(disk,))
    (layout.guest(UUID) / "disk").write_bytes(b"data")
    for uuid in (UUID, OTHER_UUID):
        layout.socket(uuid, "vnc").parent.mkdir()
        layout.socket(uuid, "vnc").write_bytes(b"")
    layout.console_log(UUID).write_bytes(b"")
    layout.console_log(UUID).with_suffix(".log.0").write_bytes(b"")
    store.remove(UUID)
    store.remove(UUID)
    assert store.load(UUID) is None and store.all() == []
    assert list(layout.instances.iterdir()) == []
    assert [path.name for path in layout.sockets.iterdir()] == [OTHER_UUID]
    assert list(layout.console.iterdir()) == []


def test_removing_goes_on_where_it_stopped(layout: Layout) -> None:
    store = GuestRecords(layout)
    (layout.instances / f".{UUID}.gone").mkdir()
    store.create(guest_record())
    store.remove(UUID)
    assert list(layout.instances.iterdir()) == []


def test_a_damaged_record_harms_no_other(layout: Layout) -> None:
    store = GuestRecords(layout)
    store.create(guest_record())
    store.create(guest_record(OTHER_UUID))
    (layout.guest(OTHER_UUID) / "guest.json").write_bytes(b"{")
    assert [found.uuid for found in store] == [UUID]


def test_a_record_survives_a_loss_of_power(layout: Layout, synced: list[Path]) -> None:
    store = GuestRecords(layout)
    store.create(guest_record())
    assert synced == [layout.instances / f".{UUID}.new", layout.instances]
    synced.clear()
    store.save(msgspec.structs.replace(guest_record(), complete=True))
    assert synced == [layout.guest(UUID)]
    synced.clear()
    (layout.base / "image").touch()
    layout.link_base(UUID, "image")
    assert synced == [layout.guest(UUID)]
    synced.clear()
    store.remove(UUID)
    assert synced == [layout.instances]  # else the guest would be back


def test_a_new_record_is_written_before_the_old_disks_go(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    store = GuestRecords(layout)
    store.create(guest_record(complete=True, uid=7))
    for name in ("disk", "disk.base", "disk.config"):
        (layout.guest(UUID) / name).write_bytes(b"old")
    layout.console_log(UUID).write_bytes(b"old")
    renewed = msgspec.structs.replace(guest_record(uid=7), epoch=9)

    def killed(name: str) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as dying:
        dying.setattr(store, "_remove_outside", killed)
        with pytest.raises(RuntimeError):
            store.renew(renewed)
    assert store.load(UUID) == renewed, "it says that the disks may be damaged"
    assert (layout.guest(UUID) / "disk").exists()
    store.renew(renewed)
    assert [path.name for path in layout.guest(UUID).iterdir()] == ["guest.json"]
    assert list(layout.console.iterdir()) == []
    assert store.taken_ids() == {7}, "the guest keeps its user"
