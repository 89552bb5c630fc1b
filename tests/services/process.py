"""What tests need besides: a port that stays theirs, and processes that stand still."""

import contextlib
import os
import random
import signal
import socket
import subprocess
from pathlib import Path


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
