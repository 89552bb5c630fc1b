"""The standard traits and resource classes of OpenStack: names that every cloud knows, as data.

The file has the names of os-traits 3.9.0 and of os-resource-classes 1.1.0.
"""

import functools
import re
from collections.abc import Collection
from importlib import resources
from typing import Final

import msgspec

SHARES_VIA_AGGREGATE: Final = "MISC_SHARES_VIA_AGGREGATE"
"""The trait of a provider whose resources the members of its aggregates may use, too."""

CUSTOM: Final = "CUSTOM_"
"""How the names of traits and resource classes begin that a cloud adds itself."""

CUSTOM_NAME: Final = re.compile(r"CUSTOM_[A-Z0-9_]+")

NODE_CLASSES: Final = ("VCPU", "PCPU", "MEMORY_MB", "DISK_GB")
"""Resource classes that a server always takes of its compute node itself."""

HOST_TRAIT: Final = "CUSTOM_HOST_"
"""How the names of custom traits begin that a host may report; operators set all others by the Placement API."""

COMPUTE_NODE: Final = "COMPUTE_NODE"
"""The trait that tells compute nodes from other providers."""

OWNER: Final = "OWNER_NOVA"
"""The trait of providers whose inventories are those of compute. No host reports it: every compute node has it."""

STATUS_DISABLED: Final = "COMPUTE_STATUS_DISABLED"
"""The trait of compute nodes whose service is disabled. It follows the service, and no host reports it."""

SECURE_BOOT: Final = "COMPUTE_SECURITY_UEFI_SECURE_BOOT"
"""The trait of compute nodes whose guests can have a firmware with secure boot. Flavors and images that ask for it
require this trait."""

_REPORTED: Final = ("COMPUTE_", "HW_", "STORAGE_")
_MOST_HOST_TRAITS: Final = 64
_LONGEST_TRAIT: Final = 255


class _Names(msgspec.Struct, frozen=True):
    resource_classes: tuple[str, ...]
    traits: frozenset[str]


@functools.cache
def _names() -> _Names:
    return msgspec.json.decode((resources.files(__package__) / "standard.json").read_bytes(), type=_Names)


def standard_traits() -> frozenset[str]:
    """Return the names of the standard traits."""
    return _names().traits


def reported_traits(traits: Collection[str]) -> list[str]:
    """Return, sorted, those of the traits that a host may give its own node.

    These are standard ones that describe hardware and hypervisor, and some custom ones of hosts. Flavors require or
    forbid the others to tell hosts that operators trust from those that they do not.
    """
    standard = {each for each in traits if each in standard_traits() and each.startswith(_REPORTED)} - {STATUS_DISABLED}
    own = sorted(
        each
        for each in set(traits)
        if each.startswith(HOST_TRAIT) and CUSTOM_NAME.fullmatch(each) and len(each) <= _LONGEST_TRAIT
    )
    return sorted({*standard, *own[:_MOST_HOST_TRAITS]})


def standard_classes() -> tuple[str, ...]:
    """Return the names of the standard resource classes, in the order in which OpenStack added them."""
    return _names().resource_classes
