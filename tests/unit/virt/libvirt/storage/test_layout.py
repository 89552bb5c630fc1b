"""The directories of a host's guests."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from micronova.objects.errors import Invalid
from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.storage import acl
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


ALICE, BOB = 2_013_265_920, 2_013_265_921


def as_user(user: int, action: Callable[[], object]) -> bool:
    """Return whether a user may do something."""
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        try:
            action()
        except PermissionError:
            os._exit(1)
        except BaseException:
            os._exit(2)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1)
    return status == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_an_agent_prepares_directories_that_root_has_made() -> None:
    root = Path(tempfile.mkdtemp(prefix="mn-layout-"))
    try:
        root.chmod(0o711)
        for folder in Layout(root).folders:
            folder.mkdir()
            os.chown(folder, ALICE, ALICE)
        assert as_user(ALICE, Layout(root).prepare)
    finally:
        shutil.rmtree(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_each_guests_user_reaches_its_own_files_only() -> None:
    root = Path(tempfile.mkdtemp(prefix="mn-layout-"))
    layout = Layout(root)
    try:
        layout.prepare()
        layout.check_sharing()
        (layout.base / "image").write_bytes(b"image")
        for uuid, user in ((UUID, ALICE), (OTHER_UUID, BOB)):
            GuestRecords(layout).create(guest_record(uuid, uid=user))
            for name in ("disk", "disk.config"):
                (layout.guest(uuid) / name).touch(0o600)
            layout.console_log(uuid).touch(0o600)
            layout.admit(uuid, user, {"disk": True, "disk.config": False})
        layout.link_base(UUID, "image")
        layout.link_base(UUID, "image")
        mine, theirs = layout.guest(UUID), layout.guest(OTHER_UUID)

        def may(action: Callable[[], object]) -> bool:
            return as_user(ALICE, action)

        assert may(lambda: (mine / "disk").write_bytes(b"x")) and may((mine / "disk.base").read_bytes)
        assert may((mine / "disk.config").read_bytes) and may(layout.socket(UUID, "vnc").touch)
        assert not may(lambda: (mine / "disk.config").write_bytes(b"x"))
        assert not may(lambda: (mine / "disk.base").write_bytes(b"x"))
        for file in (*theirs.iterdir(), mine / "guest.json", layout.console_log(UUID), layout.base / "image"):
            assert not may(file.read_bytes), file
        for folder in (
            mine,
            theirs,
            layout.base,
            layout.instances,
            layout.sockets,
            layout.socket(OTHER_UUID, "x").parent,
        ):
            assert not may(partial(os.listdir, folder)), folder
            assert not may((folder / "new").touch), folder
        layout.seal(UUID)
        assert not may(layout.socket(UUID, "spice").touch), "the guest runs, and has its sockets"
        assert layout.socket(UUID, "vnc").exists()
        assert (mine / "disk").stat().st_uid == os.geteuid()
    finally:
        shutil.rmtree(root)


def test_a_file_system_without_access_control_lists(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    layout.check_sharing()
    monkeypatch.setattr(acl, "share", unsupported)
    with pytest.raises(LibvirtMissing, match="needs POSIX access control lists and hard links"):
        layout.check_sharing()
    assert list(layout.instances.iterdir()) == [] and list(layout.base.iterdir()) == []
