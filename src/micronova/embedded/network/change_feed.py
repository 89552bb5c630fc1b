"""The noted changes (`host_changes.py`), as one process reads them: each once, even if it is committed late.

Rows commit in another order than they are numbered, so a complete look reaches back `OVERLAP`. It does not read again
what it knows: it compares how many rows there are in each second, with the sum of their positions, and reads the
seconds in which this differs.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import sqlalchemy as sa

from micronova.embedded.network.tables import host_changes
from micronova.objects.clock import micros

OVERLAP = 30.0  # seconds that a look reaches back: a transaction may commit that long after it has noted a change
KEEP = 600.0  # seconds for which changes are kept
SLOT = 1_000_000  # microseconds

Digest = tuple[int, int]  # of the rows of a slot: how many they are, and the sum of their positions


class Change(NamedTuple):
    """A row of `host_changes`."""

    position: int
    created_at: int
    topics: list[str]


class Question(NamedTuple):
    """What a look asks."""

    position: int  # later rows are new
    since: int | None  # a complete look compares the rows since then
    known: Mapping[int, Digest]  # by slot


class ChangeFeed:
    """What a process has read of the changes."""

    def __init__(self) -> None:
        self._position = 0
        self._read_at = 0  # when a complete look began last, in microseconds
        self._seen: dict[int, dict[int, None]] = {}  # slot -> positions of its rows that were read
        self.is_open = False

    def open(self, recent: Sequence[tuple[int, int]], now: int) -> None:
        """Begin after the changes that `recent_changes` found at a time, unless it has begun already."""
        if self.is_open:
            return
        self._position = max((position for position, _ in recent), default=0)
        self._read_at, self.is_open = now, True
        for position, created_at in recent:
            self._seen.setdefault(created_at // SLOT, {})[position] = None

    def close(self) -> None:
        """Forget everything: nobody wants to know of changes."""
        self._seen = {}
        self.is_open = False

    def has_lost_some(self, now: int) -> bool:
        """Return whether changes that were not read may be deleted already."""
        return now - self._read_at > micros(KEEP) / 2

    def question(self, complete: bool) -> Question:
        """Return what to ask by `read_changes`."""
        if not complete:
            return Question(self._position, None, {})
        since = (self._read_at - micros(OVERLAP)) // SLOT
        self._seen = {slot: seen for slot, seen in self._seen.items() if slot >= since}
        return Question(
            self._position, since * SLOT, {slot: (len(seen), sum(seen)) for slot, seen in self._seen.items()}
        )

    def new_topics(self, changes: list[Change], asked: Question, now: int) -> set[str]:
        """Take the answer to a question that was asked at a time; return the topics that were not known."""
        if asked.since is not None:
            self._read_at = now
        found: set[str] = set()
        for change in changes:
            self._position = max(self._position, change.position)
            seen = self._seen.setdefault(change.created_at // SLOT, {})
            if change.position not in seen:
                seen[change.position] = None
                found.update(change.topics)
        return found


def recent_changes(conn: sa.Connection, now: int) -> list[tuple[int, int]]:
    """Return the positions and times of the changes that a look at this time reaches, and of the newest one."""
    since = (now - micros(OVERLAP)) // SLOT * SLOT
    places = sa.select(_c.position, _c.created_at)
    newest = conn.execute(places.order_by(_c.position.desc()).limit(1)).all()
    return [(row.position, row.created_at) for row in (*newest, *conn.execute(places.where(_c.created_at >= since)))]


def read_changes(conn: sa.Connection, asked: Question) -> list[Change]:
    """Return the changes after a position, and those of slots that differ from what is known."""
    found = [Change(*row) for row in conn.execute(_NEW, {"position": asked.position})]
    if asked.since is None:
        return found
    mark = {"since": asked.since, "position": asked.position}
    for slot, count, total in conn.execute(_DIGESTS, mark).all():
        if asked.known.get(slot) != (count, total):
            span = {"first": slot * SLOT, "end": (slot + 1) * SLOT, "position": asked.position}
            found += [Change(*row) for row in conn.execute(_LATE, span)]
    return found


def purge_changes(conn: sa.Connection, horizon: int) -> None:
    """Delete the changes before a time."""
    conn.execute(host_changes.delete().where(_c.created_at < horizon))


def any_before(conn: sa.Connection, horizon: int) -> bool:
    """Return whether there are changes before a time."""
    return conn.execute(sa.select(_c.position).where(_c.created_at < horizon).limit(1)).first() is not None


_c = host_changes.c
_ROWS = sa.select(_c.position, _c.created_at, _c.topics)
_NEW = _ROWS.where(_c.position > sa.bindparam("position")).order_by(_c.position)
_SLOT = (_c.created_at // SLOT).label("slot")
_DIGESTS = (
    sa.select(_SLOT, sa.func.count(), sa.cast(sa.func.sum(_c.position), sa.BigInteger))
    .where(_c.created_at >= sa.bindparam("since"), _c.position <= sa.bindparam("position"))
    .group_by(_SLOT)
)
_LATE = _ROWS.where(
    _c.created_at >= sa.bindparam("first"),
    _c.created_at < sa.bindparam("end"),
    _c.position <= sa.bindparam("position"),
)
