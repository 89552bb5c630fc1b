"""Claims: the resources of a node that an instance holds. A claim is made before the build and released if it fails."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

_NAMES = {"VCPU": "vcpus", "MEMORY_MB": "MB of memory", "DISK_GB": "GB of disk"}


class Holder(Protocol):
    """What a claim is made on: a resource tracker."""

    def release(self, uuid: str) -> None:
        """Release the resources of an instance."""


class HeldClaim:
    """What an instance holds, as a context manager: it is released if the body fails, and stays if it succeeds."""

    __slots__ = ("_holder", "_uuid")

    def __init__(self, holder: Holder, uuid: str) -> None:
        self._holder = holder
        self._uuid = uuid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._holder.release(self._uuid)


def shortage(wanted: Mapping[str, int], used: Mapping[str, int], limits: Mapping[str, float]) -> str | None:
    """Return which resource does not suffice, or None if everything fits; a class without a limit always fits."""
    for name, amount in wanted.items():
        limit = limits.get(name)
        if limit is not None and used.get(name, 0) + amount > limit:
            left = max(0, int(limit) - used.get(name, 0))
            return f"{amount} {_NAMES.get(name, name)} asked for, {left} left"
    return None
