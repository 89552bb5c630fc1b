"""BlockDevice: one disk of a server."""

import string
from collections.abc import Iterable
from typing import Final, Literal
from uuid import UUID, uuid5

import msgspec

from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.objects.volume import AttachedVolume, Connection

ROOT_DEVICE = "/dev/vda"
"""The name of a server's first disk."""
MOST_DISKS: Final = 128
"""Disks and volumes of one server. Requests ask the volume service about each, and every order has all of them."""

SourceType = Literal["image", "volume", "snapshot", "blank"]
"""What a disk is made of, or the volume that it is."""
DestinationType = Literal["local", "volume"]
"""Where a disk is: on the server's host, or at the volume service."""


_NAMESPACE = UUID("6d0f1c9a-3a3e-4b6c-8a49-5c2f0b1d7e53")  # of disks that a resize adds


class BlockDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A disk: what the user requested and how it is attached."""

    uuid: str
    source_type: SourceType = "image"
    destination_type: DestinationType = "local"
    image_id: str | None = None
    volume_id: str | None = None
    snapshot_id: str | None = None
    boot_index: int | None = 0
    device_name: str | None = None
    size_gb: int | None = None
    guest_format: str | None = None  # "swap" for a swap disk
    disk_bus: str | None = None
    device_type: str | None = None
    tag: str | None = None
    volume_type: str | None = None
    delete_on_termination: bool = True
    attachment_id: str | None = None  # of a volume, at the volume service
    multiattach: bool = False  # of a volume
    connection: Connection | None = None  # how the host reaches the volume; keys in it are sealed
    connected_host: str | None = None  # that the connection is for

    @property
    def is_volume(self) -> bool:
        """Whether it is a volume, which may have to be made first."""
        return self.destination_type == "volume"

    @property
    def is_blank(self) -> bool:
        """Whether it is an empty local disk, and no swap disk; the disk that the server boots from may be one."""
        return self.source_type == "blank" and self.destination_type == "local" and self.guest_format != "swap"

    @property
    def is_ephemeral(self) -> bool:
        """Whether it is an empty local disk beside the one that the server boots from, and no swap disk."""
        return self.is_blank and self.boot_index != 0


def resized(devices: tuple[BlockDevice, ...], instance_uuid: str, old: Flavor, new: Flavor) -> tuple[BlockDevice, ...]:
    """Return the disks of a server that gets another flavor.

    The swap disk, and an ephemeral disk that is as large as the old flavor allows, follow the flavor.
    """
    kept: list[BlockDevice] = []
    for device in devices:
        if device.guest_format == "swap":
            if new.swap:
                kept.append(msgspec.structs.replace(device, size_gb=new.swap_gb))
        elif device.is_ephemeral and (device.size_gb or old.ephemeral) == old.ephemeral:
            if new.ephemeral:
                kept.append(msgspec.structs.replace(device, size_gb=new.ephemeral))
        else:
            kept.append(device)
    if new.swap and not any(device.guest_format == "swap" for device in kept):
        kept.append(blank_device(_added_uuid(instance_uuid, "swap"), new.swap_gb, "swap"))
    if new.ephemeral and not any(device.is_ephemeral for device in kept):
        kept.append(blank_device(_added_uuid(instance_uuid, "ephemeral"), new.ephemeral))
    return tuple(kept)


def attached_volumes(devices: Iterable[BlockDevice]) -> tuple[AttachedVolume, ...]:
    """Return the volumes among block devices that a host can reach, in the order of their names."""
    found = [
        AttachedVolume(
            volume_id=device.volume_id,
            attachment_id=device.attachment_id,
            device_uuid=device.uuid,
            device_name=device.device_name or ROOT_DEVICE,
            connection=device.connection,
            boot_index=device.boot_index,
            disk_bus=device.disk_bus,
            device_type=device.device_type,
            tag=device.tag,
            size_gb=device.size_gb,
            multiattach=device.multiattach,
        )
        for device in devices
        if device.is_volume and device.volume_id and device.attachment_id and device.connection is not None
    ]
    return tuple(sorted(found, key=lambda each: (len(each.device_name), each.device_name)))


def bad_mapping(reason: str) -> Invalid:
    """Return the error about block devices that cannot be used together, or as a request asks."""
    return Invalid(f"Block Device Mapping is Invalid: {reason}")


def default_destination(source: str) -> DestinationType:
    """Return the destination_type of a device that names none."""
    return "local" if source in ("image", "blank") else "volume"


def default_deletion(destination: str) -> bool:
    """Return whether a device that does not say it is deleted with its server."""
    return destination == "local"


def check_source(device: BlockDevice) -> None:
    """Raise Invalid unless a device has the id of its source, and no other one."""
    source = device.source_type
    for other in ("image", "volume", "snapshot"):
        named = getattr(device, f"{other}_id")
        if other == source and not named:
            raise bad_mapping(f"a device of source_type {source} needs a uuid or {other}_id.")
        if other != source and named:
            raise bad_mapping(f"a device of source_type {source} has no {other}_id.")


def root_volume(devices: Iterable[BlockDevice]) -> BlockDevice | None:
    """Return the volume that a server boots from, or None if it boots from a local disk."""
    return next((device for device in devices if device.is_volume and device.boot_index == 0), None)


_PREFIXES: Final = {"ide": "hd", "scsi": "sd", "sata": "sd", "usb": "sd"}


def with_names(devices: Iterable[BlockDevice]) -> list[BlockDevice]:
    """Return block devices, of which each volume has a name: the one that was asked for, or the next that is free.

    Local disks come first on their bus, and have no names here.
    """
    found = list(devices)
    taken = {full_name(device.device_name) for device in found if device.device_name}
    local = sum(not device.is_volume for device in found)
    taken |= {f"/dev/vd{_letters(number)}" for number in range(local)}
    root = root_volume(found)
    named = []
    for device in sorted(found, key=lambda each: each is not root):
        if not device.is_volume:
            named.append(device)
            continue
        name = full_name(device.device_name) if device.device_name else None
        if name is None:
            prefix = f"/dev/{_PREFIXES.get(device.disk_bus or '', 'vd')}"
            name = next(each for number in range(len(taken) + 1) if (each := prefix + _letters(number)) not in taken)
            taken.add(name)
        named.append(msgspec.structs.replace(device, device_name=name))
    return named


def full_name(name: str) -> str:
    """Return the name of a device with its directory."""
    return name if name.startswith("/dev/") else f"/dev/{name}"


def _letters(number: int) -> str:
    """Return a, b … z, aa, ab …"""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = string.ascii_lowercase[rest] + text
    return text


def blank_device(uuid: str, size_gb: int, guest_format: str | None = None) -> BlockDevice:
    """Return an empty local disk that the server does not boot from."""
    return BlockDevice(uuid=uuid, source_type="blank", boot_index=-1, size_gb=size_gb, guest_format=guest_format)


def _added_uuid(instance_uuid: str, name: str) -> str:
    # The id follows from the server, so that an order that is made again has the same.
    return str(uuid5(_NAMESPACE, f"{instance_uuid} {name}"))
