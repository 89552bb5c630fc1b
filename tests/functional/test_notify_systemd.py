"""A role that systemd has started tells it when it is ready, that it still works, and that it stops."""

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.services.process import free_port


@pytest.fixture
def systemd() -> Iterator[socket.socket]:
    """An abstract socket: users that processes become reach it, as they reach that of systemd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0micronova-test-{uuid4()}")
        listening.settimeout(60)
        yield listening


def _address(systemd: socket.socket) -> str:
    return f"@{systemd.getsockname()[1:].decode()}"


def test_a_role_says_ready_works_and_stops(systemd: socket.socket, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'[default]\nuser = "root"\n[api]\nport = {free_port()}\n')
    command = [sys.executable, "-m", "micronova.cli.main", "run", "identity", "--config", str(file)]
    environment = {**os.environ, "NOTIFY_SOCKET": _address(systemd), "WATCHDOG_USEC": "100000"}
    with subprocess.Popen([*command, "--dir", str(tmp_path / "state")], env=environment) as role:
        assert systemd.recv(100) == b"READY=1"
        assert [systemd.recv(100) for _ in range(3)] == 3 * [b"WATCHDOG=1"]
        role.terminate()
        while (said := systemd.recv(100)) == b"WATCHDOG=1":
            pass
        assert said == b"STOPPING=1"
    assert role.returncode == 0


def _environment(systemd: socket.socket, **more: str) -> dict[str, str]:
    return {**os.environ, "NOTIFY_SOCKET": _address(systemd), **more}


def _next(systemd: socket.socket, but: bytes = b"WATCHDOG=1") -> bytes:
    """Return the next message that is another one."""
    while (said := systemd.recv(100)) == but:
        pass
    return said


def test_a_cloud_of_one_machine_says_ready_works_and_stops(systemd: socket.socket, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "micronova.cli.main", "up", "--driver", "fake", "--port", str(free_port())]
    environment = _environment(systemd, WATCHDOG_USEC="1000000")
    with subprocess.Popen(
        [*command, "--dir", str(tmp_path / "state")], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as cloud:
        try:
            assert systemd.recv(100) == b"READY=1"
            assert (tmp_path / "state" / "clouds.yaml").exists()
            assert systemd.recv(100) == b"WATCHDOG=1"
        finally:
            cloud.terminate()
        assert _next(systemd) == b"STOPPING=1"
    assert cloud.returncode == 0


def test_a_worker_that_hangs_is_started_again_and_the_watchdog_is_fed(systemd: socket.socket, tmp_path: Path) -> None:
    (tmp_path / "databases").mkdir()
    file = tmp_path / "settings.toml"
    file.write_text(
        f'[default]\nuser = "root"\n[database]\nconnection = "sqlite:///{tmp_path}/databases/x"\n'
        f"[api]\nport = {free_port()}\nworkers = 2\n"
    )
    command = [sys.executable, "-m", "micronova.cli.main", "run", "identity", "--config", str(file)]
    # As systemd does it: the watchdog is for the process that it has started, and not for workers of that.
    start = 'export WATCHDOG_PID=$$; exec "$@"'
    with subprocess.Popen(
        ["sh", "-c", start, "sh", *command, "--dir", str(tmp_path / "state")],
        env=_environment(systemd, WATCHDOG_USEC="2000000"),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as service:
        assert service.stderr is not None
        try:
            assert [_next(systemd) for _ in range(2)] == 2 * [b"READY=1"]
            workers = [int(pid) for pid in Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()]
            assert len(workers) == 2
            for _ in range(4):  # pulses of both have come
                assert systemd.recv(100) == b"WATCHDOG=1"
            os.kill(workers[0], signal.SIGSTOP)
            said = next(line for line in service.stderr if "has not worked for 2 s" in line)
            assert str(workers[0]) in said
            assert _next(systemd) == b"READY=1"  # of its successor
            assert systemd.recv(100) == b"WATCHDOG=1"
            left = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()
            assert len(left) == 2 and str(workers[1]) in left
        finally:
            service.terminate()
            service.stderr.read()


AS_ROOT = """
import asyncio, os, signal
from types import SimpleNamespace
from micronova.cli import supervisor
from micronova.cli.notify_systemd import notify, ready_service

class Processes:
    groups = ()
    def __getattr__(self, name):
        return lambda *_, **__: None
    def start(self):
        assert not {"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"} & set(os.environ)  # libvirtd would say "ready"

for name in ("hand_over", "become", "end_with"):
    setattr(supervisor, name, lambda *_: None)

def main(link):
    async def work():
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        for taken_over in ("STOPPING=1", "MAINPID=1", "FDSTORE=1"):
            notify(taken_over)
        async with ready_service():
            await stopped.wait()
    asyncio.run(work())
    os._exit(0)

os.environ["WATCHDOG_PID"] = str(os.getpid())
supervisor.supervise(Processes(), None, SimpleNamespace(path="/"), main, stop_timeout=200.0)
"""


def test_roots_process_speaks_for_the_service(systemd: socket.socket) -> None:
    """Systemd believes this process alone: another one could say that the service stops, and its guests would end."""
    systemd.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def said() -> tuple[bytes, int]:
        text, ancillary, _, _ = systemd.recvmsg(100, socket.CMSG_SPACE(12))
        return text, struct.unpack("3i", ancillary[0][2])[0]

    with subprocess.Popen([sys.executable, "-c", AS_ROOT], env=_environment(systemd, WATCHDOG_USEC="100000")) as root:
        assert said() == (b"READY=1", root.pid)
        assert [said() for _ in range(2)] == 2 * [(b"WATCHDOG=1", root.pid)]
        root.terminate()
        while (last := said()) == (b"WATCHDOG=1", root.pid):
            pass
        assert last == (b"STOPPING=1", root.pid)
        # Systemd would kill it after TimeoutStopSec, while guests and work end in the time that settings give them.
        assert said() == (b"EXTEND_TIMEOUT_USEC=260000000", root.pid)
    assert root.returncode == 0


def test_every_unit_tells_when_it_is_ready() -> None:
    units = sorted((Path(__file__).parents[2] / "packaging" / "systemd").glob("*.service"))
    assert len(units) == 3
    for unit in units:
        # Workers of a role speak for themselves; of what root starts, root's process alone.
        access = "all" if unit.name == "micronova@.service" else "main"
        assert {"Type=notify", f"NotifyAccess={access}"} <= set(unit.read_text().splitlines()), unit.name
