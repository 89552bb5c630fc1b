"""The client of the privileged helper, and how the helper is started."""

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from micronova.objects.errors import MicronovaError, Unavailable
from micronova.privileged import verbs as v
from micronova.privileged import wire

_READY_TIMEOUT = 30.0
_UMASK = 0o022  # DHCP servers, which run as another user, read what the helper writes


class PrivilegedError(MicronovaError):
    """The helper refused a verb, or the kernel or a program failed."""

    code = "privileged"


class Privileged(Protocol):
    """Carries out verbs."""

    async def call(self, verb: v.Verb) -> v.Reply:
        """Carry out a verb; raise PrivilegedError if that fails."""

    async def open(self, verb: v.Verb) -> socket.socket:
        """Carry out a verb that returns a socket."""

    async def close(self) -> None:
        """Close the connection to the helper."""


@contextlib.contextmanager
def address_of(path: Path) -> Iterator[str]:
    """Yield an address to connect to a Unix socket, valid inside the block; raise OSError if the path is not a socket.

    The last part of the path is not followed if it is a link: root connects to sockets in a directory of the service
    user, who could have root talk to another process.
    """
    found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(found).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), str(path))
        yield f"/proc/self/fd/{found}"
    finally:
        os.close(found)


class PrivilegedClient:
    """Sends verbs to a helper over its Unix socket, one at a time; connects when needed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: socket.socket | None = None
        self._lock = asyncio.Lock()

    async def call(self, verb: v.Verb) -> v.Reply:
        """Carry out a verb."""
        answer, passed = await self._send(verb)
        if passed is not None:
            passed.close()
        return answer

    async def open(self, verb: v.Verb) -> socket.socket:
        """Carry out a verb that returns a socket."""
        _, passed = await self._send(verb)
        if passed is None:
            raise PrivilegedError("The privileged helper did not return a socket.")
        return passed

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _send(self, verb: v.Verb) -> tuple[v.Reply, socket.socket | None]:
        request = wire.frame(verb)
        if len(request) > wire.HEADER.size + wire.LIMIT:  # the helper would close the connection without an answer
            raise PrivilegedError(f"{type(verb).__name__}: {len(request)} bytes are more than the helper accepts.")
        async with self._lock:
            for attempt in (1, 2):
                try:
                    connection = self._connection or await self._connect()
                    answer, passed = await self._exchange(connection, request)
                    break
                except (OSError, EOFError) as error:  # the helper was restarted; a verb may be repeated
                    await self.close()
                    if attempt == 2:
                        raise Unavailable(f"The privileged helper at {self._path} does not answer: {error}.") from error
                except BaseException:  # cancelled: the rest of this reply must not be read as the next one
                    await self.close()
                    raise
        if answer.error:
            if passed is not None:
                passed.close()
            raise PrivilegedError(f"{type(verb).__name__}: {answer.error}")
        return answer, passed

    async def _connect(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.setblocking(False)
        try:
            with address_of(self._path) as address:
                await asyncio.get_running_loop().sock_connect(made, address)
        except BaseException:
            made.close()
            raise
        self._connection = made
        return made

    async def _exchange(self, connection: socket.socket, request: bytes) -> tuple[v.Reply, socket.socket | None]:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, request)
        received = bytearray()
        descriptors: list[int] = []
        length = -1
        while length < 0 or len(received) < wire.HEADER.size + length:
            await _readable(connection)
            try:
                data, passed, _, _ = socket.recv_fds(connection, 1 << 16, 1)
            except BlockingIOError:
                continue
            descriptors += passed
            if not data:
                raise EOFError("it closed the connection")
            received += data
            if length < 0 and len(received) >= wire.HEADER.size:
                [length] = wire.HEADER.unpack_from(received)
        answer = wire.reply(bytes(received[wire.HEADER.size :]))
        return answer, socket.socket(fileno=descriptors[0]) if descriptors else None


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, _done, future)
    try:
        await future
    finally:
        loop.remove_reader(connection)


def _done(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def runtime_directory(prefix: str) -> Path:
    """Return the directory for the files of a cloud's DHCP servers, which their user must be able to read."""
    return Path("/run/micronova") / prefix


def sockets_directory(prefix: str) -> Path:
    """Return root's directory for the sockets by which the processes of a cloud on this machine talk to each other."""
    return Path("/run/micronova") / f"{prefix}.sockets"


def helper_socket(prefix: str) -> Path:
    """Return the socket that the privileged helper of a cloud listens on."""
    return sockets_directory(prefix) / "privileged"


def make_sockets_directory(prefix: str) -> Path:
    """Make it: everybody may pass through it, and root alone decides what is in it."""
    directory = sockets_directory(prefix)
    for each in (directory.parent, directory):
        each.mkdir(exist_ok=True)
        each.chmod(0o711)  # whatever the umask is
    return directory


def remove_sockets_directory(prefix: str) -> None:
    """Remove it with what is in it."""
    shutil.rmtree(sockets_directory(prefix), ignore_errors=True)


class HelperProcess:
    """A helper that this process starts while it is root; it ends with this process. Methods block."""

    def __init__(
        self, prefix: str, path: Path, *, uid: int = 0, directory: Path | None = None, guests: Path | None = None
    ) -> None:
        """`guests` is the directory of the guests' disks, if a libvirt of the machine creates their taps."""
        self.prefix = prefix
        self.path = path
        self._uid = uid
        self._directory = directory or runtime_directory(prefix)
        self._guests = guests
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the helper and wait until it listens."""
        if os.geteuid() != 0:
            raise PrivilegedError("Networks for guests need root: start as root, or without a network agent.")
        self._process = subprocess.Popen(
            self._command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
            umask=_UMASK,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise PrivilegedError(f"The privileged helper did not start (it ended with {self._process.wait()}).")

    def running(self) -> bool:
        """Return whether the helper runs."""
        return self._process is not None and self._process.poll() is None

    def detach(self) -> None:
        """Forget the helper in a child process: it ends with the process that started it."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
            process.returncode = 0  # it is not a child of this process

    def do(self, verb: v.Verb) -> v.Reply:
        """Carry out one verb; for callers without a running event loop."""

        async def ask() -> v.Reply:
            client = PrivilegedClient(self.path)
            try:
                return await client.call(verb)
            finally:
                await client.close()

        return asyncio.run(ask())

    def stop(self, *, cleanup: bool = False) -> None:
        """End the helper; with `cleanup`, delete everything that it made for the cloud."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.stdout.close()
            try:
                process.wait(_READY_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if cleanup:
            subprocess.run([*self._command(), "--cleanup"], stdin=subprocess.DEVNULL, cwd="/", check=True, umask=_UMASK)

    def _command(self) -> list[str]:
        return [
            sys.executable, "-P", "-m", "micronova.privileged.helper",  # -P: without the current directory in its path
            "--prefix", self.prefix, "--socket", str(self.path), "--directory", str(self._directory),
            "--uid", str(self._uid), *(["--guests", str(self._guests)] if self._guests is not None else []),
        ]  # fmt: skip
