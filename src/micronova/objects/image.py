"""ImageMeta: the description of an image."""

from typing import Any, Final

import msgspec

LONGEST_PROPERTY: Final = 255
"""Characters of a property's value that compute keeps, as Nova does; nothing that it reads is longer."""
MOST_PROPERTY_BYTES: Final = 65_536
"""Of the names and values of the properties that compute keeps of an image."""
SNAPSHOT: Final = "snapshot"
BACKUP: Final = "backup"
"""The property `image_type` of images that were made from servers."""
MAPPING: Final = "block_device_mapping"
"""The property of images that bring block devices along: volumes, or snapshots of volumes."""
CANNOT_UPLOAD: Final = (
    "Images of servers cannot be made: hosts upload only to the embedded image service, with glance.ticket_key set."
)
"""Why `createImage` and `createBackup` are refused."""
KERNEL_FORMATS: Final = ("aki", "raw")
RAMDISK_FORMATS: Final = ("ari", "raw")
NO_DISKS: Final = frozenset({"aki", "ari"})
"""Formats of images that have no disk."""


class ImageSignature(msgspec.Struct, frozen=True, kw_only=True):
    """With what a host verifies an image's data. The certificate of the key has been checked before."""

    signature: bytes
    hash_method: str  # SHA-256…
    key_type: str  # RSA-PSS…
    public_key: bytes  # SubjectPublicKeyInfo, in DER


class ImageMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The description of an image, as the image service returned it when the server was created."""

    id: str
    name: str = ""
    status: str = "active"
    disk_format: str = "raw"
    container_format: str = "bare"
    size: int = 0
    min_disk: int = 0
    min_ram: int = 0
    checksum: str | None = None  # MD5: detects damage, not tampering
    os_hash_algo: str | None = None
    os_hash_value: str | None = None
    owner: str | None = None
    properties: dict[str, Any] = {}
    signature: ImageSignature | None = None  # if the data has to be verified before it is used
    kernel: "ImageMeta | None" = None  # that boots the disk, with a ramdisk or without; None: firmware boots it
    ramdisk: "ImageMeta | None" = None
    # The property of this name, whole; it is no property here, because a server has block devices of its own.
    block_device_mapping: str = ""

    @property
    def property_bytes(self) -> int:
        """The size of the names and values of the properties."""
        return sum(len(name.encode()) + len(str(value).encode()) for name, value in self.properties.items())
