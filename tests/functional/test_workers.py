"""The workers of one port: one that cannot start for now does not stop the others."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from micronova.cli.workers import worker_count
from micronova.conf.settings import load
from tests.command import refused
from tests.services.process import free_port

LOGGED = "identity: ready"


def _two_free_ports() -> int:
    """Return a free port whose successor is free, too."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", first + 1)):
            return first


class Workers:
    """`micronova run identity` with two workers, and its log."""

    def __init__(self, directory: Path, database: str) -> None:
        self.port, self.metrics = free_port(), _two_free_ports()
        file = directory / "settings.toml"
        file.write_text(
            f'[default]\nuser = "root"\n[database]\nconnection = "{database}"\n[api]\nworkers = 2\nport = {self.port}\n'
            f'metrics_listen = "127.0.0.1:{self.metrics}"\n'
        )
        command = [sys.executable, "-m", "micronova.cli.main", "run", "identity", "--config", str(file)]
        self.process = subprocess.Popen(
            [*command, "--dir", str(directory / "state")],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []

    def until_logged(self, text: str) -> None:
        """Read the log up to the next line with a text."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} was not logged: {''.join(self.log)}")

    def pids(self) -> list[int]:
        """Return the ids of the workers."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def status(self) -> int:
        """Ask for the list of versions, which needs no database; return the status."""
        return self.get(self.port, "/identity/")

    def get(self, port: int, path: str) -> int:
        """Return the status of a path."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().status


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    (tmp_path / "databases").mkdir()
    made = Workers(tmp_path, f"sqlite:///{tmp_path}/databases/x")
    with made.process:
        yield made
        made.process.terminate()


def test_each_worker_serves_its_metrics(workers: Workers) -> None:
    for _ in range(2):
        workers.until_logged(LOGGED)
    assert [workers.get(workers.metrics + number, "/metrics") for number in range(2)] == [200, 200]


def test_workers_share_the_memory_of_the_code(workers: Workers) -> None:
    for _ in range(2):
        workers.until_logged(LOGGED)
    for pid in workers.pids():
        sizes = dict(line.split()[:2] for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        assert int(sizes["Shared_Dirty:"]) > 16 * 1024, sizes  # KiB


@pytest.mark.parametrize(
    ("roles", "count"),
    [
        ("api metadata", 2),
        ("conductor", 3),
        ("scheduler", 1),
        ("scheduler conductor", 3),
        ("api scheduler", 2),
        ("api conductor compute", 1),
        ("network-agent", 1),
    ],
)
def test_the_role_with_the_most_workers_decides(roles: str, count: int) -> None:
    settings = load(None, {}, api={"workers": 2}, conductor={"workers": 3})
    assert worker_count(settings, roles.split()) == count


def test_a_worker_that_cannot_start_waits_while_the_others_answer(tmp_path: Path, workers: Workers) -> None:
    for _ in range(2):
        workers.until_logged(LOGGED)
    (tmp_path / "databases").rename(tmp_path / "away")
    killed, stays = workers.pids()
    os.kill(killed, signal.SIGKILL)
    workers.until_logged("is started again")
    workers.until_logged("this process waits until it can start")
    assert workers.status() == 300
    (tmp_path / "away").rename(tmp_path / "databases")
    workers.until_logged(LOGGED)
    assert stays in workers.pids() and len(workers.pids()) == 2
    workers.process.terminate()
    assert workers.process.wait(50) == 0


def test_a_worker_that_fails_later_does_not_stop_the_others(tmp_path: Path, workers: Workers) -> None:
    """Somebody has changed the settings since; the workers that run have those with which they work."""
    for _ in range(2):
        workers.until_logged(LOGGED)
    with (tmp_path / "settings.toml").open("a") as settings:
        settings.write("no_such_option = 1\n")
    killed, stays = workers.pids()
    os.kill(killed, signal.SIGKILL)
    workers.until_logged("ended with exit code 1 and is started again")
    assert workers.status() == 300 and stays in workers.pids()
    workers.process.terminate()
    assert workers.process.wait(50) == 0


def test_a_stop_ends_workers_that_wait(tmp_path: Path) -> None:
    made = Workers(tmp_path, f"sqlite:///{tmp_path}/missing/x")
    with made.process:
        for _ in range(2):
            made.until_logged("this process waits until it can start")
        made.process.terminate()
        assert made.process.wait(50) == 0


def test_wrong_settings_end_all_workers_with_the_reason(tmp_path: Path) -> None:
    made = Workers(tmp_path, "mysql://u@h/x")
    with made.process:
        _, said = made.process.communicate(timeout=50)
    assert made.process.returncode == 1
    assert "micronova: Cannot open the database mysql://u@h/x: " in said and "Traceback" not in said


def test_up_says_at_once_what_is_away(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        broker = f"127.0.0.1:{taken.getsockname()[1]}"
    file = tmp_path / "settings.toml"
    file.write_text(f'[default]\ntransport_url = "amqp://guest:hush@{broker}/"\n')
    said = refused("up", "--dir", tmp_path / "c", "--driver", "fake", "--port", "0", "--config", file)
    assert said.startswith(f"micronova: Cannot use the broker at amqp://guest@{broker}/: nothing accepts connections")
