"""A private libvirtd: its socket, and who may use it."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.daemon import cgroups
from micronova.virt.libvirt.daemon.private import CONSOLE_LOG_BYTES, PrivateLibvirtd
from micronova.virt.libvirt.daemon.qemu_user import QemuUser

USER = QemuUser(name="libvirt-qemu", group="libvirt-qemu", uid=64055, gid=64055)


def test_a_path_that_is_too_long_for_a_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(LibvirtMissing, match="too long for a socket"):
        PrivateLibvirtd(tmp_path / ("x" * 100), host_uuid="u", user=USER).ensure()


def test_who_may_talk_to_the_private_libvirtd(tmp_path: Path) -> None:
    """A guest's process sees the sockets: it must not be able to use them."""
    files = PrivateLibvirtd(tmp_path, host_uuid="u", user=USER)._configuration()
    assert 'unix_sock_rw_perms = "0700"' in files["libvirtd.conf"]
    assert 'unix_sock_ro_perms = "0700"' in files["libvirtd.conf"]
    assert 'user = "libvirt-qemu"' in files["qemu.conf"]
    assert "security_driver" not in files["qemu.conf"], "SELinux or AppArmor is used where the machine has it"
    assert "dynamic_ownership = 1" in files["qemu.conf"] and "seccomp_sandbox = 1" in files["qemu.conf"]
    none = PrivateLibvirtd(tmp_path, host_uuid="u", user=USER, security_driver="none")._configuration()
    assert 'security_driver = "none"' in none["qemu.conf"]
    assert f"max_size = {CONSOLE_LOG_BYTES}\nmax_backups = 1\n" in files["virtlogd.conf"]
    assert CONSOLE_LOG_BYTES <= 1 << 20, "a guest's console must not fill the disk"
    files = PrivateLibvirtd(tmp_path, host_uuid="u", user=USER, client=(1000, 1001))._configuration()
    assert 'unix_sock_rw_perms = "0770"' in files["libvirtd.conf"]
    assert 'unix_sock_group = "+1001"' in files["libvirtd.conf"]


HOLD_LOCKS = """
import fcntl, sys
held = [open(path, "w") for path in sys.argv[1:]]
for each in held:
    fcntl.lockf(each, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


async def test_a_daemon_that_hangs_does_not_hang_who_looks_whether_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts nothing, and its queue of connections is full: to connect would wait for ever."""
    monkeypatch.setattr(shutil, "which", lambda _: None)  # it runs, so nothing is to be started
    run = tmp_path / "run"
    run.mkdir()
    command = [sys.executable, "-c", HOLD_LOCKS, str(run / "libvirtd.pid"), str(run / "virtlogd.pid")]
    with contextlib.ExitStack() as opened:
        daemons = opened.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert daemons.stdout is not None and daemons.stdout.readline()
        for name in ("libvirt-sock", "virtlogd-sock"):
            listening = opened.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(str(run / name))
            listening.listen(0)
            for _ in range(3):
                client = opened.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.connect(str(run / name))
        looks = asyncio.to_thread(PrivateLibvirtd(tmp_path, host_uuid="u", user=USER).ensure)
        await asyncio.wait_for(looks, 20)


@pytest.mark.skipif(os.geteuid() != 0, reason="a private libvirtd is root's")
def test_daemons_that_run_use_changed_settings_as_soon_as_no_guest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)  # what is started can be told by the error
    monkeypatch.setattr(cgroups, "hierarchies", lambda _: [])
    run, etc = tmp_path / "run", tmp_path / "etc"
    for folder in (run / "qemu", etc):
        folder.mkdir(parents=True)
    for name, text in PrivateLibvirtd(tmp_path, host_uuid="u", user=USER)._configuration().items():
        (etc / name).write_text(text)
    changed: dict[str, Any] = {"host_uuid": "u", "user": USER, "security_driver": "none"}
    locks = [sys.executable, "-c", HOLD_LOCKS, str(run / "libvirtd.pid"), str(run / "virtlogd.pid")]
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()", "guest=one,debug-threads=on"]
    with contextlib.ExitStack() as opened:
        daemons = opened.enter_context(subprocess.Popen(locks, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        guest = opened.enter_context(subprocess.Popen(waits, stdin=subprocess.PIPE))
        assert daemons.stdout is not None and daemons.stdout.readline()
        (run / "qemu" / "one.pid").write_text(str(guest.pid))
        for name in ("libvirt-sock", "virtlogd-sock"):
            listening = opened.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(str(run / name))
            listening.listen(100)
        PrivateLibvirtd(tmp_path, host_uuid="u", user=USER).ensure()
        assert caplog.text == ""
        while_it_runs = PrivateLibvirtd(tmp_path, **changed)
        while_it_runs.ensure()
        while_it_runs.ensure()
        assert caplog.text.count("micronova down") == 1 and daemons.poll() is None
        guest.kill()
        guest.wait()
        with pytest.raises(LibvirtMissing, match="virtlogd is missing"):
            PrivateLibvirtd(tmp_path, **changed).ensure()
        assert daemons.wait(20) != 0
        assert 'security_driver = "none"' in (etc / "qemu.conf").read_text()
