"""An existing libvirt: the user that it runs guests as, whether that user reaches their files, and the error if not."""

import os
import socket
from pathlib import Path

import pytest

from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.daemon.existing import explain_failure, obstacle, share_files, socket_of
from micronova.virt.libvirt.storage.layout import Layout
from tests.unit.virt.libvirt.daemon.test_qemu_user import CAPABILITIES, NOBODY


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
    denied = explain_failure(
        "qemu:///system?socket=/none", Exception("Failed to connect socket to 'x': Permission denied")
    )
    assert denied.startswith("The user ada may not talk") and denied.endswith("usermod --append --groups libvirt ada")
    absent = explain_failure("qemu:///system", Exception("Failed to connect socket to 'x': No such file or directory"))
    assert absent.startswith("No libvirt answers at qemu:///system") and "systemctl start libvirtd" in absent
