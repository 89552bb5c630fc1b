"""A role that systemd has started tells it when it is ready, that it still works, and that it stops."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.process import free_port


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(60)
        yield listening


def test_a_role_says_ready_works_and_stops(systemd: socket.socket, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'[default]\nuser = "root"\n[api]\nport = {free_port()}\n')
    command = [sys.executable, "-m", "micronova.cli.main", "run", "identity", "--config", str(file)]
    environment = {**os.environ, "NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "100000"}
    with subprocess.Popen([*command, "--dir", str(tmp_path / "state")], env=environment) as role:
        assert systemd.recv(100) == b"READY=1"
        assert [systemd.recv(100) for _ in range(3)] == 3 * [b"WATCHDOG=1"]
        role.terminate()
        while (said := systemd.recv(100)) == b"WATCHDOG=1":
            pass
        assert said == b"STOPPING=1"
    assert role.returncode == 0
