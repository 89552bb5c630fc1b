"""What is used of inventories, by provider and resource class.

Amounts of all providers are added in one statement, which takes its rows in the order of their keys and leaves out
those whose capacity would be exceeded. The amounts are one parameter: the statement is the same however many they are.
"""

import json
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from micronova.db.prepared import Prepared

# `most` is the largest amount of one consumer. `Trees.serve` checks all units (`fits_units`) for request groups. The
# smallest unit and the steps are not checked for the node's own classes, as docs/placement.md says.
# CROSS JOIN lets SQLite begin with what is wanted.
_ADD = """
    WITH wanted (provider, class, amount, most) AS ({wanted}),
    found (provider, class, amount, most) AS (
        SELECT i.node_uuid, i.resource_class, w.amount, w.most
        FROM wanted w CROSS JOIN inventories i WHERE i.node_uuid = w.provider AND i.resource_class = w.class
        ORDER BY i.node_uuid, i.resource_class {lock}
    )
    UPDATE inventories SET used = used + found.amount, changed_at = :now
    FROM found WHERE node_uuid = found.provider AND resource_class = found.class {check}
    RETURNING node_uuid, resource_class
"""
_CHECK = "AND (found.amount <= 0 OR (used + found.amount <= capacity AND found.most <= max_unit))"
# PostgreSQL locks the rows in the order of their keys, which an UPDATE alone would not promise; SQLite has one writer
# at a time.
_PARTS = {
    "sqlite": {
        "wanted": """
            SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'),
                   json_extract(value, '$[2]'), json_extract(value, '$[3]')
            FROM json_each(:wanted)
        """,
        "lock": "",
    },
    "postgresql": {
        "wanted": """
            SELECT value ->> 0, value ->> 1, CAST(value ->> 2 AS BIGINT), CAST(value ->> 3 AS BIGINT)
            FROM jsonb_array_elements(CAST(CAST(:wanted AS TEXT) AS JSONB))
        """,
        "lock": "FOR UPDATE OF i",
    },
}


def _statement(check: str) -> Prepared:
    texts = {dialect: sa.text(_ADD.format(**parts, check=check)) for dialect, parts in _PARTS.items()}
    rows = {dialect: text.columns(node_uuid=sa.String, resource_class=sa.String) for dialect, text in texts.items()}
    return Prepared(lambda conn: rows[conn.dialect.name])


_CHECKED, _UNCHECKED = _statement(_CHECK), _statement("")


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
    if not wanted:
        return set()
    rows = [(*key, amount, (most or {}).get(key, 0)) for key, amount in wanted]
    statement = _UNCHECKED if unchecked else _CHECKED
    found = statement.records(conn, {"wanted": json.dumps(rows), "now": now})
    return {(row.node_uuid, row.resource_class) for row in found}
