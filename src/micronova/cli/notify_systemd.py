"""Tell systemd that a service is ready, stops, or still works (Type=notify, WatchdogSec=); nothing without systemd."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self

from micronova.objects.background import keep_running
from micronova.objects.clock import SystemClock

log = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Send a state, such as READY=1, to the socket that systemd names in the environment, if it does.

    A child of root's process writes it to that process, which systemd believes alone.
    """
    if relay := os.environ.get(_RELAY):
        with contextlib.suppress(BrokenPipeError, BlockingIOError):  # root's process has ended, or stands still
            os.write(int(relay), f"{state}\n".encode())
    else:
        _send(os.environ.get("NOTIFY_SOCKET", ""), state)


def _send(address: str, state: str) -> None:
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            sock.sendall(state.encode())
    except OSError as error:
        log.warning("systemd could not be told %s: %s", state, error)


Pulse = Callable[[], None]
"""Says that a process works."""


@contextlib.asynccontextmanager
async def ready_service(pulse: Pulse | None = None) -> AsyncIterator[None]:
    """Tell systemd that the service is ready, that it works while the context is open, and then that it stops.

    The messages for the watchdog come from the event loop, so that they end if the loop hangs. A worker has a `pulse`,
    by which its supervisor, whom systemd watches, knows that the worker works.
    """
    notify("READY=1")
    watched = watchdog_timeout() if pulse is None else _timeout()
    beating = partial(_beat, pulse or beat, watched / 2)
    task = keep_running(beating, name="systemd-watchdog", clock=SystemClock())
    try:
        yield
    finally:
        task.cancel()
        notify("STOPPING=1")


def beat() -> None:
    """Tell systemd's watchdog that this process works."""
    notify("WATCHDOG=1")


def watchdog_timeout() -> float:
    """Return the seconds of silence after which systemd ends this process; 0: it does not watch this one."""
    return _timeout() if os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()) else 0.0


@dataclass(frozen=True)
class Notifications:
    """What tells a process how to reach systemd: variables of its environment."""

    variables: Mapping[str, str]

    @classmethod
    def withdraw(cls) -> Self:
        """Take them from this process, so that its children, such as libvirtd, do not say that the service is ready."""
        return cls({name: os.environ.pop(name) for name in _VARIABLES if name in os.environ})

    def take(self, relay: int) -> None:
        """Let this process, a child of the one that systemd has started, write to that one what it has to say."""
        os.set_blocking(relay, False)
        os.environ.update(self.variables)
        os.environ[_RELAY] = str(relay)
        if "WATCHDOG_PID" in self.variables:
            os.environ["WATCHDOG_PID"] = str(os.getpid())

    def forward(self, said: bytes) -> None:
        """Tell systemd that the child is ready and works, and nothing else that the child says.

        A child that was taken over must not end the service, and all guests with it.
        """
        for state in said.decode(errors="replace").split():
            if state in _OF_CHILDREN:
                self.say(state)

    def say(self, state: str) -> None:
        """Tell systemd a state."""
        _send(self.variables.get("NOTIFY_SOCKET", ""), state)


_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_RELAY = "MICRONOVA_NOTIFY_RELAY"  # in the environment: the descriptor that root's process reads
_OF_CHILDREN = frozenset({"READY=1", "WATCHDOG=1"})


def _timeout() -> float:
    try:
        return int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
    except ValueError:
        return 0.0


async def _beat(pulse: Pulse, interval: float) -> None:
    while interval > 0:
        pulse()
        await asyncio.sleep(interval)
