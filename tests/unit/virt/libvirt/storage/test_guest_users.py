"""The user ids of guests: no two guests of a host share one, nor two clouds."""

import hashlib
from pathlib import Path
from uuid import UUID as Uuid
from uuid import uuid4

import pytest

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.errors import InsufficientResources, Invalid
from micronova.virt.libvirt.storage.guest_users import BLOCK, free_id, guest_ids
from micronova.virt.libvirt.storage.layout import Layout
from micronova.virt.libvirt.storage.records import GuestRecords
from tests.unit.virt.libvirt.world import OTHER_UUID, UUID, guest_record

IDS = LibvirtSettings().guest_uids


def test_a_cloud_has_a_block_that_follows_from_its_id() -> None:
    one, other = (str(Uuid(bytes=hashlib.md5(name).digest())) for name in (b"one", b"other"))
    assert guest_ids(IDS, one) == guest_ids(IDS, one) != guest_ids(IDS, other)
    blocks = [guest_ids(IDS, str(uuid4())) for _ in range(500)]
    for block in blocks:
        assert len(block) == BLOCK and block.start >= 2_013_265_920 and block[-1] <= 2_147_483_647
        assert (block.start - 2_013_265_920) % BLOCK == 0, "blocks do not overlap"


def test_a_small_range_is_one_block() -> None:
    assert guest_ids("70000-70002", "any") == range(70_000, 70_003)


@pytest.mark.parametrize("ids", ["", "1-2", "70000", "70002-70000", "70000-4294967295", "a-b", "-1-70000"])
def test_ranges_that_cannot_be(ids: str) -> None:
    with pytest.raises(Invalid, match="FIRST-LAST"):
        guest_ids(ids, "any")


def test_an_id_is_taken_as_long_as_there_are_files_of_its_guest(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.prepare()
    records, ids = GuestRecords(layout), range(70_000, 70_002)
    records.create(guest_record(uid=free_id(ids, records.taken_ids())))
    records.create(guest_record(OTHER_UUID, uid=free_id(ids, records.taken_ids())))
    assert records.taken_ids() == {70_000, 70_001}
    with pytest.raises(InsufficientResources, match="no user id left for a guest: its 2 ids from 70000 on"):
        free_id(ids, records.taken_ids())
    # An agent that dies while it removes a guest has hidden it already.
    layout.guest(UUID).rename(layout.instances / f".{UUID}.gone")
    assert GuestRecords(layout).taken_ids() == {70_000, 70_001}
    layout.admit(OTHER_UUID, 70_001, {})
    (layout.guest(OTHER_UUID) / "guest.json").write_bytes(b"damaged")
    assert GuestRecords(layout).taken_ids() == {70_000, 70_001}
    records.remove(UUID)
    assert free_id(ids, GuestRecords(layout).taken_ids()) == 70_000


def test_the_record_goes_after_all_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(tmp_path)
    layout.prepare()
    records = GuestRecords(layout)
    records.create(guest_record(uid=70_000))
    socket = layout.socket(UUID, "vnc")
    socket.parent.mkdir()
    socket.touch()
    (layout.guest(UUID) / "disk").touch()
    unlink, seen = Path.unlink, []

    def watched(path: Path, missing_ok: bool = False) -> None:
        seen.append(path.name)
        assert records.taken_ids() == {70_000}
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    records.remove(UUID)
    assert "disk" in seen and not socket.exists() and records.taken_ids() == set()
