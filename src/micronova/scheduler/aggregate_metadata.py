"""What the aggregates of a host say together: values of one key, which several aggregates may have.

Aggregates of a host do not exclude each other. Where a key lists what is allowed, the host allows what any of them
lists; where it is a number, the lowest one counts, as in Nova.
"""

import logging
import math

from micronova.scheduler.host_columns import Aggregates

log = logging.getLogger(__name__)


def values_of(aggregates: Aggregates, key: str) -> frozenset[str]:
    """Return the values of a key; a value may be a list with commas."""
    return frozenset(part.strip() for _, metadata in aggregates if key in metadata for part in metadata[key].split(","))


def lowest_of(aggregates: Aggregates, key: str, default: float, *, whole: bool = False) -> float:
    """Return the lowest number of a key, the default if no aggregate has it or one is no number, which is logged."""
    found = [metadata[key] for _, metadata in aggregates if key in metadata]
    try:
        numbers = [float(int(text) if whole else text) for text in found]
        if not all(map(math.isfinite, numbers)):
            raise ValueError
    except ValueError:
        log.warning("the metadata %s of an aggregate is no number: %s; %g counts instead", key, found, default)
        return default
    return min(numbers, default=default)
