"""Fields of the compute API's bodies and query strings: their types, and functions that read and check them.

Clients write numbers and flags as JSON values or as strings. Both are accepted.
"""

import re
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from micronova.http.paging import parse_iso
from micronova.http.versions import since
from micronova.objects.errors import Invalid
from micronova.objects.guest_properties import FALSE_WORDS, TRUE_WORDS

_SECOND = 1_000_000  # microseconds

T = TypeVar("T")

STRICT = since(102)  # from 2.102 on every route refuses query parameters that it does not know
MAX_INT = 0x7FFFFFFF


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base class of request bodies."""


class Query(msgspec.Struct, kw_only=True):
    """Base class of query strings."""


class NoQuery(Query):
    """For routes that take no query parameters."""


class Paged(Query):
    """Paging by marker."""

    limit: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    marker: str | UnsetType = UNSET

    def page(self, most: int) -> tuple[int, str | None]:
        """Return the limit, at most `most`, and the marker."""
        limit = most if isinstance(self.limit, UnsetType) else min(self.limit, most)
        return limit, None if isinstance(self.marker, UnsetType) else self.marker


class Slice(Query):
    """Paging by number."""

    limit: Annotated[int, Meta(ge=0)] = 0
    offset: Annotated[int, Meta(ge=0)] = 0

    def cut(self, found: Sequence[T], most: int) -> Sequence[T]:
        """Return the page, of at most `most` items; a limit of 0 is none."""
        return found[self.offset : self.offset + min(self.limit or most, most)]


_TrueWord = Literal["True", "TRUE", "true", "1", "ON", "On", "on", "YES", "Yes", "yes"]
_FalseWord = Literal["False", "FALSE", "false", "0", "OFF", "Off", "off", "NO", "No", "no"]
_TRUE = get_args(_TrueWord)
Flag = bool | Literal[_TrueWord, _FalseWord]
Whole = int | Annotated[str, Meta(title="a whole number", pattern=r"^-?[0-9]+\Z", max_length=20)]  # as clients send
Text = Annotated[str, Meta(min_length=1, max_length=255)]
Owner = Annotated[str, Meta(max_length=64)]  # the id of a user or project
HostName = Annotated[
    str, Meta(title="letters, digits and . - _", pattern=r"^[a-zA-Z0-9\-._]+\Z", min_length=1, max_length=255)
]
Key = Annotated[
    str, Meta(title="1 to 255 letters, digits, spaces and - _ : .", pattern=r"^[a-zA-Z0-9\-_:. ]{1,255}\Z")
]  # of metadata and extra specs

# What Unicode calls "other" (control and format characters, surrogates, private use) and line separators.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u0600-\u0605\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\uf8ff\ufeff]"
)


def flag(value: Any) -> bool:
    """Return a checked `Flag` as a bool."""
    return value is True or value in _TRUE


def boolean(value: Any, field: str, noun: str = "query parameter") -> bool:
    """Read a flag; raise Invalid. For a field of a body, `noun` is "field/attribute"."""
    text = str(value).strip().lower()
    if text in TRUE_WORDS:
        return True
    if text in FALSE_WORDS:
        return False
    raise Invalid(f"Invalid input for {noun} {field}: {str(value)[:64]!r} is neither true nor false.")


def integer(value: Any, field: str) -> int:
    """Read a number; raise Invalid."""
    try:
        return int(value)
    except (TypeError, ValueError):
        raise Invalid(f"Invalid input for field/attribute {field}: {str(value)[:64]!r} is not a number.") from None


def whole(value: Any, field: str, least: int = 0, most: int = MAX_INT) -> int:
    """Read a number from `least` to `most`; raise Invalid."""
    number = integer(value, field)
    if not least <= number <= most:
        raise Invalid(f"Invalid input for field/attribute {field}: {number} is not from {least} to {most}.")
    return number


def name(value: str, field: str = "name", strip: bool = False, forbidden: str = "") -> str:
    """Check a name: printable characters, no white space around it (/v2 strips it: `strip`); raise Invalid."""
    if strip:
        value = value.strip()
    wrong = _UNPRINTABLE.search(value) or any(character in value for character in forbidden)
    if not value or value != value.strip() or wrong:
        but = f" except {forbidden}" if forbidden else ""
        raise Invalid(
            f"Invalid input for field/attribute {field}: {value[:64]!r} must have printable characters{but} "
            f"and must not begin or end with white space."
        )
    return value


def printable(value: str | None, field: str) -> str | None:
    """Check a text that may be empty; raise Invalid."""
    if value and _UNPRINTABLE.search(value):
        raise Invalid(f"Invalid input for field/attribute {field}: it must have printable characters only.")
    return value


def numeric_id(value: str) -> int | None:
    """Read an id that is a number, None if it is not a number or too large for an id."""
    return int(value) if value.isascii() and value.isdecimal() and len(value) <= 9 else None


def is_uuid(value: str) -> bool:
    """Return whether a text is a uuid, with or without dashes."""
    try:
        return str(uuid.UUID(value)).replace("-", "") == value.lower().strip("{}").replace("-", "")
    except ValueError:
        return False


def moment(value: str, field: str) -> int:
    """Read an ISO 8601 time (UTC if it names no zone) as microseconds since 1970 (UTC); raise Invalid."""
    try:
        return parse_iso(value.strip())
    except ValueError:
        wrong = f"{value[:64]!r} is not an ISO 8601 time"
        raise Invalid(f"Invalid input for query parameter {field}: {wrong}.") from None


def last_moment(value: str, field: str) -> int:
    """Read the end of a span of time: with a time in whole seconds, the span has this whole second.

    Answers show times without fractions, and what changed at the time that is shown is not after it.
    """
    found = moment(value, field)
    return found if found % _SECOND else found + _SECOND - 1
