"""Filters and weighers that other packages bring by entry point; a faulty one is reported and skipped."""

import logging
from collections.abc import Callable
from importlib import metadata
from typing import Any

log = logging.getLogger(__name__)


def load(group: str, make: Callable[[Any], Any], names: set[str] | None = None) -> dict[str, Any]:
    """Give what `make` makes of each entry point of a group, by name; only those named, or all."""
    found: dict[str, Any] = {}
    for entry in metadata.entry_points(group=group):
        if names is not None and entry.name not in names:
            continue
        try:
            found[entry.name] = make(entry.load())
        except Exception:  # whatever a stranger's code may raise while it is imported or made
            log.exception("%s %s of %s is faulty and is skipped.", group, entry.name, entry.value)
    return found


def known(group: str) -> set[str]:
    """Give the names that are registered in a group, faulty ones too."""
    return {entry.name for entry in metadata.entry_points(group=group)}
