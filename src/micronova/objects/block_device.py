"""BlockDevice: one disk of a server."""

import msgspec

ROOT_DEVICE = "/dev/vda"
"""The name of a server's first disk."""


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
