"""ImageMeta: the description of an image."""

from typing import Any

import msgspec


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
