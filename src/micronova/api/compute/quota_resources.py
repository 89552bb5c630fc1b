"""The resources that have a limit, by the API's names, and the microversions up to which old ones are shown.

The network's resources are relics of the time when Nova had networks of its own: nothing limits them here.
"""

from collections.abc import Mapping

from msgspec import UNSET, UnsetType

from micronova.api.inputs import Body, Whole, whole

NETWORK = ("fixed_ips", "floating_ips", "security_group_rules", "security_groups")
FILES = ("injected_file_content_bytes", "injected_file_path_bytes", "injected_files")
GROUPS = ("server_groups", "server_group_members")
ALWAYS = ("instances", "cores", "ram", "metadata_items", "key_pairs", *GROUPS)


def shown(minor: int, network_until: int) -> list[str]:
    """Return the resources that exist at a microversion; `network_until` is the last with the network's."""
    names = list(ALWAYS)
    if minor <= network_until:
        names += NETWORK
    if minor <= 56:
        names += FILES
    return names


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


def pick(names: list[str], limits: Mapping[str, int]) -> dict[str, int]:
    """Return the limits of these resources."""
    return {name: limits.get(name, -1) for name in names}
