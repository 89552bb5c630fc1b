"""Conditions on versions, as images write them: `>=6.0, <8`, `>= 6.0.0rc1`."""

import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from packaging.version import Version

_COMPARE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_PREDICATE: Final = re.compile(r"\s*(<=|>=|==|!=|<|>)\s*(\S+)\s*")
_LONGEST: Final = 255
Predicates = tuple[tuple[str, Version], ...]


@lru_cache(maxsize=256)
def parse_predicates(text: str) -> Predicates:
    """Return the conditions, which are separated by commas; raise ValueError if the text is something else."""
    if len(text) > _LONGEST:
        raise ValueError("too long")
    found = []
    for part in text.split(","):
        parsed = _PREDICATE.fullmatch(part)
        if parsed is None:
            raise ValueError(f"not a condition on a version: {part!r}")
        found.append((parsed[1], Version(parsed[2])))
    return tuple(found)


def version_fulfils(version: int, predicates: str) -> bool:
    """Return whether a version such as 6002000 (6.2.0) fulfils predicates such as ">=6.0, <6.2"."""
    have = Version(f"{version // 1_000_000}.{version // 1000 % 1000}.{version % 1000}")
    try:
        return all(_COMPARE[name](have, wanted) for name, wanted in parse_predicates(predicates))
    except ValueError:  # of an earlier version, which checked less
        return False
