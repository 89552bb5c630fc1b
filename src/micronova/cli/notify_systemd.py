"""Tell systemd that a service is ready, stops, or still works (Type=notify, WatchdogSec=); nothing without systemd."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from functools import partial

from micronova.objects.background import keep_running
from micronova.objects.clock import SystemClock

log = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Send a state, such as READY=1, to the socket that systemd names in the environment, if it does."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            sock.sendall(state.encode())
    except OSError as error:
        log.warning("systemd could not be told %s: %s", state, error)


@contextlib.asynccontextmanager
async def ready_service() -> AsyncIterator[None]:
    """Tell systemd that the service is ready, that it works while the context is open, and then that it stops.

    The messages for the watchdog come from the event loop, so that they end if the loop hangs.
    """
    notify("READY=1")
    pulse = keep_running(partial(_pulse, _interval()), name="systemd-watchdog", clock=SystemClock())
    try:
        yield
    finally:
        pulse.cancel()
        notify("STOPPING=1")


def _interval() -> float:
    """Return the seconds between two messages for the watchdog; 0: there is none, or it is another process's."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    try:
        return int(os.environ.get("WATCHDOG_USEC", "0")) / 2e6
    except ValueError:
        return 0.0


async def _pulse(interval: float) -> None:
    while interval > 0:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval)
