"""The client of the privileged helper, and how the helper is started."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from micronova.objects.errors import MicronovaError, Unavailable
from micronova.privileged import verbs as v
from micronova.privileged import wire

_READY_TIMEOUT = 30.0


class PrivilegedError(MicronovaError):
    """The helper refused, or the kernel did."""

    code = "privileged"


class Privileged(Protocol):
    """What does verbs."""

    async def call(self, verb: v.Verb) -> v.Reply:
        """Do a verb; raise PrivilegedError."""

    async def open(self, verb: v.Verb) -> socket.socket:
        """Do a verb whose answer is a socket."""

    async def close(self) -> None:
        """Let go of the helper."""


class PrivilegedClient:
    """Asks a helper over its Unix socket, one verb at a time; connects when it must."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: socket.socket | None = None
        self._lock = asyncio.Lock()

    async def call(self, verb: v.Verb) -> v.Reply:
        """Do a verb."""
        answer, passed = await self._ask(verb)
        if passed is not None:
            passed.close()
        return answer

    async def open(self, verb: v.Verb) -> socket.socket:
        """Do a verb whose answer is a socket."""
        _, passed = await self._ask(verb)
        if passed is None:
            raise PrivilegedError("The privileged helper did not hand over a socket.")
        return passed

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _ask(self, verb: v.Verb) -> tuple[v.Reply, socket.socket | None]:
        async with self._lock:
            for attempt in (1, 2):
                try:
                    connection = self._connection or await self._connect()
                    answer, passed = await self._exchange(connection, wire.frame(verb))
                    break
                except (OSError, EOFError) as error:  # a helper that was started again: verbs may be repeated
                    await self.close()
                    if attempt == 2:
                        raise Unavailable(f"The privileged helper at {self._path} does not answer: {error}.") from error
                except BaseException:  # cancelled half-way: the rest of the answer must not be taken for another's
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
            await asyncio.get_running_loop().sock_connect(made, str(self._path))
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
    """Return where the helper of a cloud keeps the files of its DHCP servers: they must be able to read there."""
    return Path("/run/micronova") / prefix


class HelperProcess:
    """A helper that this process started, while it was root; it ends with this process. Methods block."""

    def __init__(
        self, prefix: str, path: Path, *, uid: int = 0, directory: Path | None = None, guests: Path | None = None
    ) -> None:
        """`guests` is where guests' disks are, if their taps are to be taken in from outside."""
        self.prefix = prefix
        self.path = path
        self._uid = uid
        self._directory = directory or runtime_directory(prefix)
        self._guests = guests
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it listens."""
        if os.geteuid() != 0:
            raise PrivilegedError("Networks for guests are made by root: start as root, or without a network agent.")
        self._process = subprocess.Popen(
            self._command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", start_new_session=True
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise PrivilegedError(f"The privileged helper did not start (it ended with {self._process.wait()}).")

    def running(self) -> bool:
        """Say whether it lives."""
        return self._process is not None and self._process.poll() is None

    def detach(self) -> None:
        """Let go of it in a child of the process that started it: it is to end with its parent alone."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
            process.returncode = 0  # not ours to wait for

    def do(self, verb: v.Verb) -> v.Reply:
        """Do one verb, without a loop that runs."""

        async def ask() -> v.Reply:
            client = PrivilegedClient(self.path)
            try:
                return await client.call(verb)
            finally:
                await client.close()

        return asyncio.run(ask())

    def stop(self, *, cleanup: bool = False) -> None:
        """End it; with `cleanup`, take away all that there is of the cloud."""
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
            subprocess.run([*self._command(), "--cleanup"], stdin=subprocess.DEVNULL, cwd="/", check=True)

    def _command(self) -> list[str]:
        return [
            sys.executable, "-m", "micronova.privileged.helper", "--prefix", self.prefix, "--socket", str(self.path),
            "--directory", str(self._directory), "--uid", str(self._uid),
            *(["--guests", str(self._guests)] if self._guests is not None else []),
        ]  # fmt: skip
