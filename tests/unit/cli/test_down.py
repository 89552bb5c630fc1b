"""`micronova down` in a directory that the service user can change: whom it ends."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from micronova.cli.state import StateDirectory, ask
from micronova.cli.up import down
from micronova.objects.errors import MicronovaError

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="root alone works in a directory of another user")
SERVICE = 65533

LISTENS = """
import signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
sock.listen(1)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def innocent() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that is no part of the cloud."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture
def place(tmp_path: Path) -> StateDirectory:
    made = StateDirectory(tmp_path)
    made.create()
    return made


def test_it_ends_the_process_that_answers_and_not_the_one_that_a_file_names(
    place: StateDirectory, innocent: "subprocess.Popen[bytes]"
) -> None:
    with subprocess.Popen([sys.executable, "-c", LISTENS, place.control], stdout=subprocess.PIPE) as cloud:
        assert cloud.stdout is not None and cloud.stdout.readline() == b"ready\n"
        place.write("micronova.pid", str(innocent.pid).encode())
        assert place.running_pid() == cloud.pid
        down(place.path)
        assert cloud.wait() == 0
    assert innocent.poll() is None


def test_a_file_alone_is_no_cloud(place: StateDirectory, innocent: "subprocess.Popen[bytes]") -> None:
    place.write("micronova.pid", str(innocent.pid).encode())
    with pytest.raises(MicronovaError, match="No cloud runs"):
        down(place.path)
    assert innocent.poll() is None


def test_a_cloud_that_accepts_no_connections_is_a_cloud(place: StateDirectory) -> None:
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(str(place.control))
        listening.listen(0)
        for _ in range(3):
            client = opened.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(str(place.control))
        with pytest.raises(MicronovaError, match="runs and does not answer"):
            down(place.path)


def test_only_the_parent_of_the_cloud_is_waited_for(place: StateDirectory, innocent: "subprocess.Popen[bytes]") -> None:
    place.write("micronova.pid", b"1")
    assert place.supervisor_pid(innocent.pid) == innocent.pid
    place.write("micronova.pid", str(os.getpid()).encode())
    assert place.supervisor_pid(innocent.pid) == os.getpid()
    innocent.send_signal(signal.SIGKILL)


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """A process of this user that listens on a socket elsewhere."""
    path = tmp_path_factory.mktemp("elsewhere") / "s"
    with subprocess.Popen([sys.executable, "-c", LISTENS, path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process, path
        process.kill()


def test_a_link_to_the_socket_of_another_process_is_no_cloud(
    place: StateDirectory, daemon: tuple["subprocess.Popen[bytes]", Path]
) -> None:
    process, path = daemon
    place.control.symlink_to(path)
    with pytest.raises(MicronovaError, match="No cloud runs"):
        down(place.path)
    with pytest.raises(MicronovaError, match="No cloud answers"):
        ask(place.control, "/status", timeout=5.0)
    assert process.poll() is None


@AS_ROOT
def test_root_ends_no_process_of_roots_in_the_directory_of_the_service_user(
    place: StateDirectory, daemon: tuple["subprocess.Popen[bytes]", Path]
) -> None:
    process, path = daemon
    path.rename(place.control)
    os.chown(place.path, SERVICE, SERVICE)
    with pytest.raises(MicronovaError, match="No cloud runs"):
        down(place.path)
    assert process.poll() is None


@AS_ROOT
def test_nor_one_that_is_not_the_service_users_any_more(place: StateDirectory) -> None:
    """The kernel names who called listen(); that process may have ended, and its id be another's."""
    os.chown(place.path, SERVICE, SERVICE)
    listens = LISTENS.replace("sock.listen(1)", f"import os; os.seteuid({SERVICE}); sock.listen(1); os.seteuid(0)")
    with subprocess.Popen([sys.executable, "-c", listens, place.control], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        with pytest.raises(MicronovaError, match="No cloud runs"):
            down(place.path)
        place.terminate(process.pid)
        assert process.poll() is None
        process.kill()


@AS_ROOT
def test_root_ends_the_cloud_of_the_service_user() -> None:
    path = Path(tempfile.mkdtemp(prefix="mn-"))
    try:
        place = StateDirectory(path)
        os.chown(path, SERVICE, SERVICE)
        command = ["/usr/bin/env", "PATH=/usr/bin:/bin", "python3", "-c", LISTENS, str(place.control)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, user=SERVICE, cwd="/") as cloud:
            assert cloud.stdout is not None and cloud.stdout.readline() == b"ready\n"
            down(path)
            assert cloud.wait() == 0
    finally:
        shutil.rmtree(path)
