"""Keyset paging: the rows of a select in the order of sort keys, beginning after a marker row.

NULL sorts before every value, on both databases. The last key must be unique, or a page could repeat or lose rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa


class SortKey(NamedTuple):
    """A column to sort by, and the direction."""

    column: sa.ColumnElement[Any]
    descending: bool = False


def position(conn: sa.Connection, keys: Sequence[SortKey], *conditions: sa.ColumnElement[bool]) -> sa.Row[Any] | None:
    """Return the values that the marker row has in the sort keys; None when no row satisfies the conditions."""
    return conn.execute(sa.select(*(key.column for key in keys)).where(*conditions)).first()


def page(
    statement: sa.Select[Any], keys: Sequence[SortKey], after: Sequence[Any] | None = None, limit: int | None = None
) -> sa.Select[Any]:
    """Return the select sorted by the keys, of the rows after a marker's values, and at most `limit` of them."""
    if after is not None:
        statement = statement.where(_beyond(keys, after))
    return statement.order_by(*(_order(key) for key in keys)).limit(limit)


def fetch(
    conn: sa.Connection,
    statement: sa.Select[Any],
    keys: Sequence[SortKey],
    after: Sequence[Any] | None = None,
    limit: int | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> tuple[list[sa.Row[Any]], bool]:
    """Return the rows of a page, and whether there are more behind it."""
    wanted = None if limit is None else limit + 1
    rows = list(conn.execute(page(statement, keys, after, wanted), parameters))
    return rows[:limit], limit is not None and len(rows) > limit


def _order(key: SortKey) -> sa.ColumnElement[Any]:
    if not _nullable(key.column):
        return key.column.desc() if key.descending else key.column.asc()
    return key.column.desc().nulls_last() if key.descending else key.column.asc().nulls_first()


def _beyond(keys: Sequence[SortKey], after: Sequence[Any]) -> sa.ColumnElement[bool]:
    """Return the condition of a row that comes later: equal in the first keys, and then further on in the next."""
    descending = keys[0].descending
    if all(key.descending == descending and not _nullable(key.column) for key in keys):
        # As one comparison of rows, which begins at the right place of an index with these columns.
        columns = sa.tuple_(*(key.column for key in keys))
        values = sa.tuple_(*(sa.literal(value, key.column.type) for key, value in zip(keys, after, strict=True)))
        return columns < values if descending else columns > values
    choices: list[sa.ColumnElement[bool]] = []
    equal: list[sa.ColumnElement[bool]] = []
    for (column, descending), value in zip(keys, after, strict=True):
        beyond: sa.ColumnElement[bool]
        if value is None:
            beyond = sa.false() if descending else column.is_not(None)
        elif not descending:
            beyond = column > value
        elif _nullable(column):
            beyond = sa.or_(column < value, column.is_(None))
        else:
            beyond = column < value
        choices.append(sa.and_(*equal, beyond))
        equal.append(column.is_(None) if value is None else column == value)
    first, value = keys[0], after[0]
    if _nullable(first.column):
        return sa.or_(*choices)
    # Implied by the choices; it lets an index on the first key begin near the right place.
    return sa.and_(first.column <= value if first.descending else first.column >= value, sa.or_(*choices))


def _nullable(column: sa.ColumnElement[Any]) -> bool:
    return not isinstance(column, sa.Column) or bool(column.nullable)
