"""The standard traits and resource classes of OpenStack: names that every cloud knows, as data.

The file has the names of os-traits 3.9.0 and of os-resource-classes 1.1.0.
"""

import functools
import re
from importlib import resources
from typing import Final

import msgspec

SHARES_VIA_AGGREGATE: Final = "MISC_SHARES_VIA_AGGREGATE"
"""The trait of a provider whose resources the members of its aggregates may use, too."""

CUSTOM: Final = "CUSTOM_"
"""How the names of traits and resource classes begin that a cloud adds itself."""

CUSTOM_NAME: Final = re.compile(r"CUSTOM_[A-Z0-9_]+")


class _Names(msgspec.Struct, frozen=True):
    resource_classes: tuple[str, ...]
    traits: frozenset[str]


@functools.cache
def _names() -> _Names:
    return msgspec.json.decode((resources.files(__package__) / "standard.json").read_bytes(), type=_Names)


def standard_traits() -> frozenset[str]:
    """Return the names of the standard traits."""
    return _names().traits


def standard_classes() -> tuple[str, ...]:
    """Return the names of the standard resource classes, in the order in which OpenStack added them."""
    return _names().resource_classes
