"""Links to pages, and times, as all services write and read them."""

import functools
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from micronova.objects.clock import micros
from micronova.objects.errors import Invalid

MOST_FILTER_VALUES: Final = 128
"""Values of a filter of which each is a condition of its own in the statement: as many as an image has tags."""


def next_link(url: str, query: Mapping[str, Sequence[str]], marker: str, limit: int | None = None) -> str:
    """Return the link to the page after `marker`: the same query with another marker."""
    pairs = [(k, v) for k, values in query.items() if k not in ("marker", "limit") for v in values]
    if limit is not None:
        pairs.append(("limit", str(limit)))
    elif "limit" in query:
        pairs.append(("limit", query["limit"][-1]))
    pairs.append(("marker", marker))
    return f"{url}?{urllib.parse.urlencode(pairs)}"


def check_filter(name: str, values: Collection[object]) -> None:
    """Raise Invalid if a filter of a list names more values than a statement should have conditions."""
    if len(values) > MOST_FILTER_VALUES:
        raise Invalid(
            f"Invalid value for '{name}': it has {len(values)} parts, and at most {MOST_FILTER_VALUES} are allowed."
        )


def iso(time: int | None) -> str | None:
    """Return a time in microseconds as OpenStack writes it: 2026-11-15T12:00:00Z."""
    return None if time is None else _second(time // 1_000_000) + "Z"


def iso_micros(time: int | None) -> str | None:
    """Return a time in microseconds as OpenStack's older resources write it: 2026-11-15T12:00:00.000000."""
    return None if time is None else f"{_second(time // 1_000_000)}.{time % 1_000_000:06d}"


def iso_from_seconds(time: float) -> str:
    """Return a time in seconds as Keystone writes it: 2026-11-15T12:00:00.000000Z."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_iso(text: str) -> int:
    """Return an ISO 8601 time in microseconds; a time without a zone is UTC. Raise ValueError."""
    moment = datetime.fromisoformat(text)
    try:
        return micros((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    except OverflowError as error:
        raise ValueError(str(error)) from None


@functools.lru_cache(maxsize=8192)
def _second(seconds: int) -> str:
    """Return a time in seconds as text. It is cached: the rows of a list share few different seconds."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
