"""What PostgreSQL and RabbitMQ of one's own need: waiting for a process by watching it, and running commands."""

import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from micronova.objects.errors import MicronovaError

PATIENCE = 300.0
"""Seconds that a start or a command may take; machines may be busy."""


class ServiceError(MicronovaError):
    """A service did not start, or a command of it failed; the message holds what it said."""


def wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, seconds: float = PATIENCE
) -> None:
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


def run(*command: str, env: dict[str, str] | None = None, user: str | None = None) -> str:
    """Run a command to its end and return what it printed. Errors do not show its arguments, which may be secret."""
    name = Path(command[0]).name
    try:
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
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ServiceError(f"{name} has not ended after {PATIENCE:.0f} s.") from None
    output = done.stdout.decode(errors="replace")
    if done.returncode:
        raise ServiceError(f"{name}: exit {done.returncode}\n{output}")
    return output


def tail(log: Path, size: int = 3000) -> str:
    """Return the end of a log file."""
    return log.read_text(errors="replace")[-size:] if log.exists() else "(no log)"
