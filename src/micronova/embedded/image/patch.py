"""JSON patches of images, in the two dialects that clients send, as a function from image and patch to image."""

from typing import Any, Literal

import msgspec

from micronova.embedded.image import attributes
from micronova.embedded.image.model import QUEUED, Image
from micronova.objects.errors import Conflict, Forbidden, Invalid, UnsupportedMediaType

MEDIA_TYPES: dict[str, Literal["2.0", "2.1"]] = {
    "application/openstack-images-v2.1-json-patch": "2.1",
    "application/openstack-images-v2.0-json-patch": "2.0",
}
_OPERATIONS = ("add", "replace", "remove")


class Change(msgspec.Struct, frozen=True):
    """One operation of a patch, validated without the image."""

    op: str
    name: str
    value: Any
    must_be_new: bool = False  # `add` of the older dialect does not overwrite


def read(media_type: str, operations: list[Any]) -> list[Change]:
    """Return the operations of a patch of either dialect; raise UnsupportedMediaType or Invalid."""
    if media_type not in MEDIA_TYPES:
        raise UnsupportedMediaType(f"Unsupported Content-Type {media_type[:64]!r}: use {' or '.join(MEDIA_TYPES)}.")
    return [_read_one(MEDIA_TYPES[media_type], operation) for operation in operations]


def _read_one(dialect: str, operation: Any) -> Change:
    if not isinstance(operation, dict):
        raise Invalid("Each operation of a patch must be a JSON object.")
    if dialect == "2.1":
        op, path = operation.get("op"), operation.get("path")
    else:
        op = next((name for name in _OPERATIONS if name in operation), None)
        path = operation.get(op) if op else None
    if op not in _OPERATIONS:
        raise Invalid(f"An operation must be one of {', '.join(_OPERATIONS)}.")
    if op != "remove" and "value" not in operation:
        raise Invalid(f"The operation '{op}' needs a 'value'.")
    return Change(op, _name(path), operation.get("value"), dialect == "2.0" and op == "add")


def _name(path: Any) -> str:
    if not isinstance(path, str):
        raise Invalid("An operation's path must be a string such as '/name'.")
    if not path.startswith("/"):
        raise Invalid(f"Invalid path '{path[:64]}': it must begin with a slash.")
    tokens = [token.replace("~1", "/").replace("~0", "~") for token in path[1:].split("/")]
    if tokens[0] == "locations":
        raise Forbidden("Attribute 'locations' is reserved: the data of an image is uploaded, not pointed to.")
    if len(tokens) != 1 or not tokens[0] or "~" in path.replace("~0", "").replace("~1", ""):
        raise Invalid(f"Invalid path '{path[:64]}': it must name one attribute or property, such as '/name'.")
    return tokens[0]


def apply(
    image: Image, changes: list[Change], *, is_admin: bool, max_property_bytes: int = attributes.MAX_PROPERTY_BYTES
) -> Image:
    """Return the image after all changes; raise an error for one that is not allowed.

    Properties may have `max_property_bytes` bytes, or as many as they had.
    The caller has checked that policy allows to change the image.
    """
    fields: dict[str, Any] = {}
    properties = dict(image.properties)
    for change in changes:
        name = change.name
        attributes.check_writable(name)
        is_attribute = name in attributes.WRITABLE
        exists = is_attribute or name in properties
        if change.op == "remove" and is_attribute:
            raise Forbidden(f"Attribute '{name}' belongs to every image: it can be replaced, not removed.")
        if change.op != "add" and not exists:
            raise Conflict(f"The image has no property '{name[:64]}' to {change.op}.")
        if change.must_be_new and exists:
            raise Conflict(f"The image has a property '{name[:64]}' already.")
        if change.op == "remove":
            del properties[name]
        elif is_attribute:
            fields[name] = _attribute(image, name, attributes.check(name, change.value), is_admin)
        else:
            properties[name] = attributes.check(name, change.value)
    changed = msgspec.structs.replace(image, **fields, properties=properties)
    attributes.check_amounts(changed.tags, changed.properties, image.properties, max_property_bytes)
    return changed


def _attribute(image: Image, name: str, value: Any, is_admin: bool) -> Any:
    if name == "tags":
        return attributes.unique(value)
    if name == "owner" and value != image.owner and not is_admin:
        raise Forbidden("Attribute 'owner' can be changed by an administrator only.")
    if name in ("disk_format", "container_format") and image.status != QUEUED and value != getattr(image, name):
        raise Forbidden(f"Attribute '{name}' cannot change once the image has data, or is getting it.")
    return value
