"""One storage daemon: a confined `qemu-storage-daemon` that serves the file of one volume by NBD.

It gets everything by descriptors: the file, a directory that has the files of copies, and two sockets that listen
already, one for NBD and one for its monitor. The sandbox lets it open nothing else, make no socket and no process, and
signal nobody. So it does not matter that the daemons of all volumes have one user.

A daemon outlives the exporter, so that guests go on. The next exporter finds it by its command line, which has the
cloud's prefix, the volume's id and the number of the directory's descriptor.
"""

import asyncio
import contextlib
import os
import re
import resource
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from micronova.exporter import wire
from micronova.exporter.qmp import QMP, QMPClosed, QMPError
from micronova.objects.ids import UUID

NODE: Final = "volume"
EXPORT: Final = "nbd"
START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 10.0
MOST_CONNECTIONS: Final = 64
"""To one volume at once: each guest that has it attached needs one, and a second one while it is copied."""
MEMORY: Final = 4 << 30  # bytes of address space: each of 64 threads reserves some, and a request has up to 32 MiB
DESCRIPTORS: Final = 256
KEPT_MEMORY: Final = 32 << 20
"""Bytes that a daemon keeps for its next requests: as many as a connection has under way, 16 of 1 MiB, for two guests.

It has a buffer for each request. The C library gives buffers of 128 KiB and more back after each request otherwise,
and a request of 1 MiB costs 257 page faults, which take longer than all the rest.
"""
PROGRESS_SECONDS: Final = 1.0
_MARK: Final = re.compile(
    rb"socket,id=(?P<prefix>mn-[0-9a-f]{8})\.(?P<volume>" + UUID.pattern.encode() + rb")\.(?P<copies>\d+),fd="
)


class NotAvailable(Exception):
    """The daemon has ended, or cannot serve the request now; the volume service asks again."""


class Full(Exception):
    """The file system of a copy is full."""


class Failed(Exception):
    """The daemon refused, and would refuse again."""


class Daemon:
    """A daemon that runs."""

    def __init__(self, pid: int, handle: int, copies_fd: int, child: "subprocess.Popen[bytes] | None") -> None:
        """`handle` is a descriptor of the process, `copies_fd` the number of the directory's descriptor in it."""
        self.pid = pid
        self._handle = handle
        self._copies_fd = copies_fd
        self._child = child
        self._qmp: QMP | None = None
        self._copies = 0
        self._exporting = asyncio.Lock()

    def ended(self) -> bool:
        """Return whether it has ended."""
        if self._handle < 0:
            return True
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(0))

    async def wait(self) -> str:
        """Wait for its end; return how it ended, if that can be known."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._handle, wire.done, future)
        try:
            await future
        finally:
            loop.remove_reader(self._handle)
        if self._child is None:
            return "it was started by an earlier process"
        code = self._child.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def serves(self, file: int) -> bool:
        """Return whether it has this file open, and not one that had its name before."""
        wanted = os.fstat(file)
        for number in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found = number.stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return True
        return False

    async def connect(self, path: str) -> None:
        """Connect to its monitor; raise NotAvailable if it ends before."""
        waiting = asyncio.ensure_future(QMP.connect(path))
        ending = asyncio.ensure_future(self.wait())
        try:
            done, _ = await asyncio.wait({waiting, ending}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if waiting not in done:
                raise NotAvailable(ending.result() if ending in done else "it does not answer")
            self._qmp = waiting.result()
        except QMPClosed as error:
            raise NotAvailable(str(error)) from error
        finally:
            for task in (waiting, ending):
                task.cancel()
            await asyncio.wait({waiting, ending})

    async def is_serving(self) -> bool:
        """Return whether it serves its file; one that was started by a process that was killed may not."""
        return bool(await self._do("query-block-exports"))

    async def end_jobs(self) -> None:
        """End the copies that an earlier exporter had begun, and forget their files."""
        for job in await self._do("query-block-jobs"):
            await self._end_job(job["device"])
        for node in await self._do("query-named-block-nodes"):
            if node["node-name"].startswith("copy-"):
                await self._do("blockdev-del", node_name=node["node-name"])

    async def resize(self, name: str, size: int) -> None:
        """Serve the file of a volume that is not read-only, which has become larger, with its new size.

        Those who are connected connect again.
        """
        async with self._exporting:
            [node] = [each for each in await self._do("query-named-block-nodes") if each["node-name"] == NODE]
            if node["image"]["virtual-size"] >= size and await self.is_serving():
                return
            await self._end_export()
            try:
                await self._do("block_resize", node_name=NODE, size=size)
            finally:
                await self._export(name, readonly=False)

    async def disconnect_clients(self) -> None:
        """End all connections, and take no more until `export` is called; a copy goes on."""
        async with self._exporting:
            await self._end_export()

    async def export(self, name: str, *, readonly: bool) -> None:
        """Serve the file, unless it does."""
        async with self._exporting:
            if not await self.is_serving():
                await self._export(name, readonly=readonly)

    async def copy(self, name: str, report: Callable[[int], None]) -> None:
        """Copy the file as it is at one moment to another of the same size, while it is read and written.

        Writes go to both files from the beginning, until both are equal: then the copy ends, so that moment is the
        end. A job of the kind "backup" would copy the moment of the beginning, but allocate what is a hole.
        """
        self._copies += 1
        node = f"copy-{self._copies}"
        await self._do(
            "blockdev-add",
            driver="file",
            node_name=node,
            filename=f"/proc/self/fd/{self._copies_fd}/{name}",
            discard="unmap",
            locking="off",
        )
        try:
            ready = self._monitor.event(lambda e: e["event"] == "BLOCK_JOB_READY" and e["data"]["device"] == node)
            ended = self._monitor.event(lambda e: e["event"] == "BLOCK_JOB_COMPLETED" and e["data"]["device"] == node)
            try:
                await self._do(
                    "blockdev-mirror",
                    job_id=node,
                    device=NODE,
                    target=node,
                    sync="full",
                    copy_mode="write-blocking",
                )
                while not (await asyncio.wait({ready, ended}, timeout=PROGRESS_SECONDS, return_when="FIRST_COMPLETED"))[
                    0
                ]:
                    for job in await self._do("query-block-jobs"):
                        if job["device"] == node:
                            report(job["offset"])
                if not ended.done():
                    await self._do("block-job-cancel", device=node)
                _check_job(await _answered(ended))
            except BaseException:
                if not ended.done():
                    with contextlib.suppress(NotAvailable, Failed):
                        await self._end_job(node)
                raise
            finally:
                ready.cancel()
                ended.cancel()
        finally:
            with contextlib.suppress(NotAvailable, Failed):
                await self._do("blockdev-del", node_name=node)

    async def stop(self) -> None:
        """End it: what it has written is in the file."""
        await self._disconnect()
        if self._handle < 0:
            return
        ending = asyncio.ensure_future(self.wait())
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)
            done, _ = await asyncio.wait({ending}, timeout=STOP_SECONDS)
            if done:
                break
        ending.cancel()
        await asyncio.wait({ending})
        self.forget()

    def kill(self) -> None:
        """End it at once. Blocks."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        poll.poll(STOP_SECONDS * 1000)
        self.forget()

    async def _disconnect(self) -> None:
        if self._qmp is not None:
            await self._qmp.close()
            self._qmp = None

    async def lose(self) -> None:
        """Give up what belongs to a daemon that has ended."""
        await self._disconnect()
        self.forget()

    def forget(self) -> None:
        """Close the descriptor of the process."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    @property
    def _monitor(self) -> QMP:
        if self._qmp is None:
            raise NotAvailable("it has ended")
        return self._qmp

    async def _do(self, command: str, **arguments: Any) -> Any:
        try:
            return await self._monitor.do(command, **arguments)
        except QMPClosed as error:
            raise NotAvailable(str(error)) from error
        except QMPError as error:
            raise Failed(str(error)) from error

    async def _export(self, name: str, *, readonly: bool) -> None:
        await self._do("block-export-add", type="nbd", id=EXPORT, node_name=NODE, name=name, writable=not readonly)

    async def _end_export(self) -> None:
        if not await self.is_serving():
            return
        gone = self._monitor.event(lambda event: event["event"] == "BLOCK_EXPORT_DELETED")
        try:
            await self._do("block-export-del", id=EXPORT, mode="hard")
            await _answered(gone)
        finally:
            gone.cancel()

    async def _end_job(self, job: str) -> None:
        ended = self._monitor.event(
            lambda e: e["event"] in ("BLOCK_JOB_COMPLETED", "BLOCK_JOB_CANCELLED") and e["data"]["device"] == job
        )
        try:
            await self._do("block-job-cancel", device=job, force=True)
            await _answered(ended)
        finally:
            ended.cancel()


async def _answered(event: "asyncio.Future[dict[str, Any]]") -> dict[str, Any]:
    try:
        return await event
    except QMPClosed as error:
        raise NotAvailable(str(error)) from error


def _check_job(event: dict[str, Any]) -> None:
    error = event["data"].get("error")
    if error == "No space left on device":
        raise Full(error)
    if error:
        raise Failed(error)


def start(
    command: Sequence[str],
    program: str,
    prefix: str,
    volume_id: str,
    *,
    readonly: bool,
    file_fd: int,
    copies_fd: int,
    nbd: socket.socket,
    monitor: socket.socket,
) -> Daemon:
    """Start a daemon; `command` runs a program that is confined to what is given to it."""
    passed = (file_fd, copies_fd, nbd.fileno(), monitor.fileno())
    label = f"{prefix}.{volume_id}.{copies_fd}"
    node = f"driver=file,node-name={NODE},filename=/proc/self/fd/{file_fd},discard=unmap,aio=threads,locking=on"
    export = f"type=nbd,id={EXPORT},node-name={NODE},name={volume_id}"

    def limit() -> None:
        for which, most in (
            (resource.RLIMIT_AS, MEMORY),
            (resource.RLIMIT_NOFILE, DESCRIPTORS),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(which, (most, most))

    process = subprocess.Popen(
        [
            *command,
            *("--write", f"/proc/self/fd/{file_fd}", "--write", f"/proc/self/fd/{copies_fd}", "--", program),
            *("--chardev", f"socket,id={label},fd={monitor.fileno()},server=on,wait=off"),
            *("--monitor", f"chardev={label}"),
            # All by the command line: who connects early must not find a server without the export.
            *("--blockdev", f"{node},cache.direct=off,read-only={'on' if readonly else 'off'}"),
            *("--nbd-server", f"addr.type=fd,addr.str={nbd.fileno()},max-connections={MOST_CONNECTIONS}"),
            *("--export", f"{export},writable={'off' if readonly else 'on'}"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={
            "PATH": os.defpath,
            "LC_ALL": "C.UTF-8",
            "MALLOC_ARENA_MAX": "2",
            "MALLOC_MMAP_THRESHOLD_": str(KEPT_MEMORY),
            "MALLOC_TRIM_THRESHOLD_": str(KEPT_MEMORY),
        },
        pass_fds=passed,
        preexec_fn=limit,  # this process has one thread
        start_new_session=True,
    )
    return Daemon(process.pid, os.pidfd_open(process.pid), copies_fd, process)


def find(prefix: str, uid: int | None = None) -> Iterator[tuple[str, Daemon]]:
    """Yield the daemons of a cloud, with the ids of their volumes: those of a user, or of any."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        handle = -1
        try:
            handle = os.pidfd_open(int(entry.name))  # before it is looked at: the number may become another's
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            mark = next((found for each in arguments if (found := _MARK.match(each))), None)
            if mark is None or mark["prefix"].decode() != prefix:
                continue
            if uid is None or entry.stat().st_uid == uid:
                yield mark["volume"].decode(), Daemon(int(entry.name), handle, int(mark["copies"]), None)
                handle = -1
        except OSError:
            continue  # it has ended
        finally:
            if handle >= 0:
                os.close(handle)
