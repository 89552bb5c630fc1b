"""Uuids of the Placement API, which clients may write with and without hyphens."""

import uuid
from collections.abc import Mapping
from typing import Final, TypeVar

from micronova.objects.errors import Invalid

T = TypeVar("T")
_LONGEST_SHOWN: Final = 300


def is_uuid(text: object) -> bool:
    """Return whether a text is a uuid, with or without hyphens."""
    if not isinstance(text, str):
        return False
    try:
        return str(uuid.UUID(text)).replace("-", "") == text.replace("-", "").replace("urn:uuid:", "").lower()
    except ValueError:
        return False


def normal_uuid(text: str) -> str:
    """Return a uuid as it is stored, in one of the forms in which clients may write it; raise Invalid if it is none."""
    if not is_uuid(text):
        raise Invalid(f"{text[:_LONGEST_SHOWN]!r} is not a uuid.")
    return str(uuid.UUID(text))


def with_normal_uuids(given: Mapping[str, T]) -> dict[str, T]:
    """Return values by their uuids as these are stored; raise Invalid if a key is no uuid, or two are the same."""
    found = {normal_uuid(key): value for key, value in given.items()}
    if len(found) != len(given):
        raise Invalid("A uuid is there twice, written in two ways.")
    return found
