"""All hosts with their use, for operators: what a scheduler answers, and what a map of the fleet is drawn from."""

import re
from typing import Final, Literal

import msgspec

LONGEST_NAME: Final = 64  # characters of the name of a host: the answer about 100,000 hosts is one message

NOT_REFUSED, NOT_CONSIDERED = -1, -2  # instead of the number of a filter
State = Literal["up", "down", "disabled"]


_PARTS = re.compile(r"([^0-9]*)([0-9]*)")


def by_number(name: str) -> list[tuple[str, int]]:
    """Return a key by which host-9 comes before host-10."""
    return [(text, int(digits or -1)) for text, digits in _PARTS.findall(name)]


class Use(msgspec.Struct, frozen=True, array_like=True):
    """How much of a resource is used, and how much may be."""

    used: int
    capacity: int

    @property
    def share(self) -> float:
        """The used part: 1 if all is used, and more if the capacity was lowered; 1 if there is none."""
        return self.used / self.capacity if self.capacity > 0 else 1.0


class HostUse(msgspec.Struct, frozen=True, array_like=True):
    """One compute node."""

    host: str
    zone: int  # in `Fleet.zones`
    state: State
    servers: int
    vcpus: Use
    memory_mb: Use
    disk_gb: Use
    refused_by: int = NOT_REFUSED  # in `Fleet.filters`: the filter that removed it in a dry run
    chosen: int = 0  # servers that a dry run would place there


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """All hosts, in the order of their zones and names."""

    zones: tuple[str, ...]
    hosts: tuple[HostUse, ...]
    filters: tuple[str, ...] = ()


class ListHosts(msgspec.Struct, frozen=True, kw_only=True):
    """The question for all hosts."""
