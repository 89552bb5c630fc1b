"""An existing libvirt of this machine, as opposed to a private one, and this cloud's guests there.

Its guests run as users of their own, as with a private libvirtd. These users must be able to traverse all directories
above the guests' files.

Everything here blocks, and is for processes that do not run libvirt's event loop: root's, and commands.
"""

import getpass
import logging
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import parse_qs, urlsplit

from micronova.objects.errors import Unavailable
from micronova.virt.libvirt.client.binding import Connect
from micronova.virt.libvirt.client.library import LibvirtMissing, has_code, is_error, load
from micronova.virt.libvirt.client.xmltree import parse
from micronova.virt.libvirt.daemon.qemu_user import barrier, group_name
from micronova.virt.libvirt.guests import domains
from micronova.virt.libvirt.guests.console_log import log_pool_name, remove_pool

log = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_TIMEOUT: Final = 60.0
"""Seconds after which a libvirt that does not answer counts as hung; a new one probes QEMU first."""
SOCKETS: Final = tuple(Path("/run/libvirt", name) for name in ("libvirt-sock", "virtqemud-sock"))
PRIVATE_INSTEAD: Final = "leave libvirt.connection_uri empty for a private one"


class ExistingLibvirt:
    """The libvirt at a URI, and the guests that one cloud has there."""

    def __init__(self, uri: str, cloud_id: str = "", guests: Path | None = None) -> None:
        """`guests` is the directory of the guests' files."""
        self.uri = uri
        self._cloud = cloud_id
        self._guests = guests

    def check(self) -> None:
        """Raise LibvirtMissing if it does not answer, or cannot run each guest as a user of its own."""
        with self._open() as connection:
            models = {model.text for model in parse(connection.getCapabilities()).iterfind("./host/secmodel/model")}
        if "dac" not in models:
            raise LibvirtMissing(
                f"The libvirt at {self.uri} cannot run each guest as a user of its own: it has no security model dac. "
                f"Use one that runs as root, or {PRIVATE_INSTEAD}."
            )

    def groups(self) -> list[int]:
        """Return the groups that a process needs in order to use it: that of its socket, if it has access."""
        path = socket_of(self.uri)
        if path is None:
            return []
        status = path.stat()
        return [status.st_gid] if status.st_mode & stat.S_IWGRP and status.st_gid else []

    def has_guests(self) -> bool:
        """Return whether a guest of the cloud runs."""
        with self._open() as connection:
            return any(True for _ in self._running(connection))

    def stop(self) -> None:
        """Stop the cloud's guests, as switching the machine off would; disks and definitions stay.

        Also remove the storage pool that a killed agent may have left.
        """
        with self._open() as connection:
            for uuid in self._running(connection):
                domain = domains.find_ours(connection, uuid, self._cloud)
                try:
                    if domain is not None:
                        domains.power_off(domain, discard_memory=False)
                except Exception as error:  # continue with the other guests
                    if not is_error(error):
                        raise
                    log.error("guest %s could not be stopped: %s", uuid, error)
            if self._guests is not None:
                remove_pool(connection, log_pool_name(self._guests))

    def _running(self, connection: Connect) -> Iterator[str]:
        for info in domains.describe_all(connection):
            if info.active and info.owner is not None and info.owner.cloud == self._cloud:
                yield info.uuid

    @contextmanager
    def _open(self) -> Iterator[Connect]:
        library = load()
        library.registerErrorHandler(lambda _context, _error: None, None)  # otherwise it prints errors
        try:
            connection: Connect = _within(OPEN_TIMEOUT, lambda: library.open(self.uri))
        except Exception as error:
            if not is_error(error):
                raise
            raise LibvirtMissing(explain_failure(self.uri, error)) from error
        try:
            yield connection
        except Exception as error:
            if not is_error(error):
                raise
            raise Unavailable(f"The libvirt at {self.uri} failed: {error}") from error
        finally:
            connection.close()


def explain_failure(uri: str, error: Exception) -> str:
    """Return one line that says why connecting failed, and what to do."""
    words = str(error).removesuffix(".")
    if has_code(error, "VIR_ERR_AUTH_FAILED", "VIR_ERR_AUTH_UNAVAILABLE", "VIR_ERR_AUTH_CANCELLED") or (
        "Permission denied" in words
    ):
        name = getpass.getuser()
        return (
            f"The user {name} may not talk to libvirt at {uri} ({words}): "
            f"usermod --append --groups {_socket_group(uri)} {name}"
        )
    return f"No libvirt answers at {uri} ({words}): start it (systemctl start libvirtd), or {PRIVATE_INSTEAD}."


def obstacle(uri: str, folder: Path) -> str | None:
    """Return why the libvirt at a URI cannot run guests whose files are below a directory; None if it can."""
    address = urlsplit(uri)
    if address.hostname:
        return (
            f"libvirt.connection_uri names the machine {address.hostname}: guests run where their agent does. "
            f"Use qemu:///system there, or {PRIVATE_INSTEAD}."
        )
    if not address.scheme.startswith("qemu"):
        return None
    if address.path == "/session":
        return f"A libvirt of one user has no network for guests: use qemu:///system, or {PRIVATE_INSTEAD}."
    try:
        ExistingLibvirt(uri).check()
    except LibvirtMissing as error:
        return str(error)
    closed = barrier(folder)
    return None if closed is None else _unreachable(closed)


def check_reachable(folder: Path) -> None:
    """Raise LibvirtMissing if guests cannot traverse the directories down to the parent of their files."""
    closed = barrier(folder)
    if closed is not None:
        raise LibvirtMissing(_unreachable(closed))


def _unreachable(closed: Path) -> str:
    return (
        f"Guests run as users of their own, who cannot pass {closed}: choose another --dir (such as "
        "/var/lib/micronova, as root), or set libvirt.instances_path to a directory that everybody can pass through."
    )


def socket_of(uri: str) -> Path | None:
    """Return the socket of a local libvirt, or None."""
    named = parse_qs(urlsplit(uri).query).get("socket")
    candidates = [Path(named[0])] if named else SOCKETS
    return next((each for each in candidates if each.is_socket()), None)


def _socket_group(uri: str) -> str:
    path = socket_of(uri)
    gid = 0 if path is None else path.stat().st_gid
    return group_name(gid) if gid else "libvirt"


def _within(seconds: float, function: Callable[[], T]) -> T:
    """Call a function that may hang, and raise LibvirtMissing if it takes longer."""
    outcome: list[T | Exception] = []

    def call() -> None:
        try:
            outcome.append(function())
        except Exception as error:  # raised to the caller
            outcome.append(error)

    worker = threading.Thread(target=call, daemon=True)
    worker.start()
    worker.join(seconds)
    if not outcome:
        raise LibvirtMissing(f"Libvirt does not answer within {seconds:g} s.")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
