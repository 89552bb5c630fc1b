"""Root's private libvirtd works in root's own directory, whatever another user puts in its place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.daemon.private import PrivateLibvirtd
from micronova.virt.libvirt.daemon.qemu_user import QemuUser

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a private libvirtd is root's")

NOBODY = QemuUser(name="nobody", group="nogroup", uid=65534, gid=65534)


def daemon(directory: Path) -> PrivateLibvirtd:
    return PrivateLibvirtd(
        directory, host_uuid="8d0f2f5c-41f4-4f4b-9d2c-6d6963726f6e", user=NOBODY, client=(65534, 65534)
    )


def test_root_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (tmp_path / "libvirt").symlink_to(victim)
    with pytest.raises(LibvirtMissing, match="cannot be opened as root's own directory"):
        daemon(tmp_path / "libvirt").ensure()
    assert list(victim.iterdir()) == [] and victim.stat().st_mode & 0o777 == 0o700


def test_nor_uses_another_users_directory(tmp_path: Path) -> None:
    theirs = tmp_path / "libvirt"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    with pytest.raises(LibvirtMissing, match="does not belong to root"):
        daemon(theirs).ensure()
    assert list(theirs.iterdir()) == []


def test_processes_named_in_a_directory_that_was_put_there_later_are_not_ended(tmp_path: Path) -> None:
    """Whoever owns the parent directory may exchange the directory for one that names processes of others."""
    directory = tmp_path / "libvirt"
    directory.mkdir()
    root = daemon(directory)
    assert not root.running()  # it is open now
    directory.rename(tmp_path / "old")
    (directory / "run" / "qemu").mkdir(parents=True)
    repeat = [sys.executable, "-c", "print('ready', flush=True); print(input())", "guest=x"]
    with subprocess.Popen(repeat, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as innocent:
        # Only from then on the kernel surely shows its command line.
        assert innocent.stdout is not None and innocent.stdout.readline() == b"ready\n"
        (directory / "run" / "qemu" / "x.pid").write_text(str(innocent.pid))
        root.stop()
        assert innocent.communicate(b"alive\n")[0] == b"alive\n"
