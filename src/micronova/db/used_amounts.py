"""What is used of inventories, by provider and resource class.

Amounts of all providers are added in one statement, which takes its rows in the order of their keys and leaves out
those whose capacity would be exceeded.
"""

import functools
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from micronova.db.prepared import Prepared

MOST_ROWS = 3_000  # of inventories in one statement: four parameters each, and drivers take 32,766 in all
# `most` is the largest amount of one consumer. `Trees.serve` checks all units (`fits_units`) for request groups. The
# smallest unit and the steps are not checked for the node's own classes, as docs/placement.md says.
_ADD = """
    WITH wanted (provider, class, amount, most) AS (VALUES {rows}),
    found (provider, class, amount, most) AS (
        SELECT i.node_uuid, i.resource_class, w.amount, w.most
        FROM inventories i JOIN wanted w ON i.node_uuid = w.provider AND i.resource_class = w.class
        ORDER BY i.node_uuid, i.resource_class {lock}
    )
    UPDATE inventories SET used = used + found.amount, changed_at = :now
    FROM found WHERE node_uuid = found.provider AND resource_class = found.class {check}
    RETURNING node_uuid, resource_class
"""
_CHECK = "AND (found.amount <= 0 OR (used + found.amount <= capacity AND found.most <= max_unit))"


def change(
    conn: sa.Connection,
    amounts: Mapping[tuple[str, str], int],
    now: int,
    *,
    most: Mapping[tuple[str, str], int] | None = None,
) -> list[tuple[str, str]]:
    """Add amounts, by provider and resource class, to what is used; if some do not fit, put all back and return those.

    `most` is the largest amount of one consumer, where several may take.
    """
    wanted = sorted((key, amount) for key, amount in amounts.items() if amount)
    taken = _add(conn, wanted, now, most=most or {})
    short = [key for key, amount in wanted if amount > 0 and key not in taken]
    if short:
        _add(conn, [(key, -amount) for key, amount in wanted if key in taken], now, unchecked=True)
    return short


def change_unchecked(conn: sa.Connection, amounts: Mapping[tuple[str, str], int], now: int) -> None:
    """Add amounts to what is used of inventories that the caller has locked and found large enough."""
    _add(conn, sorted((key, amount) for key, amount in amounts.items() if amount), now, unchecked=True)


def _add(
    conn: sa.Connection,
    wanted: Sequence[tuple[tuple[str, str], int]],
    now: int,
    *,
    most: Mapping[tuple[str, str], int] | None = None,
    unchecked: bool = False,
) -> set[tuple[str, str]]:
    taken: set[tuple[str, str]] = set()
    for first in range(0, len(wanted), MOST_ROWS):
        part = wanted[first : first + MOST_ROWS]
        parameters: dict[str, str | int] = {"now": now}
        for number, (key, amount) in enumerate(part):
            parameters |= {f"p{number}": key[0], f"c{number}": key[1], f"a{number}": amount}
            parameters[f"m{number}"] = (most or {}).get(key, 0)
        statement = _addition(len(part), conn.dialect.name == "postgresql", unchecked)
        taken.update(statement.records(conn, parameters))
    return taken


@functools.lru_cache(maxsize=256)
def _addition(count: int, lock: bool, unchecked: bool) -> Prepared:
    """Return the statement for so many rows; with `unchecked` it refuses no amount.

    PostgreSQL locks the rows in the order of their keys, which an UPDATE alone would not promise; SQLite has one writer
    at a time.
    """
    rows = ", ".join(f"(:p{n}, :c{n}, CAST(:a{n} AS INTEGER), CAST(:m{n} AS INTEGER))" for n in range(count))
    text = _ADD.format(rows=rows, lock="FOR UPDATE OF i" if lock else "", check="" if unchecked else _CHECK)
    return Prepared(sa.text(text).columns(node_uuid=sa.String, resource_class=sa.String))
