"""ImageMeta: the description of an image."""

from typing import Any, Final

import msgspec

LONGEST_PROPERTY: Final = 255
"""Characters of a property's value that compute keeps, as Nova does; nothing that it reads is longer."""
MOST_PROPERTY_BYTES: Final = 65_536
"""Of the names and values of the properties that compute keeps of an image."""


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

    @property
    def property_bytes(self) -> int:
        """The size of the names and values of the properties."""
        return sum(len(name.encode()) + len(str(value).encode()) for name, value in self.properties.items())
