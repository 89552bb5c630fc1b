"""The client of the privileged helper, and how the helper is started."""

import asyncio
import contextlib
import errno
import logging
import os
import select
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from micronova.objects.errors import MicronovaError, Unavailable
from micronova.privileged import verbs as v
from micronova.privileged import wire

log = logging.getLogger(__name__)

ANSWER_SECONDS = 120.0
"""Seconds until the helper answers a verb, which runs a few programs, each for at most 30 s."""
HUNG_SECONDS = 120.0
"""Seconds without an answer after which the helper counts as hung."""
PROBE_INTERVAL = 30.0
"""Seconds after an answer until the helper is asked again whether it hangs."""
CLEANUP_SECONDS = 600.0
_READY_TIMEOUT = 30.0
_KILL_TIMEOUT = 10.0
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
                    async with asyncio.timeout(ANSWER_SECONDS):
                        connection = self._connection or await self._connect()
                        answer, passed = await self._exchange(connection, request)
                    break
                except TimeoutError as error:
                    await self.close()
                    raise Unavailable(
                        f"The privileged helper at {self._path} did not answer {type(verb).__name__} within "
                        f"{ANSWER_SECONDS:g} s. Root's process replaces a helper that hangs."
                    ) from error
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


def listens(path: Path) -> bool:
    """Return whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.setblocking(False)  # it would wait for a place in the queue of connections
        try:
            with address_of(path) as address:
                made.connect(address)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


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
        self._probe: socket.socket | None = None  # has asked the helper, and waits for the answer
        self._probe_at = 0.0  # when to ask next
        self._silent_since: float | None = None  # since when answers are missing

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
        stdout = self._process.stdout.fileno()
        if not select.select([stdout], [], [], _READY_TIMEOUT)[0]:
            self.kill()
            raise PrivilegedError(f"The privileged helper did not start within {_READY_TIMEOUT:g} s.")
        if not os.read(stdout, 100):
            raise PrivilegedError(f"The privileged helper did not start (it ended with {self._process.wait()}).")
        self._probe_at = time.monotonic() + PROBE_INTERVAL

    def running(self) -> bool:
        """Return whether the helper runs."""
        return self._process is not None and self._process.poll() is None

    def hangs(self) -> bool:
        """Ask the helper, and return whether it has not answered for HUNG_SECONDS; call it again and again.

        The answer is not waited for. Who asks waits for the verb that is carried out, so a verb that does not end
        counts as well.
        """
        now = time.monotonic()
        if self._probe is None and now < self._probe_at:
            return False
        if self._silent_since is None:
            self._silent_since = now
        try:
            if self._probe is None:
                self._probe = self._ask()
            answered = bool(self._probe.recv(1 << 10))
        except BlockingIOError:  # no answer yet, or the queue of connections is full
            return now - self._silent_since > HUNG_SECONDS
        except OSError:
            answered = False
        self._forget_probe()
        if answered:
            self._silent_since = None
            self._probe_at = now + PROBE_INTERVAL
            return False
        return now - self._silent_since > HUNG_SECONDS

    def _ask(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.setblocking(False)
        try:
            with address_of(self.path) as address:
                made.connect(address)
            made.sendall(wire.frame(v.Ping()))
        except BaseException:
            made.close()
            raise
        return made

    def _forget_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def kill(self) -> None:
        """End the helper at once. What it made stays."""
        process, self._process = self._process, None
        self._forget_probe()
        self._silent_since = None
        if process is not None:
            self._end(process, wait=0.0)

    def _end(self, process: "subprocess.Popen[bytes]", wait: float) -> None:
        """End the helper by closing its standard input; kill it if that takes longer than `wait` seconds."""
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            process.kill()
            try:
                process.wait(_KILL_TIMEOUT)
            except subprocess.TimeoutExpired:  # it ends as soon as the kernel lets go of it, and does nothing before
                log.error("the privileged helper (process %d) does not end", process.pid)

    def detach(self) -> None:
        """Forget the helper in a child process: it ends with the process that started it."""
        process, self._process = self._process, None
        self._forget_probe()
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
        self._forget_probe()
        if process is not None:
            self._end(process, wait=_READY_TIMEOUT)
        if cleanup:
            self._clean_up()

    def _clean_up(self) -> None:
        command = [*self._command(), "--cleanup"]
        try:
            subprocess.run(
                command, stdin=subprocess.DEVNULL, cwd="/", check=True, umask=_UMASK, timeout=CLEANUP_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise PrivilegedError(
                f"The cloud's namespaces and servers were not deleted within {CLEANUP_SECONDS:g} s: "
                "run `micronova down` again."
            ) from None
        except subprocess.CalledProcessError as error:
            raise PrivilegedError(
                f"The cloud's namespaces and servers were not all deleted (exit code {error.returncode}); the lines "
                "above say why. Run `micronova down` again."
            ) from None

    def _command(self) -> list[str]:
        return [
            sys.executable, "-P", "-m", "micronova.privileged.helper",  # -P: without the current directory in its path
            "--prefix", self.prefix, "--socket", str(self.path), "--directory", str(self._directory),
            "--uid", str(self._uid), *(["--guests", str(self._guests)] if self._guests is not None else []),
        ]  # fmt: skip
