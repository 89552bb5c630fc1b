"""Images, members and tasks as clients see them."""

from typing import Any

from micronova.embedded.image.model import STORE, Image, Member, Task
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
    stores = {"stores": STORE} if item.size is not None and not staged else {}
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
        **stores,
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


def task(item: Task, *, details: bool = False) -> dict[str, Any]:
    """Return a task, with what it was told and what came of it if `details` is set."""
    shown = {
        "id": item.id,
        "type": item.type,
        "status": item.status,
        "owner": item.owner,
        "image_id": item.image_id,
        "user_id": item.user_id,
        "request_id": item.request_id,
        "created_at": iso(item.created_at),
        "updated_at": iso(item.updated_at),
        "expires_at": iso(item.expires_at),
        "self": f"/v2/tasks/{item.id}",
        "schema": "/v2/schemas/task",
    }
    return {**shown, "input": item.input, "result": item.result, "message": item.message} if details else shown
