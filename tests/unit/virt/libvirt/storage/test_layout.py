"""The directories of a host's guests."""

from pathlib import Path

import pytest

from micronova.objects.errors import Invalid
from micronova.virt.libvirt.storage.layout import Layout
from micronova.virt.libvirt.storage.records import GuestRecords
from tests.unit.virt.libvirt.world import OTHER_UUID, UUID, guest_record


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "root", seen_as=Path("/var/lib/libvirt"))
    made.prepare()
    return made


def test_names_for_the_hypervisor(layout: Layout) -> None:
    assert layout.seen(layout.guest(UUID) / "disk") == f"/var/lib/libvirt/instances/{UUID}/disk"
    for wrong in ("../../etc", "", "x"):
        with pytest.raises(Invalid):
            layout.guest(wrong)


def test_what_was_half_made_or_half_removed_is_swept(layout: Layout) -> None:
    store = GuestRecords(layout)
    store.create(guest_record())
    for name in (f".{OTHER_UUID}.new", f".{OTHER_UUID}.gone"):
        (layout.instances / name).mkdir()
        (layout.instances / name / "disk").write_bytes(b"x")
    for uuid in (UUID, OTHER_UUID):
        layout.console_log(uuid).write_bytes(b"")
    layout.prepare()
    assert [path.name for path in layout.instances.iterdir()] == [UUID]
    assert [path.name for path in layout.console.iterdir()] == [f"{UUID}.log"]
