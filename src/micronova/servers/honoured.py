"""What the enabled filters and the settings of the scheduler take into account: for the rules of requests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


def _reads_nothing(name: str) -> bool:
    return False


@dataclass(frozen=True)
class Honoured:
    """What the enabled filters take into account."""

    hints: frozenset[str] = frozenset()
    extra_specs: frozenset[str] = frozenset()  # namespaces, without a colon
    # They raise Invalid for malformed hints and extra specs.
    checks: tuple[Callable[[Mapping[str, Sequence[str]], Mapping[str, str]], None], ...] = ()
    # Whether a filter looks at an extra spec, and at a property of an image, on whatever hosts.
    reads_extra_spec: Callable[[str], bool] = _reads_nothing
    reads_property: Callable[[str], bool] = _reads_nothing
    enabled: frozenset[str] = frozenset()  # filters, and settings of the section `scheduler` that are on


HonouredBy = Callable[[], Honoured]
"""Called when a request first depends on it: filters need numpy, which is large."""
