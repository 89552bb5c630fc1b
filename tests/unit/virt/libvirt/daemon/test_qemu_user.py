"""The user that libvirt runs guests as, and the directories that it reaches."""

import pwd
import tempfile
from pathlib import Path

import pytest

from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.daemon.qemu_user import QemuUser, barrier, find_qemu_user, qemu_user_of

CAPABILITIES = """<capabilities><host>
<secmodel><model>apparmor</model><doi>0</doi></secmodel>
<secmodel><model>dac</model><doi>0</doi>
<baselabel type='kvm'>+{uid}:+{gid}</baselabel><baselabel type='qemu'>+{uid}:+{gid}</baselabel></secmodel>
</host></capabilities>"""
NOBODY = 987_654  # a number that no user has


def test_whom_it_runs_guests_as() -> None:
    found = qemu_user_of(CAPABILITIES.format(uid=NOBODY, gid=NOBODY + 1))
    assert found == QemuUser(name=str(NOBODY), group=str(NOBODY + 1), uid=NOBODY, gid=NOBODY + 1)
    root = qemu_user_of(CAPABILITIES.format(uid=0, gid=0))
    assert root is not None and root.name == "root"
    assert qemu_user_of("<capabilities><host/></capabilities>") is None
    assert qemu_user_of(CAPABILITIES.format(uid="x", gid="")) is None


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


def test_qemu_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(name: str) -> object:
        raise KeyError(name)

    monkeypatch.setattr(pwd, "getpwnam", nobody)
    with pytest.raises(LibvirtMissing, match="install libvirt-daemon-system"):
        find_qemu_user()
