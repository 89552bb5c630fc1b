"""Copying the root disks of guests into flat qcow2 files, and freezing guests while others copy their volumes.

A running or paused guest is copied by a backup job of QEMU: the copy has the content of the moment at which the job
begins, and the guest goes on meanwhile. Its file systems are frozen only for that moment. A guest at rest is copied by
qemu-img. The copy is in the guest's directory, so that it goes with the guest. What an interrupted agent has left there
is removed at the next start, its job is aborted, and the guest is thawed. If libvirtd goes away meanwhile, the same is
done when it is back, whether the copy is asked for again or not.

A guest that is frozen for snapshots of its volumes has an empty file in its directory until it is thawed, so that the
next start thaws it, too.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from micronova.imageformat import inspector
from micronova.objects import power_state
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import Clock
from micronova.objects.errors import Conflict, MicronovaError, NotSupported, Unavailable, resource_exhausted
from micronova.objects.guest_properties import TRUE_WORDS
from micronova.virt.driver import DriverFailed, GuestPlan
from micronova.virt.libvirt.client.binding import Domain
from micronova.virt.libvirt.client.library import has_code, load
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.client.xmltree import child, element, parse, unparse
from micronova.virt.libvirt.guests import agent
from micronova.virt.libvirt.guests.access import GuestAccess
from micronova.virt.libvirt.storage import acl, tools
from micronova.virt.libvirt.storage.layout import Layout, base_link_name
from micronova.virt.libvirt.storage.records import DiskRecord, GuestRecord, GuestRecords

log = logging.getLogger(__name__)

COPY: Final = "snapshot.qcow2"
"""The file in the guest's directory."""
FROZEN: Final = "frozen"
"""The file in the directory of a guest that is frozen for snapshots of its volumes."""
CHUNK: Final = 1024 * 1024
POLL_INTERVAL: Final = 0.5
AGENT_SECONDS: Final = 45
AGENT_TIMEOUT: Final = 60.0
"""Seconds that the agent in a guest has to freeze or thaw file systems, and after which libvirt counts as hung."""
CLEAR_PAUSE: Final = 5.0
"""Seconds after which it is tried again to remove what a failed copy has left."""
SPARE: Final = 64 * 1024**2
"""Bytes that a copy leaves free on the host's disk."""


class CopiedDisk:
    """A copy of a guest's root disk in a file."""

    disk_format = "qcow2"

    def __init__(self, path: Path, size: int, files: ThreadPool) -> None:
        self._path = path
        self._size = size
        self._files = files

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return self._size

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the file from its begin."""
        file = await self._files.run(os.open, self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for at in range(0, self._size, CHUNK):
                yield await self._files.run(os.pread, file, min(CHUNK, self._size - at), at)
        finally:
            os.close(file)

    async def close(self) -> None:
        """Remove the file."""
        await self._files.run(_remove, self._path)


class Snapshots:
    """Copies the root disks of the guests of one host."""

    def __init__(
        self, guests: GuestAccess, records: GuestRecords, layout: Layout, files: ThreadPool, clock: Clock
    ) -> None:
        self._guests = guests
        self._records = records
        self._layout = layout
        self._files = files
        self._clock = clock
        self._reserving = asyncio.Lock()
        self._reserved: dict[Path, int] = {}  # copies that are being made -> bytes that each may need
        self._left: set[str] = set()  # guests that a failed copy may have left frozen, or with a job
        self._clearing: asyncio.Task[None] | None = None
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def take(self, plan: GuestPlan) -> CopiedDisk:
        """Copy the root disk of a guest."""
        record, power = await self._guests.require(plan.instance.uuid)
        disk = _root(record)
        folder = self._layout.guest(record.uuid)
        target = folder / COPY
        async with self._lock(record.uuid):
            await self.clear(record.uuid)
            self._left.discard(record.uuid)
        # No claim covers copies. If several of them filled the disk together, the guests of the host would stop.
        async with self._reserving:
            size, needed = await self._files.run(_check_room, folder, disk, dict(self._reserved))
            self._reserved[target] = needed
        try:
            if power in (power_state.RUNNING, power_state.PAUSED):
                await self._copy_running(plan, record, disk, power)
            else:
                base = folder / base_link_name(disk.file) if disk.backing is not None else None
                largest = max(size, plan.instance.flavor.disk * tools.GIB)
                await tools.flatten(folder / disk.file, disk.format, base, target, largest)
            copied = await self._files.run(_check_copy, target)
        except BaseException as error:
            await self._clear_now_or_later(record.uuid)
            lack = resource_exhausted(error)
            if lack is not None:
                raise lack from error
            raise
        finally:
            del self._reserved[target]
        return CopiedDisk(target, copied, self._files)

    async def quiesce(self, uuid: str) -> None:
        """Freeze the file systems of a guest that runs; its agent has to be there."""
        _, power = await self._guests.require(uuid)
        if power != power_state.RUNNING:
            raise Conflict(f"The guest {uuid} does not run: its file systems cannot be frozen.")
        await self._files.run((self._layout.guest(uuid) / FROZEN).touch)
        await self._freeze_now(uuid)

    async def unquiesce(self, uuid: str) -> None:
        """Thaw the file systems of a guest that was frozen by `quiesce`; raise an error if its agent does not do it."""
        frozen = self._layout.guest(uuid) / FROZEN
        if await self._files.run(os.path.lexists, frozen):
            await self._guests.change_if_there(uuid, _thaw_now, "thaw the guest", timeout=AGENT_TIMEOUT, lane="freeze")
            await self._files.run(_remove, frozen)

    async def clear_all(self) -> None:
        """Remove what an earlier agent has left of copies of the disks of all guests, and thaw guests."""
        for record in await self._files.run(self._records.all):
            if self._guests.owns(record):
                await self._clear_now_or_later(record.uuid)

    async def close(self) -> None:
        """Stop; the next start removes what is left."""
        await end_tasks(self._clearing)

    async def _clear_now_or_later(self, uuid: str) -> None:
        try:
            await self.clear(uuid)
        except MicronovaError as error:
            log.warning(
                "the copy of the disk of guest %s could not be removed, or the guest not thawed; both are tried again "
                "in %g s: %s",
                uuid,
                CLEAR_PAUSE,
                error,
            )
            self._left.add(uuid)
            if self._clearing is None or self._clearing.done():
                self._clearing = keep_running(self._clear_left, name="libvirt-copies", clock=self._clock)

    async def _clear_left(self) -> None:
        while self._left:
            await self._clock.sleep(CLEAR_PAUSE)
            for uuid in sorted(self._left):
                async with self._lock(uuid):
                    if uuid not in self._left:  # a new copy is being made
                        continue
                    try:
                        await self.clear(uuid)
                    except MicronovaError as error:
                        log.warning("a copy of the disk of guest %s is still left: %s", uuid, error)
                        continue
                    self._left.discard(uuid)

    def _lock(self, uuid: str) -> asyncio.Lock:
        """Return the lock that is held while what is left of a guest's copy is removed."""
        return self._locks.setdefault(uuid, asyncio.Lock())

    async def clear(self, uuid: str) -> None:
        """Remove what an interrupted copy has left: its job, the frozen state of file systems, its file."""
        target, frozen = (self._layout.guest(uuid) / name for name in (COPY, FROZEN))
        copied, quiesced = [await self._files.run(os.path.lexists, path) for path in (target, frozen)]
        if copied:
            await self._guests.change_if_there(uuid, _abort, "abort the copy of the guest's disk")
        if copied or quiesced:
            await self._guests.change_if_there(uuid, _thaw, "thaw the guest", timeout=AGENT_TIMEOUT, lane="freeze")
            await self._files.run(_remove, target)
            await self._files.run(_remove, frozen)

    async def _copy_running(self, plan: GuestPlan, record: GuestRecord, disk: DiskRecord, power: int) -> None:
        uuid = record.uuid
        if record.uid is None:
            raise NotSupported("The disk of this guest cannot be copied while it runs: restart it once.")
        folder = self._layout.guest(uuid)
        source, target = self._layout.seen(folder / disk.file), folder / COPY
        device, capacity = await self._guests.read(
            uuid, lambda domain: _device(domain, source), "find the guest's disk"
        )
        await tools.create_qcow2(target, capacity)
        await self._files.run(acl.share, target, 0o600, {record.uid: acl.READ | acl.WRITE})
        xml = _backup_xml(device, self._layout.seen(target))
        frozen = await self._freeze(plan, power)
        try:
            await self._guests.change(uuid, lambda domain: _begin(domain, xml), "copy the guest's disk")
        finally:
            if frozen:
                await self._thaw(uuid)
        await self._wait(uuid)
        await self._files.run(acl.share, target, 0o600, {})

    async def _freeze(self, plan: GuestPlan, power: int) -> bool:
        """Freeze the file systems of a guest with an agent; return whether they are frozen.

        Raise Conflict if they cannot be and the image requires it.
        """
        uuid = plan.instance.uuid
        properties = {} if plan.instance.image is None else plan.instance.image.properties
        required = _is_set(properties, "os_require_quiesce")
        try:
            if not _is_set(properties, "hw_qemu_guest_agent"):
                raise Conflict("its image does not say that it has an agent (hw_qemu_guest_agent)")
            if power != power_state.RUNNING:
                raise Conflict("it is paused")
            await self._freeze_now(uuid)
        except MicronovaError as error:
            if required:
                message = "The file systems of the guest cannot be frozen, which its image requires"
                raise Conflict(f"{message} (os_require_quiesce): {error}") from error
            log.info("the disk of guest %s is copied without freezing its file systems: %s", uuid, error)
            return False
        return True

    async def _freeze_now(self, uuid: str) -> None:
        try:
            await self._guests.change(uuid, _freeze, "freeze the guest", timeout=AGENT_TIMEOUT, lane="freeze")
        except MicronovaError:
            try:
                await self._thaw(uuid)  # a part of them may be frozen
            except MicronovaError as error:
                log.warning(
                    "guest %s: freezing failed, and so did the thaw that follows; its file systems may be frozen: %s",
                    uuid,
                    error,
                )
            raise

    async def _thaw(self, uuid: str) -> None:
        await self._guests.change(uuid, _thaw, "thaw the guest", timeout=AGENT_TIMEOUT, lane="freeze")

    async def _wait(self, uuid: str) -> None:
        """Wait until the job has ended; raise DriverFailed if it has failed or the guest has stopped."""
        while True:
            job = await self._guests.read(uuid, _job, "tell how far the copy is")
            if job != _RUNS:
                break
            await self._clock.sleep(POLL_INTERVAL)
        if job != "":
            raise DriverFailed(f"The guest's disk could not be copied: {job}")


_RUNS: Final = "runs"


def _root(record: GuestRecord) -> DiskRecord:
    for disk in record.disks:
        if disk.role in ("root", "blank"):
            if disk.device != "disk":
                raise NotSupported("The server's root disk is a CD: there is nothing to make an image of.")
            return disk
    raise NotSupported("The server has no root disk on this host.")


def _check_room(folder: Path, disk: DiskRecord, reserved: Mapping[Path, int]) -> tuple[int, int]:
    """Return the size of the largest file of a disk, and the bytes that a copy may need.

    Raise Unavailable if there is no room for that beside the copies that are being made. Blocks.
    """
    files = [folder / disk.file, *([folder / base_link_name(disk.file)] if disk.backing is not None else [])]
    found = [file.stat() for file in files]
    needed = sum(each.st_blocks * 512 for each in found)
    coming = sum(max(0, most - _written(copy)) for copy, most in reserved.items())
    there = os.statvfs(folder)
    if there.f_bavail * there.f_frsize < needed + coming + SPARE:
        raise Unavailable("The host's disk has no room for a copy of the server's root disk.")
    return max(each.st_size for each in found), needed


def _written(path: Path) -> int:
    """Return the bytes that a file takes of the disk. Blocks."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _check_copy(path: Path) -> int:
    """Return the size of a copy. A guest that has left its QEMU could have written anything into it. Blocks."""
    inspector.check(path, "qcow2")
    return path.stat().st_size


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _is_set(properties: dict[str, Any], name: str) -> bool:
    return str(properties.get(name, "")).strip().lower() in TRUE_WORDS


# --- calls of libvirt, which block ---


def _device(domain: Domain, source: str) -> tuple[str, int]:
    """Return the name of the device of a disk, by its file, and the bytes that the guest sees."""
    for disk in parse(domain.XMLDesc(0)).iterfind("./devices/disk"):
        file, target = disk.find("source"), disk.find("target")
        if file is not None and target is not None and file.get("file") == source:
            name = target.get("dev", "")
            return name, int(domain.blockInfo(name)[0])
    raise DriverFailed("The guest does not have the disk that its record names.")


def _backup_xml(device: str, target: str) -> str:
    backup = element("domainbackup", mode="push")
    disk = child(child(backup, "disks"), "disk", name=device, backup="yes", type="file")
    child(disk, "driver", type="qcow2")
    file = child(disk, "target", file=target)
    child(file, "seclabel", model="dac", relabel="no")
    return unparse(backup)


def _begin(domain: Domain, xml: str) -> None:
    domain.backupBegin(xml, None, load().VIR_DOMAIN_BACKUP_BEGIN_REUSE_EXTERNAL)


def _job(domain: Domain) -> str:
    """Return _RUNS, "" if the last job was completed, or why it failed."""
    library = load()
    try:
        if domain.jobStats(0).get("type", library.VIR_DOMAIN_JOB_NONE) != library.VIR_DOMAIN_JOB_NONE:
            return _RUNS
        last = domain.jobStats(library.VIR_DOMAIN_JOB_STATS_COMPLETED)
    except Exception as error:
        if has_code(error, "VIR_ERR_OPERATION_INVALID"):
            return "the guest has stopped"
        raise
    if last.get("operation") != library.VIR_DOMAIN_JOB_OPERATION_BACKUP:
        return "the job has been replaced by another one"
    if last.get("type") == library.VIR_DOMAIN_JOB_COMPLETED:
        return ""
    return str(last.get("errmsg") or "the job was aborted")


def _abort(domain: Domain) -> None:
    """Abort a copy of the guest's disk, if one is made, and wait until it has ended."""
    library = load()
    try:
        job = domain.jobStats(0)
        if job.get("operation") == library.VIR_DOMAIN_JOB_OPERATION_BACKUP:
            domain.abortJob()
    except Exception as error:
        if not has_code(error, "VIR_ERR_OPERATION_INVALID"):  # the guest, or the job, has ended
            raise


def _freeze(domain: Domain) -> None:
    domain.agentSetResponseTimeout(AGENT_SECONDS, 0)
    domain.fsFreeze()


def _thaw(domain: Domain) -> None:
    """Thaw the file systems of a guest whose agent answers; those of other guests are not frozen."""
    if not domain.isActive() or agent.channel_state(domain) != "connected":
        return
    try:
        _thaw_now(domain)
    except Exception as error:
        if not has_code(error, "VIR_ERR_AGENT_UNRESPONSIVE", "VIR_ERR_OPERATION_INVALID"):
            raise
        log.warning("guest %s could not be thawed: %s", domain.UUIDString(), error)


def _thaw_now(domain: Domain) -> None:
    """Thaw the file systems of a guest, if it runs."""
    if domain.isActive():
        domain.agentSetResponseTimeout(AGENT_SECONDS, 0)
        domain.fsThaw()
