"""What both services need: a port that stays theirs, and waiting for a child by watching it."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


class ServiceError(RuntimeError):
    """A service did not start, or a command of it failed; the message holds what it said."""


def free_port() -> int:
    """Return a free loopback port below the kernel's ephemeral range.

    Ports from 32768 up serve as source ports of outgoing connections: while a service is down, a client that
    keeps reconnecting could be given the very port it dials, and the service could not come back.
    """
    while True:
        port = random.randint(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, seconds: float = 60) -> None:
    """Poll until ready() holds; fail at once, with the end of the log, when the process dies first."""
    deadline = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None:
            raise ServiceError(f"exited with {process.returncode} while starting:\n{tail(log)}")
        if time.monotonic() > deadline:
            raise ServiceError(f"not ready after {seconds:.0f} s:\n{tail(log)}")
        time.sleep(0.03)


def accepts(port: int) -> bool:
    """Return whether something listens on the loopback port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def end(process: subprocess.Popen[bytes] | None, how: signal.Signals, seconds: float = 30) -> None:
    """Signal the process and wait until it is gone; one that ignores the signal is killed."""
    if process is None or process.poll() is not None:
        return
    process.send_signal(how)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def signal_tree(process: subprocess.Popen[bytes] | None, number: signal.Signals) -> None:
    """Send a signal to a process and to its children, which may be in sessions of their own.

    The process comes first: one that stands still has no more children.
    """
    assert process is not None
    process.send_signal(number)
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            if parent == process.pid:
                os.kill(int(entry.parent.name), number)


def run(*command: str, env: dict[str, str] | None = None, user: str | None = None) -> str:
    """Run a command to its end and return what it printed."""
    done = subprocess.run(
        command,
        env=env,
        cwd="/",
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    output = done.stdout.decode(errors="replace")
    if done.returncode:
        raise ServiceError(f"{' '.join(command)}: exit {done.returncode}\n{output}")
    return output


def tail(log: Path, size: int = 3000) -> str:
    """Return the end of a log file."""
    return log.read_text(errors="replace")[-size:] if log.exists() else "(no log)"


def is_root() -> bool:
    """Return whether we run as root."""
    return os.geteuid() == 0
