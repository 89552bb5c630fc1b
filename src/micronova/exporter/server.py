"""The exporter: serves volumes to the guests of this machine, each by a storage daemon of its own.

    volume service ──▶ Serve, StopServing, Resize, Copy    agent ──▶ Allow, Refuse
                              │                                     │
                         ┌────▼─────────────────────────────────────▼────┐
                         │ exporter: VOLUME/nbd, VOLUME/qmp              │──▶ one qemu-storage-daemon per volume
                         └───────────────────────────────────────────────┘

The exporter opens no file of a volume. The service gives it descriptors, which a daemon opens again; the service lets
the exporter's user do that by an access control list. The socket of a volume can be connected to by the users of those
guests that the agent has named, by an access control list too.

A daemon that ends is started again at once. The exporter keeps its socket, so guests that connect meanwhile wait. The
daemons outlive an exporter that is killed, and the next one takes them over; the service then gives it the descriptors
again. When the exporter is told to stop, it ends them all.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import stat
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from micronova.exporter import daemon as daemons
from micronova.exporter import luks, wire
from micronova.exporter import messages as m
from micronova.exporter.access import SetAccess
from micronova.exporter.daemon import Daemon, Failed, Full, NotAvailable
from micronova.objects.background import keep_running
from micronova.objects.clock import SystemClock
from micronova.objects.ids import UUID

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0  # seconds before a daemon that ends again and again is started again
REQUEST_SECONDS: Final = 30.0  # that a connection may take to ask
STEADY: Final = 60.0  # seconds after which a daemon that ends was no failed start
MONITOR: Final = "qmp"
_PASSABLE, _CLOSED = 0o711, 0o600

_service = msgspec.msgpack.Decoder(m.FromService)
_agent = msgspec.msgpack.Decoder(m.FromAgent)


class Refused(Exception):
    """The request is wrong."""


class Missing(Exception):
    """There is no such export."""


@dataclass(frozen=True, kw_only=True)
class ExporterSetup:
    """What an exporter is given: the programs and directories that it uses, and who may ask it what."""

    prefix: str  # of the cloud
    directory: Path  # of the sockets
    sandbox: Sequence[str]  # the command that confines a program
    program: str  # qemu-storage-daemon
    set_access: SetAccess
    users_of: Callable[[Path], set[int]]  # who has rights of their own to a file
    connect_right: int  # of `set_access`: to connect to a socket
    guest_users: range
    service_user: int
    agent_user: int


class _Asker(NamedTuple):
    """Who asks on a socket."""

    name: str
    user: int
    decoder: "msgspec.msgpack.Decoder[Any]"  # of what it may ask for


@dataclass
class Volume:
    """A volume that is served, or copied."""

    id: str
    file_fd: int = -1  # of the volume's file; -1 if an earlier exporter had it
    copies_fd: int = -1  # of the directory that has the files of copies
    readonly: bool = False
    wanted: bool = False  # until it is told to end
    copies: int = 0
    daemon: Daemon | None = None
    watcher: "asyncio.Task[None] | None" = None
    socket: "socket.socket | None" = None  # that its daemon listens on
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def close(self) -> None:
        """Close its descriptors."""
        wire.close([each for each in (self.file_fd, self.copies_fd) if each >= 0])
        self.file_fd = self.copies_fd = -1
        if self.socket is not None:
            self.socket.close()
            self.socket = None


class Exporter:
    """Serves volumes."""

    def __init__(self, setup: ExporterSetup) -> None:
        self._setup = setup
        self._volumes: dict[str, Volume] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, service: socket.socket, agent: socket.socket) -> None:
        """Take over the daemons that an earlier exporter has left, and answer on both sockets."""
        for volume_id, found in daemons.find(self._setup.prefix, os.geteuid()):
            await self._adopt(volume_id, found)
        for listening, asker in (
            (service, _Asker("the volume service", self._setup.service_user, _service)),
            (agent, _Asker("the agent", self._setup.agent_user, _agent)),
        ):
            work = partial(self._accept, listening, asker)
            self._keep(keep_running(work, name="exporter-accept", clock=SystemClock()))

    async def stop(self) -> None:
        """End all daemons and remove all sockets."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(self._drop(volume) for volume in list(self._volumes.values())))
        for name in os.listdir(self._setup.directory):
            shutil.rmtree(self._setup.directory / name, ignore_errors=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        return self._keep(asyncio.get_running_loop().create_task(work))

    def _keep(self, task: "asyncio.Task[None]") -> "asyncio.Task[None]":
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- requests --------------------------------------------------------------------------------------------

    async def _accept(self, listening: socket.socket, asker: _Asker) -> None:
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        while True:
            connection, _ = await loop.sock_accept(listening)
            if wire.peer(connection) in (asker.user, 0):
                self._spawn(self._converse(connection, asker))
            else:
                log.warning("a connection of user %d was refused", wire.peer(connection))
                connection.close()

    async def _converse(self, connection: socket.socket, asker: _Asker) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                packet, descriptors = await wire.receive(connection)
            if packet:
                reply = await self._answer(connection, packet, descriptors, asker)
                await wire.send(connection, msgspec.msgpack.encode(reply))
        except OSError:
            pass  # who asked has gone, or has asked nothing in time
        finally:
            connection.close()

    async def _answer(self, connection: socket.socket, packet: bytes, descriptors: list[int], asker: _Asker) -> m.Reply:
        request: m.Request | None = None
        try:
            request = asker.decoder.decode(packet)
            _check(request)
            return await self._carry_out(connection, request, descriptors) or m.Reply()
        except (Refused, msgspec.MsgspecError, Failed) as error:
            reply = m.Reply(error=str(error), kind="failed")
        except Missing as error:
            reply = m.Reply(error=str(error), kind="missing")
        except Full as error:
            reply = m.Reply(error=str(error), kind="full")
        except (NotAvailable, OSError) as error:
            reply = m.Reply(error=str(error), kind="unavailable")
        finally:
            wire.close(descriptors)
        log.warning(
            "the request %s of %s for volume %s failed: %s",
            "of an unknown kind" if request is None else type(request).__name__,
            asker.name,
            getattr(request, "volume_id", None) or "-",
            reply.error,
        )
        return reply

    async def _carry_out(
        self, connection: socket.socket, request: m.Request | None, descriptors: list[int]
    ) -> m.Reply | None:
        match request:
            case m.Serve():
                await self._serve(request, descriptors)
            case m.StopServing():
                await self._stop_serving(request.volume_id)
            case m.Served():
                return m.Reply(volumes=tuple(sorted({*self._volumes, *self._with_sockets()})))
            case m.Resize():
                await self._resize(request)
            case m.Copy():
                await self._copy(connection, request, descriptors)
            case m.Watch():
                await _leaves(connection)
            case m.Allow():
                self._allow(request)
            case m.Refuse():
                self._refuse(request)
        return None

    def _with_sockets(self) -> list[str]:
        """Return the ids of all volumes that have a directory of sockets, including those of an earlier exporter."""
        return [name for name in os.listdir(self._setup.directory) if UUID.fullmatch(name)]

    async def _serve(self, request: m.Serve, descriptors: list[int]) -> None:
        _check_files(descriptors)
        async with self._held(request.volume_id) as volume:
            volume.wanted = True
            await self._serve_file(volume, descriptors, readonly=request.readonly)

    @contextlib.asynccontextmanager
    async def _held(self, volume_id: str) -> AsyncIterator[Volume]:
        """Have the lock of a volume, which is a new one if what had the lock before has dropped it."""
        while True:
            volume = self._volumes.setdefault(volume_id, Volume(volume_id))
            async with volume.lock:
                if self._volumes.get(volume_id) is volume:
                    yield volume
                    return

    async def _stop_serving(self, volume_id: str) -> None:
        async with self._held(volume_id) as volume:
            volume.wanted = False
            if not volume.copies:
                await self._drop(volume)
            else:  # a copy goes on; nobody else may use the volume any more
                self._close_socket(volume.id)
                if volume.daemon is not None:
                    with contextlib.suppress(NotAvailable):  # then it has none
                        await volume.daemon.disconnect_clients()

    async def _resize(self, request: m.Resize) -> None:
        volume = self._volumes.get(request.volume_id)
        if volume is None:
            return
        async with volume.lock:  # a daemon that is being started may have seen the old size
            if volume.daemon is None:
                return
            if volume.file_fd < 0:
                raise NotAvailable("the volume service has not passed its file to this exporter yet")
            if volume.readonly:  # QEMU resizes no node that it may not write
                await self._stop_daemon(volume)
                await self._start_daemon(volume)
            else:
                await volume.daemon.resize(volume.id, request.size)

    async def _copy(self, connection: socket.socket, request: m.Copy, descriptors: list[int]) -> None:
        _check_files(descriptors)
        async with self._held(request.volume_id) as volume:
            volume.copies += 1
            try:
                await self._serve_file(volume, descriptors, readonly=volume.readonly)
            except BaseException:
                await self._copied(volume)
                raise
            found = volume.daemon
        assert found is not None

        def report(done: int) -> None:
            connection.send(msgspec.msgpack.encode(m.Reply(done=done, final=False)))

        copying = asyncio.ensure_future(found.copy(request.name, report))
        leaving = asyncio.ensure_future(_leaves(connection))
        try:
            await asyncio.wait({copying, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not copying.done():
                log.info("the copy of volume %s is cancelled: nobody waits for it", volume.id)
                copying.cancel()
            await copying
        except asyncio.CancelledError:
            raise NotAvailable("the copy was cancelled") from None
        finally:
            copying.cancel()
            leaving.cancel()
            await asyncio.wait({copying, leaving})
            async with volume.lock:
                await self._copied(volume)

    async def _copied(self, volume: Volume) -> None:
        volume.copies -= 1
        if not volume.copies and not volume.wanted:
            await self._drop(volume)

    def _allow(self, request: m.Allow) -> None:
        if request.uid not in self._setup.guest_users:
            raise Refused(f"{request.uid} is not the user of a guest.")
        path = self._path(request.volume_id, m.SOCKET)
        volume = self._volumes.get(request.volume_id)
        if volume is None or not volume.wanted or not path.exists():
            raise Missing(f"Volume {request.volume_id} is not served.")
        if request.encrypted:
            _check_header(volume)
        self._set_users(path, self._setup.users_of(path) | {request.uid})

    def _refuse(self, request: m.Refuse) -> None:
        for volume_id in [request.volume_id] if request.volume_id is not None else self._with_sockets():
            path = self._path(volume_id, m.SOCKET)
            if path.exists() and request.uid in (users := self._setup.users_of(path)):
                self._set_users(path, users - {request.uid})

    def _set_users(self, path: Path, users: set[int]) -> None:
        self._setup.set_access(path, _CLOSED, dict.fromkeys(users, self._setup.connect_right))

    # --- daemons ---------------------------------------------------------------------------------------------

    def _path(self, volume_id: str, name: str) -> Path:
        return self._setup.directory / volume_id / name

    async def _adopt(self, volume_id: str, found: Daemon) -> None:
        """Take over a daemon of an earlier exporter; end one that does not work."""
        volume = Volume(volume_id, wanted=True, daemon=found)
        try:
            await found.connect(str(self._path(volume_id, MONITOR)))
            await found.end_jobs()
            if volume_id in self._volumes or not await found.is_serving():
                raise NotAvailable("it serves nothing")
        except (NotAvailable, Failed) as error:
            log.warning("the storage daemon of volume %s is ended: %s", volume_id, error)
            await found.stop()
            return
        self._volumes[volume_id] = volume
        volume.watcher = self._spawn(self._watch(volume, found))
        log.info("the storage daemon of volume %s, process %d, is taken over", volume_id, found.pid)

    async def _serve_file(self, volume: Volume, descriptors: list[int], *, readonly: bool) -> None:
        """Have a daemon serve a file; the caller has the volume's lock.

        It empties `descriptors` if it keeps them; otherwise the caller closes them.
        """
        fits = volume.daemon is not None and not volume.daemon.ended()
        fits = fits and volume.daemon is not None and volume.daemon.serves(descriptors[0])
        if not fits or volume.readonly != readonly or volume.file_fd < 0:
            wire.close([each for each in (volume.file_fd, volume.copies_fd) if each >= 0])
            volume.file_fd, volume.copies_fd = descriptors
            descriptors.clear()
        if fits and volume.readonly == readonly:
            assert volume.daemon is not None
            await volume.daemon.export(volume.id, readonly=readonly)
            return
        volume.readonly = readonly
        await self._stop_daemon(volume)
        await self._start_daemon(volume)

    async def _start_daemon(self, volume: Volume) -> None:
        monitor = self._listen(volume)
        assert volume.socket is not None
        made = daemons.start(
            self._setup.sandbox,
            self._setup.program,
            self._setup.prefix,
            volume.id,
            readonly=volume.readonly,
            file_fd=volume.file_fd,
            copies_fd=volume.copies_fd,
            nbd=volume.socket,
            monitor=monitor,
        )
        monitor.close()
        try:
            await made.connect(str(self._path(volume.id, MONITOR)))
        except BaseException:
            await made.stop()
            raise
        volume.daemon = made
        volume.watcher = self._spawn(self._watch(volume, made))

    def _listen(self, volume: Volume) -> socket.socket:
        """Make the socket of a volume, if there is none, and one of its monitor, which is returned.

        Who could connect to the socket before, can connect to the new one. The monitor's socket is always new: the
        queue of the old one has connections of exporters that have ended.
        """
        directory = self._setup.directory / volume.id
        directory.mkdir(exist_ok=True)
        directory.chmod(_PASSABLE)
        path = directory / m.SOCKET
        if volume.socket is None:
            users = self._setup.users_of(path) if path.exists() else set()
            volume.socket = _bound(path, lambda fresh: self._set_users(fresh, users))
        return _bound(directory / MONITOR, lambda fresh: fresh.chmod(_CLOSED))

    def _close_socket(self, volume_id: str) -> None:
        path = self._path(volume_id, m.SOCKET)
        if path.exists():
            self._set_users(path, set())

    async def _watch(self, volume: Volume, watched: Daemon) -> None:
        """Start a daemon again when it ends."""
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE
        while True:
            started = loop.time()
            how = await watched.wait()
            await watched.lose()
            log.warning("the storage daemon of volume %s ended (%s) and is started again", volume.id, how)
            if volume.file_fd < 0:
                log.warning("volume %s is served again when the volume service asks for it", volume.id)
                volume.daemon = None
                return
            while True:
                try:
                    async with volume.lock:
                        if volume.daemon is not watched:
                            return  # another request was faster
                        await self._start_daemon(volume)
                        return  # which has a watcher of its own
                except (NotAvailable, Failed, OSError) as error:
                    log.error("cannot serve volume %s; the next attempt is in %g s: %s", volume.id, pause, error)
                await asyncio.sleep(pause)
                pause = FIRST_PAUSE if loop.time() - started > STEADY else min(2 * pause, LONGEST_PAUSE)

    async def _stop_daemon(self, volume: Volume) -> None:
        if volume.watcher is not None:
            volume.watcher.cancel()
            await asyncio.wait({volume.watcher})
            volume.watcher = None
        if volume.daemon is not None:
            found, volume.daemon = volume.daemon, None
            await found.stop()

    async def _drop(self, volume: Volume) -> None:
        """End the daemon of a volume and remove its sockets; the caller has the volume's lock."""
        await self._stop_daemon(volume)
        volume.close()
        shutil.rmtree(self._setup.directory / volume.id, ignore_errors=True)
        self._volumes.pop(volume.id, None)  # last: who serves it again waits for the lock until here


def _bound(path: Path, restrict: Callable[[Path], None]) -> socket.socket:
    """Make a socket that listens in the place of an earlier one; `restrict` sets who may connect before anybody can."""
    fresh = path.with_name(f".{path.name}")
    fresh.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(fresh))
    restrict(fresh)
    made.listen(128)
    fresh.replace(path)
    return made


async def _leaves(connection: socket.socket) -> None:
    """Return when who asked closes the connection, or sends what it was not asked for."""
    _, descriptors = await wire.receive(connection)
    wire.close(descriptors)


def _check(request: m.Request | None) -> None:
    volume_id = getattr(request, "volume_id", None)
    if volume_id is not None and not UUID.fullmatch(volume_id):
        raise Refused("That is not the id of a volume.")
    if isinstance(request, m.Copy) and not m.FILE_NAME.fullmatch(request.name):
        raise Refused("That is not the name of a file of a copy.")


def _check_header(volume: Volume) -> None:
    """Raise Refused if QEMU would derive the key of an encrypted volume for hours."""
    if volume.file_fd < 0:
        raise NotAvailable("the volume service has not passed its file to this exporter yet")
    with open(f"/proc/self/fd/{volume.file_fd}", "rb") as stream:
        found = luks.rounds(stream.read(luks.HEADER))
    if found > luks.MOST_ROUNDS:
        raise Refused(
            f"The header of volume {volume.id} was changed: it asks for {found} rounds to derive the key. Restore the "
            "volume from a backup or a snapshot."
        )


def _check_files(descriptors: Sequence[int]) -> None:
    kinds = [stat.S_IFMT(os.fstat(each).st_mode) for each in descriptors]
    if kinds != [stat.S_IFREG, stat.S_IFDIR]:
        raise Refused("The request needs the descriptors of a file and of a directory.")
