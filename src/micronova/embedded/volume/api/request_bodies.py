"""Request bodies: shared types of fields, and functions that read them.

Clients write numbers and flags as JSON values or as text. Both are accepted, as in Cinder.
"""

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from micronova.embedded.volume.api.listing import QUERY_RULES, FalseWord, TrueWord
from micronova.embedded.volume.model import MAX_SIZE, ResourceColumns
from micronova.http import validation
from micronova.objects.errors import Invalid

K = TypeVar("K")

Text = Annotated[str, Meta(max_length=255)]
Uuid = Annotated[str, Meta(title="a UUID", pattern=r"^[0-9a-fA-F]{8}-?([0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}\Z")]
Flag = bool | TrueWord | FalseWord
Size = Annotated[int, Meta(ge=1, le=MAX_SIZE)] | Annotated[str, Meta(title="a whole number", pattern=r"^[0-9]{1,10}\Z")]
Key = Annotated[
    str, Meta(title="1 to 255 letters, digits, spaces and - _ : . /", pattern=r"^[a-zA-Z0-9\-_:. /]{1,255}\Z")
]
MOST_ITEMS = 128
Items = Annotated[dict[Key, Text], Meta(max_length=MOST_ITEMS)]
"""Metadata, image metadata and QoS specs."""

# What Unicode calls "other" (control and format characters, surrogates, private use) and line separators.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u0600-\u0605\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\uf8ff\ufeff]"
)


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A body, or an object in one; unknown fields are refused."""


class NewNames(Body, kw_only=True):
    """The name and the description of a new resource. Old clients write `display_` before both."""

    name: Text | None = None
    description: Text | None = None
    display_name: Text | None = None
    display_description: Text | None = None

    def given_name(self) -> str | None:
        """Return the name."""
        return stripped(self.display_name if self.name is None else self.name)

    def given_description(self) -> str | None:
        """Return the description."""
        return stripped(self.display_description if self.description is None else self.description)


class NameChanges(Body, kw_only=True):
    """The new name and description of a resource. Old clients write `display_` before both."""

    name: Text | None | UnsetType = UNSET
    description: Text | None | UnsetType = UNSET
    display_name: Text | None | UnsetType = UNSET
    display_description: Text | None | UnsetType = UNSET

    def changed_names(self) -> ResourceColumns:
        """Return those of name and description that change."""
        name = self.display_name if isinstance(self.name, UnsetType) else self.name
        description = self.display_description if isinstance(self.description, UnsetType) else self.description
        changed: ResourceColumns = {}
        if not isinstance(name, UnsetType):
            changed["name"] = stripped(name)
        if not isinstance(description, UnsetType):
            changed["description"] = stripped(description)
        return changed


def truth(value: bool | str) -> bool:
    """Return a `Flag` as a bool."""
    return value if isinstance(value, bool) else value.lower() in QUERY_RULES.true


def gibibytes(value: int | str, field: str = "size") -> int:
    """Return a `Size`; raise Invalid."""
    number = int(value)
    if not 1 <= number <= MAX_SIZE:
        raise Invalid(f"Invalid input for field/attribute {field}: {number} is not from 1 to {MAX_SIZE}.")
    return number


def stripped(value: str | None) -> str | None:
    """Return a name or a description without white space around it, as Cinder keeps it."""
    return None if value is None else value.strip()


def required_name(value: str, field: str = "name") -> str:
    """Return a name that must not be empty; raise Invalid."""
    name = value.strip()
    if not name or _UNPRINTABLE.search(name):
        raise Invalid(f"Invalid input for field/attribute {field}: it must have printable characters.")
    return name


def identifier(value: str) -> str:
    """Return the id of a project or the name of a class in a path; raise Invalid if no row can have it."""
    if len(value) > 255:
        raise Invalid("Invalid input: an id may have at most 255 characters.")
    return value


def uuid(value: str) -> str:
    """Return a `Uuid` in the form that rows have."""
    text = value.lower().replace("-", "")
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def relaxed(given: dict[str, Any], kind: type[K], minor: int, strict_since: int) -> K:
    """Return a body; unknown fields are ignored at microversions before `strict_since`, as Cinder does there."""
    found: K = validation.body(msgspec.json.encode(given), kind, minor, ignore_unknown=minor < strict_since)
    return found
