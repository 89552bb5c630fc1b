"""The attributes of an image, as declarations for the checks and for the schema documents.

An image is one flat JSON object. It has the attributes that are declared here, and properties with any other name,
whose values are strings.
"""

import re
from collections.abc import Mapping
from typing import Any

from micronova.embedded.image.model import MEMBER_STATUSES, STATUSES, TASK_STATUSES, TASK_TYPES, VISIBILITIES
from micronova.objects.errors import Forbidden, Invalid, TooLarge

Schema = dict[str, Any]

UUID = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
DISK_FORMATS = ("ami", "ari", "aki", "vhd", "vhdx", "vmdk", "raw", "qcow2", "vdi", "iso", "ploop")
CONTAINER_FORMATS = ("ami", "ari", "aki", "bare", "ovf", "ova", "docker", "compressed")

MAX_NAME = 255
MAX_VALUE = 65_535
MAX_PROPERTY_BYTES = 65_536  # bytes of the names and values of an image's properties
MAX_INTEGER = 2**31 - 1
MAX_PROPERTIES = 128
MAX_TAGS = 128
MAX_MEMBERS = 128
RESERVED_PREFIX = "os_glance"


def _text(description: str, **more: Any) -> Schema:
    return {"type": ["null", "string"], "description": description, **more}


def _read_only(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description, "readOnly": True, **more}


def _amount(description: str) -> Schema:
    return {"type": "integer", "description": description, "minimum": 0, "maximum": MAX_INTEGER}


WRITABLE: dict[str, Schema] = {
    "name": _text("The name of the image", maxLength=MAX_NAME),
    "visibility": {"type": "string", "description": "Who may see the image", "enum": list(VISIBILITIES)},
    "protected": {"type": "boolean", "description": "Whether the image cannot be deleted"},
    "os_hidden": {"type": "boolean", "description": "Whether the image is left out of ordinary lists"},
    "owner": _text("The project that the image belongs to", maxLength=MAX_NAME),
    "disk_format": _text("The format of the disk", enum=[None, *DISK_FORMATS]),
    "container_format": _text("The format of the container of the disk", enum=[None, *CONTAINER_FORMATS]),
    "min_disk": _amount("The disk that a server needs, in GB"),
    "min_ram": _amount("The memory that a server needs, in MB"),
    "tags": {
        "type": "array",
        "description": "The tags of the image",
        "items": {"type": "string", "maxLength": MAX_NAME},
    },
}

READ_ONLY: dict[str, Schema] = {
    "status": _read_only("The status of the image", enum=list(STATUSES)),
    "created_at": _read_only("When the image was created"),
    "updated_at": _read_only("When the image was last changed"),
    "checksum": _read_only("MD5 of the data", type=["null", "string"], maxLength=32),
    "os_hash_algo": _read_only("The algorithm of os_hash_value", type=["null", "string"], maxLength=64),
    "os_hash_value": _read_only("The data's digest in hexadecimal", type=["null", "string"], maxLength=128),
    "size": _read_only("The size of the data in bytes", type=["null", "integer"]),
    "virtual_size": _read_only("The size of the disk in bytes", type=["null", "integer"]),
    "direct_url": _read_only("Where the store keeps the data; never shown"),
    "self": _read_only("The path of the image"),
    "file": _read_only("The path of the image's data"),
    "schema": _read_only("The path of this schema"),
    "stores": _read_only("Where the data is kept"),
}

ID: Schema = {"type": "string", "description": "The image's id; the client may choose it", "pattern": UUID}

# Properties with a schema of their own; any other is a string.
KNOWN_PROPERTIES: dict[str, Schema] = {
    "kernel_id": _text("The image to boot as a kernel", pattern=UUID, is_base=False),
    "ramdisk_id": _text("The image to boot as a ramdisk", pattern=UUID, is_base=False),
    **{
        name: {"type": "string", "description": description, "is_base": False}
        for name, description in {
            "architecture": "The processor architecture of the guest",
            "os_distro": "The distribution of the guest's operating system",
            "os_version": "The version of the guest's operating system",
            "instance_uuid": "The server that the image was made from",
        }.items()
    },
}
_ANY_PROPERTY: Schema = {"type": "string", "maxLength": MAX_VALUE}

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "null": (type(None),),
}


def check(name: str, value: Any, schema: Schema | None = None) -> Any:
    """Return the value of an attribute or property; raise Invalid if it does not match its schema."""
    rules = schema or WRITABLE.get(name) or KNOWN_PROPERTIES.get(name) or _ANY_PROPERTY
    shown = name[:64]
    kinds = rules["type"] if isinstance(rules["type"], list) else [rules["type"]]
    if not any(type(value) in _TYPES[kind] for kind in kinds):
        raise Invalid(f"Invalid value for attribute '{shown}': it must be of type {' or '.join(kinds)}.")
    if "enum" in rules and value not in rules["enum"]:
        allowed = ", ".join(str(item) for item in rules["enum"] if item is not None)
        raise Invalid(f"Invalid value for attribute '{shown}': it must be one of {allowed}.")
    if isinstance(value, str):
        if len(value) > rules.get("maxLength", MAX_VALUE):
            longest = rules.get("maxLength", MAX_VALUE)
            raise Invalid(f"Invalid value for attribute '{shown}': it may have {longest} characters.")
        if "pattern" in rules and not re.fullmatch(rules["pattern"], value):
            raise Invalid(f"Invalid value for attribute '{shown}': it must be a UUID.")
    elif isinstance(value, list):
        for item in value:
            check(name, item, rules["items"])
    elif type(value) is int and not rules.get("minimum", value) <= value <= rules.get("maximum", value):
        span = f"{rules['minimum']} to {rules['maximum']}"
        raise Invalid(f"Invalid value for attribute '{shown}': it must be from {span}.")
    return value


def check_writable(name: str) -> None:
    """Raise an error for a name that clients may not write or that no property can have."""
    if name in READ_ONLY or name == "id":
        raise Forbidden(f"Attribute '{name}' is set by the service, not by clients.")
    if name == "locations" or name.startswith(RESERVED_PREFIX):
        raise Forbidden(f"Attribute '{name[:64]}' is reserved.")
    if not name or len(name) > MAX_NAME:
        raise Invalid(f"Invalid name of a property: it must have 1 to {MAX_NAME} characters.")


def check_amounts(
    tags: tuple[str, ...], properties: Mapping[str, Any], before: Mapping[str, Any], most: int = MAX_PROPERTY_BYTES
) -> None:
    """Raise TooLarge if an image has too many tags or properties, or if its properties have too many bytes.

    These are too many if they are more than `most`, and more than the image had (`before`).
    """
    if len(tags) > MAX_TAGS:
        raise TooLarge(f"An image may have {MAX_TAGS} tags, not {len(tags)}.")
    if len(properties) > MAX_PROPERTIES:
        raise TooLarge(f"An image may have {MAX_PROPERTIES} properties, not {len(properties)}.")
    size = _property_bytes(properties)
    if size > most and size > _property_bytes(before):  # an image from before this limit may keep what it has
        raise TooLarge(f"The properties of an image may have {most} bytes, not {size}.")


def _property_bytes(properties: Mapping[str, Any]) -> int:
    return sum(len(name.encode()) + len((value or "").encode()) for name, value in properties.items())


def unique(tags: list[str]) -> tuple[str, ...]:
    """Return the tags sorted, each once."""
    return tuple(sorted(set(tags)))


_IMAGE: Schema = {
    "name": "image",
    "properties": {"id": ID, **WRITABLE, **READ_ONLY, **KNOWN_PROPERTIES},
    "additionalProperties": {"type": "string"},
    "links": [
        {"rel": "self", "href": "{self}"},
        {"rel": "enclosure", "href": "{file}"},
        {"rel": "describedby", "href": "{schema}"},
    ],
}
_MEMBER: Schema = {
    "name": "member",
    "properties": {
        "member_id": {"type": "string", "description": "The project that the image is shared with"},
        "image_id": {"type": "string", "description": "The image", "pattern": UUID},
        "status": {
            "type": "string",
            "description": "Whether the project accepts the image",
            "enum": list(MEMBER_STATUSES),
        },
        "created_at": {"type": "string", "description": "When the image was shared"},
        "updated_at": {"type": "string", "description": "When the status last changed"},
        "schema": {"type": "string", "readOnly": True},
    },
}
_TASK: Schema = {
    "name": "task",
    "properties": {
        "id": {"type": "string", "description": "The task's id", "pattern": UUID},
        "type": {"type": "string", "enum": list(TASK_TYPES)},
        "status": {"type": "string", "enum": list(TASK_STATUSES)},
        "input": {"type": ["null", "object"], "description": "What the task was told"},
        "result": {"type": ["null", "object"], "description": "What came of it"},
        "owner": {"type": "string", "description": "The project that the task belongs to"},
        "message": {"type": "string", "description": "Why the task failed"},
        "image_id": {"type": "string", "description": "The image", "pattern": UUID},
        "user_id": {"type": "string", "description": "The user who sent the request"},
        "request_id": {"type": "string", "description": "The request"},
        "expires_at": {"type": ["null", "string"], "description": "When the task is forgotten"},
        "created_at": {"type": "string", "description": "When the task began"},
        "updated_at": {"type": "string", "description": "When the task last changed"},
        "self": {"type": "string", "readOnly": True},
        "schema": {"type": "string", "readOnly": True},
    },
}


def _collection(name: str, of: Schema) -> Schema:
    return {
        "name": name,
        "properties": {
            name: {"type": "array", "items": of},
            "first": {"type": "string"},
            "next": {"type": "string"},
            "schema": {"type": "string"},
        },
        "links": [
            {"rel": "first", "href": "{first}"},
            {"rel": "next", "href": "{next}"},
            {"rel": "describedby", "href": "{schema}"},
        ],
    }


SCHEMAS: dict[str, Schema] = {
    "image": _IMAGE,
    "images": _collection("images", _IMAGE),
    "member": _MEMBER,
    "members": _collection("members", _MEMBER),
    "task": _TASK,
    "tasks": _collection("tasks", _TASK),
}
