"""A libvirt that runs already: whom it runs guests as, whether they reach their files, and what is said if not."""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from micronova.virt.libvirt.layout import Layout
from micronova.virt.libvirt.library import LibvirtMissing
from micronova.virt.libvirt.private import QemuUser
from micronova.virt.libvirt.running import barrier, obstacle, qemu_user, share_files, socket_of, why_not

CAPABILITIES = """<capabilities><host>
<secmodel><model>apparmor</model><doi>0</doi></secmodel>
<secmodel><model>dac</model><doi>0</doi>
<baselabel type='kvm'>+{uid}:+{gid}</baselabel><baselabel type='qemu'>+{uid}:+{gid}</baselabel></secmodel>
</host></capabilities>"""
NOBODY = 987_654  # a number that no user has


def test_whom_it_runs_guests_as() -> None:
    found = qemu_user(CAPABILITIES.format(uid=NOBODY, gid=NOBODY + 1))
    assert found == QemuUser(name=str(NOBODY), group=str(NOBODY + 1), uid=NOBODY, gid=NOBODY + 1)
    root = qemu_user(CAPABILITIES.format(uid=0, gid=0))
    assert root is not None and root.name == "root"
    assert qemu_user("<capabilities><host/></capabilities>") is None
    assert qemu_user(CAPABILITIES.format(uid="x", gid="")) is None


def test_what_is_in_the_way_of_guests_to_their_files() -> None:
    def somebody(gid: int = NOBODY) -> QemuUser:
        return QemuUser(name=str(NOBODY), group=str(gid), uid=NOBODY, gid=gid)

    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:  # open to all, but for the last part
        outer = Path(made)
        way = outer / "guests"
        way.mkdir(mode=0o711)
        assert barrier(way, somebody()) == outer
        outer.chmod(0o710)
        assert barrier(way, somebody()) == outer
        assert barrier(way, somebody(outer.stat().st_gid)) is None
        outer.chmod(0o711)
        assert barrier(way, somebody()) is None
        assert barrier(way / "none", somebody()) == way / "none"


def test_files_are_shared_by_those_who_may_and_not_where_nobody_reaches_them(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(LibvirtMissing, match=f"as {NOBODY}, who cannot pass .* libvirt.instances_path"):
        share_files(Layout(closed / "guests"), CAPABILITIES.format(uid=NOBODY, gid=NOBODY))
    ours = Layout(closed / "guests")
    share_files(ours, CAPABILITIES.format(uid=os.geteuid(), gid=os.getegid() or NOBODY))
    assert ours.private
    silent = Layout(tmp_path / "guests")
    share_files(silent, "<capabilities><host/></capabilities>")
    assert not silent.private


def test_where_it_listens(tmp_path: Path) -> None:
    assert socket_of(f"qemu+unix:///system?socket={tmp_path}/none") is None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert socket_of(f"qemu+unix:///system?socket={tmp_path}/s") == tmp_path / "s"


def test_addresses_that_cannot_be(tmp_path: Path) -> None:
    said = obstacle("qemu+ssh://root@elsewhere/system", tmp_path)
    assert said is not None and "names the machine elsewhere" in said and "qemu:///system" in said
    said = obstacle("qemu:///session", tmp_path)
    assert said is not None and "use qemu:///system" in said
    assert obstacle("xen:///system", tmp_path) is None


def test_why_there_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    denied = why_not("qemu:///system?socket=/none", Exception("Failed to connect socket to 'x': Permission denied"))
    assert denied.startswith("The user ada may not talk") and denied.endswith("usermod --append --groups libvirt ada")
    absent = why_not("qemu:///system", Exception("Failed to connect socket to 'x': No such file or directory"))
    assert absent.startswith("No libvirt answers at qemu:///system") and "systemctl start libvirtd" in absent
