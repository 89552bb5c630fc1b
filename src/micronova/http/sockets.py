"""Sockets to listen on."""

import errno
import os
import socket
from pathlib import Path

from micronova.objects.errors import MicronovaError


def listen(address: str, port: int) -> socket.socket:
    """Open the listening socket, so that a port in use is known before anything else is done."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address, port))
    except OSError as error:
        sock.close()
        wrong = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "address"
        option = "--port or api.port" if wrong == "port" else "--listen or api.listen"
        raise MicronovaError(
            f"Cannot listen on {address}:{port}: {error.strerror}. Name another {wrong} with {option}."
        ) from None
    sock.listen(1024)
    sock.setblocking(False)
    return sock


def listen_unix(path: Path, owner: int | None = None) -> socket.socket:
    """Open a socket file that only its owner can use: this user, or another one if root opens it."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    path.chmod(0o600)
    if owner is not None:
        os.chown(path, owner, -1)
    sock.listen(1024)  # who connects when the queue is full gets an error
    sock.setblocking(False)
    return sock
