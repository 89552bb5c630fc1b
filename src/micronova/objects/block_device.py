"""BlockDevice: one disk of a server."""

from uuid import UUID, uuid5

import msgspec

from micronova.objects.flavor import Flavor

ROOT_DEVICE = "/dev/vda"
"""The name of a server's first disk."""


_NAMESPACE = UUID("6d0f1c9a-3a3e-4b6c-8a49-5c2f0b1d7e53")  # of disks that a resize adds


class BlockDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A disk: what the user requested and how it is attached."""

    uuid: str
    source_type: str = "image"  # image | volume | snapshot | blank
    destination_type: str = "local"  # local | volume
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


def resized(devices: tuple[BlockDevice, ...], instance_uuid: str, old: Flavor, new: Flavor) -> tuple[BlockDevice, ...]:
    """Return the disks of a server that gets another flavor.

    The swap disk, and an ephemeral disk that is as large as the old flavor allows, follow the flavor.
    """
    kept: list[BlockDevice] = []
    for device in devices:
        if device.guest_format == "swap":
            if new.swap:
                kept.append(msgspec.structs.replace(device, size_gb=_gigabytes(new.swap)))
        elif _is_ephemeral(device) and (device.size_gb or old.ephemeral) == old.ephemeral:
            if new.ephemeral:
                kept.append(msgspec.structs.replace(device, size_gb=new.ephemeral))
        else:
            kept.append(device)
    if new.swap and not any(device.guest_format == "swap" for device in kept):
        kept.append(_added(instance_uuid, "swap", _gigabytes(new.swap), "swap"))
    if new.ephemeral and not any(_is_ephemeral(device) for device in kept):
        kept.append(_added(instance_uuid, "ephemeral", new.ephemeral, None))
    return tuple(kept)


def _is_ephemeral(device: BlockDevice) -> bool:
    return device.source_type == "blank" and device.guest_format != "swap" and device.boot_index != 0


def _gigabytes(megabytes: int) -> int:
    return -(-megabytes // 1024)


def _added(instance_uuid: str, name: str, size: int, guest_format: str | None) -> BlockDevice:
    # The id follows from the server, so that an order that is made again has the same.
    return BlockDevice(
        uuid=str(uuid5(_NAMESPACE, f"{instance_uuid} {name}")),
        source_type="blank",
        boot_index=-1,
        size_gb=size,
        guest_format=guest_format,
    )
