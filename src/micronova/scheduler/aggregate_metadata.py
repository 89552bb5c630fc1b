"""What the aggregates of a host say together: values of one key, which several aggregates may have.

Aggregates of a host do not exclude each other. Where a key lists what is allowed, the host allows what any of them
lists; where it is a number, the lowest one counts, as in Nova.
"""

import logging
import math
from collections.abc import Mapping
from typing import Final

from micronova.scheduler.host_columns import Aggregates

log = logging.getLogger(__name__)

PROJECT_KEY: Final = "filter_tenant_id"
"""How the keys begin whose values are projects that an aggregate is for."""


def values_of(aggregates: Aggregates, key: str) -> frozenset[str]:
    """Return the values of a key; a value may be a list with commas."""
    return frozenset(part.strip() for _, metadata in aggregates if key in metadata for part in metadata[key].split(","))


def names_project(metadata: Mapping[str, str], project: str) -> bool:
    """Return whether an aggregate with this metadata names a project; a value is one project, as in Placement."""
    return any(key.startswith(PROJECT_KEY) and value == project for key, value in metadata.items())


def lowest_of(aggregates: Aggregates, key: str, default: float, *, whole: bool = False) -> float:
    """Return the lowest number of a key, the default if no aggregate has it or one is not a number, which is logged."""
    found = [metadata[key] for _, metadata in aggregates if key in metadata]
    try:
        numbers = [float(int(text) if whole else text) for text in found]
        if not all(map(math.isfinite, numbers)):
            raise ValueError
    except ValueError:
        log.warning("the metadata %s of an aggregate is not a number: %s; %g counts instead", key, found, default)
        return default
    return min(numbers, default=default)
