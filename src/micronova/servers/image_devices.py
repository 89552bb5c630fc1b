"""The block devices that an image brings along: its properties `block_device_mapping` and `bdm_v2`.

`createImage` of a server that boots from a volume makes such images; who boots from one gets volumes of its snapshots.
"""

from collections.abc import Sequence
from typing import Any, Final, cast, get_args

import msgspec

from micronova.objects.block_device import (
    ROOT_DEVICE,
    BlockDevice,
    DestinationType,
    SourceType,
    check_source,
    default_deletion,
    default_destination,
    full_name,
)
from micronova.objects.errors import Invalid
from micronova.objects.guest_properties import root_device_of
from micronova.objects.image import MAPPING, ImageMeta

NEW_FORM: Final = "bdm_v2"
"""The property that says that the devices are in the form of `block_device_mapping_v2`."""


class _Device(msgspec.Struct):
    """A device of an image, in either form; all of it was written by a user."""

    source_type: str | None = None
    destination_type: str | None = None
    image_id: str | None = None
    volume_id: str | None = None
    snapshot_id: str | None = None
    boot_index: int | None = None
    device_name: str | None = None
    volume_size: int | None = None
    guest_format: str | None = None
    disk_bus: str | None = None
    device_type: str | None = None
    tag: str | None = None
    volume_type: str | None = None
    delete_on_termination: bool | None = None
    no_device: bool | None = None
    virtual_name: str | None = None


def mapping_of(device: BlockDevice, snapshot_id: str | None) -> dict[str, Any]:
    """Return a device of a server as an image has it; `snapshot_id` is of its volume, if it is one."""
    kept = {
        "boot_index": device.boot_index,
        "delete_on_termination": device.delete_on_termination,
        "device_name": device.device_name,
        "device_type": device.device_type,
        "disk_bus": device.disk_bus,
        "volume_size": device.size_gb,
    }
    if snapshot_id is not None:
        made_of = {"source_type": "snapshot", "destination_type": "volume", "snapshot_id": snapshot_id}
        return {**_NOTHING, **kept, **made_of}
    local = {
        "source_type": device.source_type,
        "destination_type": device.destination_type,
        "guest_format": device.guest_format,
        "image_id": device.image_id,
        "tag": device.tag,
    }
    return {**_NOTHING, **kept, **local}


_NOTHING: Final = {name: None for name in _Device.__struct_fields__ if name != "virtual_name"}


def devices_of(image: ImageMeta) -> list[BlockDevice]:
    """Return the block devices of an image; raise Invalid if they are malformed."""
    if not image.block_device_mapping:
        return []
    bad = f"The property {MAPPING} of image {image.id} is not understood: "
    try:
        found = msgspec.json.decode(image.block_device_mapping, type=list[_Device], strict=False)
    except msgspec.MsgspecError as error:
        raise Invalid(f"{bad}{error}.") from None
    found = [each for each in found if not each.no_device]
    if str(image.properties.get(NEW_FORM, "")).lower() not in ("true", "1"):
        root = full_name(root_device_of(image) or ROOT_DEVICE)
        found = [_from_old_form(each, root, bad) for each in found]
    return [_device(each, bad) for each in found]


def _from_old_form(device: _Device, root: str, bad: str) -> _Device:
    """Return a device of the oldest form in the newer one: the root device is known by its name."""
    source = "snapshot" if device.snapshot_id else "volume"
    if device.virtual_name or not (device.snapshot_id or device.volume_id):
        raise Invalid(f"{bad}without {NEW_FORM} each device needs a snapshot_id or a volume_id.")
    boots = device.device_name is not None and full_name(device.device_name) == root
    return msgspec.structs.replace(device, source_type=source, destination_type="volume", boot_index=0 if boots else -1)


def _device(device: _Device, bad: str) -> BlockDevice:
    source = device.source_type or ""
    destination = device.destination_type or default_destination(source)
    if source not in get_args(SourceType) or destination not in get_args(DestinationType):
        raise Invalid(f"{bad}a device has source_type {source[:32]!r} and destination_type {destination[:32]!r}.")
    if device.volume_size is not None and device.volume_size < 1:
        raise Invalid(f"{bad}a device has the volume_size {device.volume_size}.")
    found = BlockDevice(
        uuid="",
        source_type=cast(SourceType, source),
        destination_type=cast(DestinationType, destination),
        image_id=device.image_id if source == "image" else None,
        volume_id=device.volume_id if source == "volume" else None,
        snapshot_id=device.snapshot_id if source == "snapshot" else None,
        boot_index=-1 if device.boot_index is None else device.boot_index,
        device_name=device.device_name,
        size_gb=device.volume_size,
        guest_format=device.guest_format,
        disk_bus=device.disk_bus,
        device_type=device.device_type,
        tag=device.tag,
        volume_type=device.volume_type,
        delete_on_termination=default_deletion(destination)
        if device.delete_on_termination is None
        else device.delete_on_termination,
    )
    try:
        check_source(found)
    except Invalid as error:
        raise Invalid(f"{bad}{error.message}") from None
    return found


def merged(requested: Sequence[BlockDevice], of_image: Sequence[BlockDevice]) -> list[BlockDevice]:
    """Return the devices of a request and those of its image; the request's win over the image's of the same name."""
    boots = any(device.boot_index == 0 for device in of_image)
    # Clients name the image as the root disk. It is none, if its devices have one.
    kept = [each for each in requested if not (boots and each.boot_index == 0 and each.source_type == "image")]
    names = {full_name(each.device_name) for each in kept if each.device_name}
    return kept + [each for each in of_image if not (each.device_name and full_name(each.device_name) in names)]
