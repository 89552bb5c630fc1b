"""The files of a host: found again whatever happened."""

from pathlib import Path

import msgspec
import pytest

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.errors import Invalid
from micronova.virt.libvirt.console import MOST_BYTES, from_files, read_console
from micronova.virt.libvirt.layout import DiskRecord, GuestRecord, GuestStore, Layout
from micronova.virt.libvirt.resources import file_system, memory_mb, node_resources, uptime
from tests.unit.virt.libvirt.world import UUID, facts

OTHER = "7c0c7f5e-9a63-4a0b-8f3c-5a7d0e1c2b3a"


def record(uuid: str = UUID, **changes: object) -> GuestRecord:
    made = GuestRecord(
        uuid=uuid, cloud="cloud-1", host="host-1", node="host-1", epoch=3, vcpus=2, memory_mb=512, local_gb=4
    )
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "root", seen_as=Path("/var/lib/libvirt"))
    made.prepare()
    return made


def test_a_record_comes_first_and_goes_last(layout: Layout) -> None:
    store = GuestStore(layout)
    store.create(record())
    with pytest.raises(FileExistsError):
        store.create(record())
    disk = DiskRecord(file="disk", format="qcow2", role="root", backing="base")
    store.save(record(complete=True, disks=(disk,)))
    assert GuestStore(layout).load(UUID) == record(complete=True, disks=(disk,))
    (layout.guest(UUID) / "disk").write_bytes(b"data")
    layout.socket(UUID, "vnc").write_bytes(b"")
    layout.socket(OTHER, "vnc").write_bytes(b"")
    layout.console_log(UUID).write_bytes(b"")
    layout.console_log(UUID).with_suffix(".log.0").write_bytes(b"")
    store.remove(UUID)
    store.remove(UUID)
    assert store.load(UUID) is None and store.all() == []
    assert list(layout.instances.iterdir()) == []
    assert [path.name for path in layout.sockets.iterdir()] == [f"{OTHER}.vnc"]
    assert list(layout.console.iterdir()) == []


def test_names_for_the_hypervisor(layout: Layout) -> None:
    assert layout.seen(layout.guest(UUID) / "disk") == f"/var/lib/libvirt/instances/{UUID}/disk"
    for wrong in ("../../etc", "", "x"):
        with pytest.raises(Invalid):
            layout.guest(wrong)


def test_what_was_half_made_or_half_removed_is_swept(layout: Layout) -> None:
    store = GuestStore(layout)
    store.create(record())
    for name in (f".{OTHER}.new", f".{OTHER}.gone"):
        (layout.instances / name).mkdir()
        (layout.instances / name / "disk").write_bytes(b"x")
    for uuid in (UUID, OTHER):
        layout.console_log(uuid).write_bytes(b"")
    layout.prepare()
    assert [path.name for path in layout.instances.iterdir()] == [UUID]
    assert [path.name for path in layout.console.iterdir()] == [f"{UUID}.log"]


def test_removing_goes_on_where_it_stopped(layout: Layout) -> None:
    store = GuestStore(layout)
    (layout.instances / f".{UUID}.gone").mkdir()
    store.create(record())
    store.remove(UUID)
    assert list(layout.instances.iterdir()) == []


def test_a_damaged_record_harms_no_other(layout: Layout) -> None:
    store = GuestStore(layout)
    store.create(record())
    store.create(record(OTHER))
    (layout.guest(OTHER) / "guest.json").write_bytes(b"{")
    assert [found.uuid for found in store] == [UUID]


def test_console_log(tmp_path: Path) -> None:
    def read(lines: int | None) -> str:
        return read_console(from_files(tmp_path), "x.log", lines)

    assert read(None) == ""
    (tmp_path / "x.log.0").write_bytes(b"one\ntwo\n")
    assert read(None) == "one\ntwo\n"  # the new one is just being made
    (tmp_path / "x.log").write_bytes(b"three\nf\xffur\x00\n")
    assert read(None) == "one\ntwo\nthree\nf\ufffdur\n"
    assert read(2) == "three\nf\ufffdur"
    assert read(0) == ""
    (tmp_path / "x.log").write_bytes(b"x" * (MOST_BYTES * 2))
    assert len(read(None)) == MOST_BYTES


def test_resources(layout: Layout) -> None:
    ours = [record(), record(OTHER, cloud="another")]
    running = {UUID: (2, 512), OTHER: (4, 1024), "by-hand": (1, 64)}
    node = node_resources(
        "host-1", "cloud-1", facts(), LibvirtSettings(), layout, records=ours, running=running, proc=Path("/proc")
    )
    assert (node.node, node.hypervisor_type, node.hypervisor_version) == ("host-1", "QEMU", 7_002_000)
    assert (node.vcpus_used, node.memory_mb_used) == (7, 1600)
    assert node.memory_mb == memory_mb() > 0 and node.vcpus > 0
    assert node.local_gb == file_system(layout.root).total // 1024**3
    assert node.local_gb_used >= 4 and node.running_vms == 3
    assert node.cpu_info["arch"] == "x86_64"
    again = node_resources(
        "host-1", "cloud-1", facts(), LibvirtSettings(cpu_shared_set="0"), layout, records=[], running={}
    )
    assert again.node_uuid == node.node_uuid and again.vcpus == 1


def test_uptime() -> None:
    assert uptime().startswith("up ") and "load average:" in uptime()
