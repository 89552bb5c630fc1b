"""The resources that have a limit, by the API's names, and the microversions up to which old ones are shown.

The network's resources are relics of the time when Nova had networks of its own: nothing limits them here.
"""

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import UNSET, UnsetType

from micronova.api.inputs import Body, Whole, whole
from micronova.api.view import Field, Getter, View
from micronova.http.versions import Range, until

NETWORK = ("fixed_ips", "floating_ips", "security_group_rules", "security_groups")
FILES = ("injected_file_content_bytes", "injected_file_path_bytes", "injected_files")
GROUPS = ("server_groups", "server_group_members")
ALWAYS = ("instances", "cores", "ram", "metadata_items", "key_pairs", *GROUPS)


_EVER = Range()


def _limit(name: str) -> Getter:
    return lambda limits, _: limits.get(name, -1)


def view(
    network_until: int, *more: Field, get: Callable[[str], Getter] = _limit, kind: Any = int, groups: Range = _EVER
) -> View:
    """Return the view of limits; `network_until` is the last microversion with the network's resources.

    `get` makes the getter of a resource, `kind` is the type of what it returns.
    """

    def of(names: Iterable[str], versions: Range) -> list[Field]:
        return [Field(name, get(name), versions, type=kind) for name in names]

    always = [name for name in ALWAYS if name not in GROUPS]
    fields = [*of(always, _EVER), *of(GROUPS, groups), *of(NETWORK, until(network_until)), *of(FILES, until(56))]
    return View(*more, *fields)


class Amounts(Body):
    """Limits to set; subclasses declare the microversions of the old ones."""

    instances: Whole | UnsetType = UNSET
    cores: Whole | UnsetType = UNSET
    ram: Whole | UnsetType = UNSET
    metadata_items: Whole | UnsetType = UNSET
    key_pairs: Whole | UnsetType = UNSET
    server_groups: Whole | UnsetType = UNSET
    server_group_members: Whole | UnsetType = UNSET
    fixed_ips: Whole | UnsetType = UNSET
    floating_ips: Whole | UnsetType = UNSET
    security_group_rules: Whole | UnsetType = UNSET
    security_groups: Whole | UnsetType = UNSET
    injected_file_content_bytes: Whole | UnsetType = UNSET
    injected_file_path_bytes: Whole | UnsetType = UNSET
    injected_files: Whole | UnsetType = UNSET

    def given(self) -> dict[str, int]:
        """Return the limits that the request sets; -1 is unlimited."""
        values = ((name, getattr(self, name)) for name in (*ALWAYS, *NETWORK, *FILES))
        return {name: whole(value, name, -1) for name, value in values if value is not UNSET}
