"""Images and members as clients see them."""

from typing import Any

from micronova.embedded.image.model import Image, Member
from micronova.http.paging import iso

_SHOWN = (
    "id", "name", "status", "visibility", "owner", "disk_format", "container_format", "min_disk", "min_ram",
    "protected", "os_hidden",
)  # fmt: skip
_DATA = ("size", "virtual_size", "checksum", "os_hash_algo", "os_hash_value")


def image(item: Image) -> dict[str, Any]:
    """Return an image as one object of attributes and properties."""
    path = f"/v2/images/{item.id}"
    staged = item.is_staged  # its data is not shown before the import
    return {
        **item.properties,
        **{name: getattr(item, name) for name in _SHOWN},
        **{name: None if staged else getattr(item, name) for name in _DATA},
        "tags": item.tags,
        "created_at": iso(item.created_at),
        "updated_at": iso(item.updated_at),
        "self": path,
        "file": f"{path}/file",
        "schema": "/v2/schemas/image",
    }


def member(item: Member) -> dict[str, Any]:
    """Return a member of an image."""
    return {
        "image_id": item.image_id,
        "member_id": item.member,
        "status": item.status,
        "created_at": iso(item.created_at),
        "updated_at": iso(item.updated_at),
        "schema": "/v2/schemas/member",
    }
