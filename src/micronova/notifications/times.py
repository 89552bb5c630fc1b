"""The formats of times in notifications, made from microseconds since 1970 (UTC)."""

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _at(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def instant(micros: int | None) -> str | None:
    """Return 2026-01-31T12:00:00Z: the form within versioned payloads."""
    return None if micros is None else _at(micros).isoformat()[:19] + "Z"


def with_fraction(micros: int | None) -> str:
    """Return 2026-01-31T12:00:00.123456, or nothing: the form within unversioned payloads."""
    return "" if micros is None else f"{_at(micros):%Y-%m-%dT%H:%M:%S.%f}"


def spaced(micros: int) -> str:
    """Return 2026-01-31 12:00:00+00:00: the form of created_at within unversioned payloads."""
    return _at(micros).isoformat(" ", "seconds")


def stamp(micros: int) -> str:
    """Return 2026-01-31 12:00:00.123456: the form of a message's own timestamp."""
    return f"{_at(micros):%Y-%m-%d %H:%M:%S.%f}"
