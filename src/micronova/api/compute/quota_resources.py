"""The resources that have a limit, by the API's names, and the microversions up to which old ones are shown.

The network's resources are relics of the time when Nova had networks of its own: nothing limits them here.
"""

from collections.abc import Mapping

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

    instances: Whole | None = None
    cores: Whole | None = None
    ram: Whole | None = None
    metadata_items: Whole | None = None
    key_pairs: Whole | None = None
    server_groups: Whole | None = None
    server_group_members: Whole | None = None
    fixed_ips: Whole | None = None
    floating_ips: Whole | None = None
    security_group_rules: Whole | None = None
    security_groups: Whole | None = None
    injected_file_content_bytes: Whole | None = None
    injected_file_path_bytes: Whole | None = None
    injected_files: Whole | None = None

    def given(self) -> dict[str, int]:
        """Return the limits that the request sets; -1 is unlimited."""
        values = ((name, getattr(self, name)) for name in (*ALWAYS, *NETWORK, *FILES))
        return {name: whole(value, name, -1) for name, value in values if value is not None}


def pick(names: list[str], limits: Mapping[str, int]) -> dict[str, int]:
    """Return the limits of these resources."""
    return {name: limits.get(name, -1) for name in names}
