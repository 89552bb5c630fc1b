"""Paging and links, alike in all services."""

import functools
import urllib.parse
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime


def next_link(url: str, query: Mapping[str, Sequence[str]], marker: str, limit: int | None = None) -> str:
    """Return the link to the page after `marker`: the same query with another marker."""
    pairs = [(k, v) for k, values in query.items() if k not in ("marker", "limit") for v in values]
    if limit is not None:
        pairs.append(("limit", str(limit)))
    elif "limit" in query:
        pairs.append(("limit", query["limit"][-1]))
    pairs.append(("marker", marker))
    return f"{url}?{urllib.parse.urlencode(pairs)}"


def iso(micros: int | None) -> str | None:
    """Return a time as OpenStack writes it: 2026-11-15T12:00:00Z."""
    return None if micros is None else _second(micros // 1_000_000) + "Z"


def iso_micros(micros: int | None) -> str | None:
    """Return a time as OpenStack's older resources write it: 2026-11-15T12:00:00.000000."""
    return None if micros is None else f"{_second(micros // 1_000_000)}.{micros % 1_000_000:06d}"


@functools.lru_cache(maxsize=8192)
def _second(seconds: int) -> str:
    """Write a second; lists have few different ones."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
