"""A guest's disks: deciding which it gets, and creating them."""

import os
from pathlib import Path

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import BuildAborted, InsufficientResources, NotSupported, resource_exhausted
from micronova.virt.driver import GuestPlan
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.storage import tools
from micronova.virt.libvirt.storage.image_cache import ImageCache, base_name
from micronova.virt.libvirt.storage.layout import BASE_LINK, Layout
from micronova.virt.libvirt.storage.records import DiskRecord, GuestRecord

GIB = 1024**3
MIB = 1024**2
CONFIG_DRIVE = "disk.config"


def plan_disks(plan: GuestPlan, settings: LibvirtSettings) -> tuple[DiskRecord, ...]:
    """Return the disks that a guest gets, without creating them; raise NotSupported if this host cannot attach one."""
    image = plan.instance.image
    devices = plan.block_devices or ((BlockDevice(uuid="", boot_index=0),) if image is not None else ())
    found: list[DiskRecord] = []
    ephemeral = blank = 0
    for device in sorted(devices, key=lambda each: each.boot_index != 0):
        boot = -1 if device.boot_index is None else device.boot_index
        serial = device.uuid.replace("-", "")[:20]
        if device.destination_type == "volume" or device.source_type in ("volume", "snapshot"):
            raise NotSupported("This host cannot attach volumes.")
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
            blank += 1
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
    if not any(disk.boot_index >= 0 for disk in found):
        raise BuildAborted("The server has no disk to boot from.")
    return tuple(found)


class DiskMaker:
    """Creates disks in a guest's directory."""

    def __init__(self, layout: Layout, cache: ImageCache, files: ThreadPool) -> None:
        self._layout = layout
        self._cache = cache
        self._files = files

    async def make(self, plan: GuestPlan, record: GuestRecord) -> None:
        """Create all disks of a record but the config drive. Removing the guest's directory undoes it."""
        sizes = _blank_sizes(plan)
        for disk in record.disks:
            path = self._layout.guest(record.uuid) / disk.file
            try:
                if disk.role == "root":
                    await self._root(plan, disk, path)
                elif disk.role == "swap":
                    size = plan.instance.flavor.swap * MIB
                    await self._blank(path, size)
                    await tools.make_file_system(path, "swap", "swap", size)
                elif disk.role == "ephemeral":
                    size, kind = sizes.pop(0)
                    await self._blank(path, size)
                    await tools.make_file_system(path, kind, disk.file.removeprefix("disk."), size)
                elif disk.role == "blank":
                    await self._blank(path, plan.instance.flavor.disk * GIB)
            except OSError as error:
                lack = resource_exhausted(error)
                raise lack or InsufficientResources(f"The disks cannot be made: {error.strerror}.") from error

    async def _root(self, plan: GuestPlan, disk: DiskRecord, path: Path) -> None:
        image, flavor = plan.instance.image, plan.instance.flavor
        assert image is not None
        limit = flavor.disk * GIB or None
        async with self._cache.image(image, plan.image_ticket, limit) as base:
            size = max(base.virtual_size, limit or 0)
            if disk.format == "qcow2":
                await self._files.run(self._layout.link_base, plan.instance.uuid, base.name)
                await tools.create_overlay(path, path.with_name(BASE_LINK), size)
            else:
                await tools.copy(base.path, path, base.virtual_size)
                if disk.device == "disk":
                    await self._files.run(os.truncate, path, size)

    async def _blank(self, path: Path, size: int) -> None:
        if size <= 0:
            raise BuildAborted("A disk without a size cannot be made: choose a flavor with one.")
        await self._files.run(_make_empty, path, size)


def _blank_sizes(plan: GuestPlan) -> list[tuple[int, str]]:
    return [
        ((device.size_gb or plan.instance.flavor.ephemeral) * GIB, device.guest_format or "ext4")
        for device in plan.block_devices
        if device.source_type == "blank" and device.guest_format != "swap" and device.boot_index != 0
    ]


def _make_empty(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)
