"""Locks on several rows of a table, taken in the order of their keys: so no two transactions wait for each other.

PostgreSQL locks the rows of an UPDATE or DELETE in the order in which it finds them. SQLite has one writer at a time.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa


def in_order(key: sa.Column[Any], *conditions: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """Return the condition that a row is among those that meet the conditions; they are locked first, ordered by key.

    An UPDATE repeats conditions on columns that others change, because it sees the rows as they were at its start.
    """
    locked = sa.select(key).where(*conditions).order_by(key).with_for_update().correlate(None)
    return key.in_(locked)


def numbered(rows: Iterable[Mapping[str, object]], first: int) -> list[dict[str, object]]:
    """Return new rows with ids from `first` on, in an order in which both their ids and their uuids grow.

    Transactions that insert at the same moment choose the same ids. Inserted in this order, the later one waits for the
    first id, before it has inserted a row for which the earlier one could wait.
    """
    return [{**row, "id": first + n} for n, row in enumerate(sorted(rows, key=lambda row: str(row["uuid"])))]
