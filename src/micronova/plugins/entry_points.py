"""Loading plugins: what other packages offer as entry points. A faulty plugin is reported and skipped."""

import logging
from collections.abc import Callable, Container, Iterable
from importlib import metadata
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


def load(group: str, make: Callable[[Any], T], names: Container[str] | None = None) -> list[tuple[str, T]]:
    """Return the name of each entry point of a group with what `make` returns for the loaded object.

    `names` limits this to some entry points. Several may have the same name.
    """
    found = []
    for entry in installed(group):
        if names is not None and entry.name not in names:
            continue
        try:
            found.append((entry.name, make(entry.load())))
        except Exception:  # code of others may raise anything while it is imported or called
            log.exception("the plugin %s (%s) of the group %s failed and is skipped", title(entry), entry.value, group)
    return found


def installed(group: str) -> Iterable[metadata.EntryPoint]:
    """Return the entry points of a group."""
    return metadata.entry_points(group=group)


def title(entry: metadata.EntryPoint) -> str:
    """Return the name of an entry point with its package, as operators should read it."""
    package = entry.dist
    return f"{entry.name} of {package.name} {package.version}" if package else entry.name


def registered(group: str) -> set[str]:
    """Return the names of a group's entry points, without loading them."""
    return {entry.name for entry in metadata.entry_points(group=group)}
