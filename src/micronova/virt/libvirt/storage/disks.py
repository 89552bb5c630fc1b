"""A guest's disks: deciding which it gets, and creating them."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import BuildAborted, InsufficientResources, NotSupported, resource_exhausted
from micronova.objects.image import ImageMeta
from micronova.virt.driver import GuestPlan
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.storage import tools
from micronova.virt.libvirt.storage.image_cache import ImageCache, base_name
from micronova.virt.libvirt.storage.layout import Layout, base_link_name, remove, sync_file, unfinished
from micronova.virt.libvirt.storage.records import BootRecord, DiskRecord, GuestRecord
from micronova.virt.libvirt.storage.tools import GIB

MIB = 1024**2
CONFIG_DRIVE = "disk.config"
RESCUE_DISK = "disk.rescue"
RESCUE_CONFIG_DRIVE = "disk.config.rescue"
KERNEL, RAMDISK, RESCUE_KERNEL, RESCUE_RAMDISK = "kernel", "ramdisk", "kernel.rescue", "ramdisk.rescue"


def plan_disks(plan: GuestPlan, settings: LibvirtSettings) -> tuple[DiskRecord, ...]:
    """Return the disks that a guest gets, without creating them; raise NotSupported if this host cannot attach one."""
    image = plan.instance.image
    volume_boots = any(volume.boot_index == 0 for volume in plan.volumes)
    assumed = (BlockDevice(uuid="", boot_index=0),) if image is not None and not volume_boots else ()
    devices = plan.block_devices or assumed
    attached = {volume.device_uuid for volume in plan.volumes}
    found: list[DiskRecord] = []
    ephemeral = 0
    for device in sorted(devices, key=lambda each: each.boot_index != 0):
        boot = -1 if device.boot_index is None else device.boot_index
        serial = device.uuid.replace("-", "")[:20]
        if device.destination_type == "volume" or device.source_type in ("volume", "snapshot"):
            if device.uuid not in attached:
                raise NotSupported("The order does not say how this host reaches a volume of the server.")
            continue
        if device.source_type == "image":
            if image is None or device.image_id not in (None, image.id):
                raise NotSupported("This host makes local disks of the server's own image only.")
            cd = image.disk_format == "iso" or device.device_type == "cdrom"
            overlay = settings.images_type == "qcow2" and not cd
            found.append(
                DiskRecord(
                    file="disk",
                    format="qcow2" if overlay else "raw",
                    role="root",
                    device="cdrom" if cd else "disk",
                    bus=device.disk_bus,
                    backing=base_name(image) if overlay else None,
                    boot_index=boot,
                )
            )
        elif device.guest_format == "swap":
            found.append(DiskRecord(file="disk.swap", format="raw", role="swap", bus=device.disk_bus))
        elif boot == 0:
            found.append(DiskRecord(file="disk", format="raw", role="blank", bus=device.disk_bus, boot_index=0))
        else:
            if device.guest_format not in (None, *tools.FILE_SYSTEMS):
                raise NotSupported(f"This host cannot format disks with {device.guest_format}.")
            name = f"disk.eph{ephemeral}"
            found.append(
                DiskRecord(
                    file=name, format="raw", role="ephemeral", bus=device.disk_bus, serial=serial, boot_index=boot
                )
            )
            ephemeral += 1
    if len({disk.file for disk in found}) != len(found):
        raise NotSupported("This host gives a server one root disk and one swap disk.")
    if plan.instance.config_drive:
        found.append(DiskRecord(file=CONFIG_DRIVE, format="raw", role="config", device="cdrom"))
    if not any(disk.boot_index >= 0 for disk in found) and not volume_boots:
        raise BuildAborted("The server has no disk to boot from.")
    return tuple(found)


def plan_rescue_disks(
    own: tuple[DiskRecord, ...], image: ImageMeta, settings: LibvirtSettings
) -> tuple[DiskRecord, ...]:
    """Return the disks that a guest has while it is rescued, without creating the rescue disk.

    The rescue disk is the first, and of the guest's own disks only the root disk follows. If the image says what the
    rescue disk is, by hw_rescue_device or hw_rescue_bus, all of the guest's disks keep their places, and the rescue
    disk is the last. A config drive is replaced by one with the new password.
    """
    device, bus = (image.properties.get(f"hw_rescue_{what}") for what in ("device", "bus"))
    stable = device is not None or bus is not None
    device = str(device or ("cdrom" if image.disk_format == "iso" else "disk"))
    if not stable:
        bus = image.properties.get("hw_cdrom_bus" if device == "cdrom" else "hw_disk_bus")
    overlay = settings.images_type == "qcow2" and device == "disk"
    rescue = DiskRecord(
        file=RESCUE_DISK,
        format="qcow2" if overlay else "raw",
        role="rescue",
        device=device,
        bus=None if bus is None else str(bus),
        backing=base_name(image) if overlay else None,
        boot_index=0,
    )
    config = [disk.role == "config" for disk in own]
    others = [
        msgspec.structs.replace(disk, boot_index=-1, file=RESCUE_CONFIG_DRIVE if is_config else disk.file)
        for disk, is_config in zip(own, config, strict=True)
    ]
    if stable:
        return (*others, rescue)
    root = min((disk for disk in own if disk.boot_index >= 0), key=lambda disk: disk.boot_index, default=None)
    return (rescue, *(disk for disk in others if disk.role == "config" or (root and disk.file == root.file)))


def plan_boot(image: ImageMeta | None, *, rescue: bool = False) -> BootRecord | None:
    """Return what boots a guest of an image, without creating it; None if firmware does."""
    if image is None or image.kernel is None:
        return None
    kernel, ramdisk = (RESCUE_KERNEL, RESCUE_RAMDISK) if rescue else (KERNEL, RAMDISK)
    return BootRecord(kernel=kernel, ramdisk="" if image.ramdisk is None else ramdisk)


class DiskMaker:
    """Creates disks in a guest's directory, and copies kernels and ramdisks there."""

    def __init__(self, layout: Layout, cache: ImageCache, files: ThreadPool) -> None:
        self._layout = layout
        self._cache = cache
        self._files = files

    @asynccontextmanager
    async def image_cached(self, plan: GuestPlan, record: GuestRecord) -> AsyncIterator[None]:
        """Download the image of a record's root disk, if there is one, and keep it while the context lasts.

        Likewise its kernel and its ramdisk.
        """
        image = plan.instance.image
        async with AsyncExitStack() as kept:
            if image is not None and any(disk.role == "root" for disk in record.disks):
                limit = plan.instance.flavor.disk * GIB or None
                await kept.enter_async_context(self._cache.image(image, plan.image_url, limit))
            for part, url in () if image is None or record.boot is None else _boot_images(plan, image):
                await kept.enter_async_context(self._cache.image(part, url, None, is_disk=False))
            yield

    async def make(self, plan: GuestPlan, record: GuestRecord) -> None:
        """Create all disks of a record but the config drive. Removing the guest's directory undoes it."""
        sizes = _ephemeral_sizes(plan)
        for disk in record.disks:
            path = self._layout.guest(record.uuid) / disk.file
            try:
                if disk.role == "root":
                    assert plan.instance.image is not None
                    await self._of_image(plan, plan.instance.image, disk, path, grows=True)
                elif disk.role == "swap":
                    await self._formatted(path, plan.instance.flavor.swap * MIB, "swap")
                elif disk.role == "ephemeral":
                    await self._formatted(path, *sizes.pop(0))
                elif disk.role == "blank":
                    await self._blank(path, plan.instance.flavor.disk * GIB)
            except OSError as error:
                lack = resource_exhausted(error)
                raise lack or InsufficientResources(f"The disks cannot be made: {error.strerror}.") from error
        if plan.instance.image is not None and record.boot is not None:
            await self._copy_boot_images(plan, plan.instance.image, record.boot)

    async def _copy_boot_images(self, plan: GuestPlan, image: ImageMeta, boot: BootRecord) -> None:
        """Copy kernel and ramdisk into the guest's directory.

        They are copies and no links, because libvirt gives these files to the guest's user while the guest runs: a
        link would give it the cached image. Who reaches the directory may read them; only this guest does.
        """
        folder = self._layout.guest(plan.instance.uuid)
        for name, (part, url) in zip((boot.kernel, boot.ramdisk), _boot_images(plan, image), strict=False):
            try:
                async with self._cache.image(part, url, None, is_disk=False) as cached:
                    await self._files.run(remove, folder / name)
                    await tools.copy(cached.path, folder / name, cached.virtual_size)
                    await self._files.run(os.chmod, folder / name, 0o644)
            except OSError as error:
                lack = resource_exhausted(error)
                raise lack or InsufficientResources(f"The kernel cannot be copied: {error.strerror}.") from error

    async def make_rescue_disk(
        self, plan: GuestPlan, disks: tuple[DiskRecord, ...], boot: BootRecord | None = None
    ) -> None:
        """Create the rescue disk, which is as large as its image; `remove_rescue_files` undoes it."""
        assert plan.rescue_image is not None
        (disk,) = (disk for disk in disks if disk.role == "rescue")
        path = self._layout.guest(plan.instance.uuid) / disk.file
        try:
            await self._of_image(plan, plan.rescue_image, disk, path, grows=False)
        except OSError as error:
            lack = resource_exhausted(error)
            raise lack or InsufficientResources(f"The rescue disk cannot be made: {error.strerror}.") from error
        if boot is not None:
            await self._copy_boot_images(plan, plan.rescue_image, boot)

    def remove_rescue_files(self, uuid: str) -> None:
        """Remove what was created for a rescue. Blocks."""
        folder = self._layout.guest(uuid)
        for name in (RESCUE_DISK, base_link_name(RESCUE_DISK), RESCUE_CONFIG_DRIVE, RESCUE_KERNEL, RESCUE_RAMDISK):
            remove(folder / name)

    async def grow(self, plan: GuestPlan, disks: tuple[DiskRecord, ...]) -> None:
        """Give the disks of a guest that is off the sizes of the plan's flavor; those that are missing are made.

        Swap that changes its size is made again. Nothing is made smaller. It may be repeated.
        """
        flavor, sizes = plan.instance.flavor, _ephemeral_sizes(plan)
        for disk in disks:
            path = self._layout.guest(plan.instance.uuid) / disk.file
            if disk.role in ("root", "blank") and disk.device == "disk" and flavor.disk:
                await self._enlarge(path, disk.format, flavor.disk * GIB)
            elif disk.role == "swap":
                await self._renew_swap(path, flavor.swap * MIB)
            elif disk.role == "ephemeral":
                size, kind = sizes.pop(0)
                if await self._files.run(path.exists):
                    await self._enlarge(path, disk.format, size)
                else:
                    await self._formatted(path, size, kind)

    async def _enlarge(self, path: Path, format: str, size: int) -> None:
        if format == "qcow2":
            await tools.enlarge(path, path.with_name(base_link_name(path.name)), size)
            return
        now = (await self._files.run(os.stat, path)).st_size
        if now > size:
            raise NotSupported(f"A disk has {now} bytes and cannot be made smaller.")
        await self._files.run(os.truncate, path, size)

    async def _renew_swap(self, path: Path, size: int) -> None:
        if await self._files.run(path.exists) and (await self._files.run(os.stat, path)).st_size == size:
            return
        await self._formatted(path, size, "swap")

    async def _formatted(self, path: Path, size: int, kind: str) -> None:
        """Create an empty disk with a file system, or swap; a file with this name is always formatted."""
        fresh = path.with_name(unfinished(path.name))
        await self._files.run(remove, fresh)
        await self._blank(fresh, size)
        await tools.make_file_system(fresh, kind, path.name.removeprefix("disk."), size)
        await self._files.run(sync_file, fresh)
        await self._files.run(os.replace, fresh, path)

    async def _of_image(self, plan: GuestPlan, image: ImageMeta, disk: DiskRecord, path: Path, *, grows: bool) -> None:
        """Create a disk of an image, which has to fit the flavor's disk; one that `grows` gets its size."""
        limit = plan.instance.flavor.disk * GIB or None
        async with self._cache.image(image, plan.image_url, limit) as base:
            size = max(base.virtual_size, limit or 0) if grows else base.virtual_size
            if disk.format == "qcow2":
                await self._files.run(self._layout.link_base, plan.instance.uuid, base.name, disk.file)
                await tools.create_overlay(path, path.with_name(base_link_name(disk.file)), size)
            else:
                await tools.copy(base.path, path, base.virtual_size)
                if disk.device == "disk":
                    await self._files.run(os.truncate, path, size)

    async def _blank(self, path: Path, size: int) -> None:
        if size <= 0:
            raise BuildAborted("A disk without a size cannot be made: choose a flavor with one.")
        await self._files.run(_make_empty, path, size)


def _boot_images(plan: GuestPlan, image: ImageMeta) -> list[tuple[ImageMeta, str | None]]:
    """Return the kernel of an image, and its ramdisk if it has one, with the URLs of the plan."""
    parts = ((image.kernel, plan.kernel_url), (image.ramdisk, plan.ramdisk_url))
    return [(part, url) for part, url in parts if part is not None]


def _ephemeral_sizes(plan: GuestPlan) -> list[tuple[int, str]]:
    return [
        ((device.size_gb or plan.instance.flavor.ephemeral) * GIB, device.guest_format or "ext4")
        for device in plan.block_devices
        if device.is_ephemeral
    ]


def _make_empty(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)
