"""Tables full of rows that PostgreSQL makes itself, and the plans that it has for statements over them."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import sqlalchemy as sa

Rows = tuple[tuple[str, int, dict[str, str]], ...]
"""A table, the number of rows, and what differs between them as SQL by column; n counts the rows."""


def fill(conn: sa.Connection, metadata: sa.MetaData, rows: Rows) -> None:
    """Fill tables; columns that are not named get an empty value."""
    for name, count, values in rows:
        table = metadata.tables[name]
        columns = [column for column in table.c if column.name in values or not column.nullable]
        names = ", ".join(f'"{column.name}"' for column in columns)
        shown = ", ".join(values.get(column.name) or _nothing(column) for column in columns)
        conn.exec_driver_sql(f"INSERT INTO {name} ({names}) SELECT {shown} FROM generate_series(0, {count - 1}) n")
    conn.exec_driver_sql("ANALYZE")


def _nothing(column: Any) -> str:
    if isinstance(column.type, sa.JSON):
        return "'{}'"
    if isinstance(column.type, sa.LargeBinary):
        return r"'\x80'::bytea"  # an empty map in MessagePack
    if isinstance(column.type, sa.Boolean):
        return "false"
    return "0" if isinstance(column.type, sa.Integer | sa.Float) else "''"


@contextlib.contextmanager
def recorded(conn: sa.Connection) -> Iterator[list[tuple[str, Any]]]:
    """Record the statements of a connection with their parameters."""
    found: list[tuple[str, Any]] = []

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool) -> None:
        found.append((statement, parameters[0] if executemany else parameters))

    sa.event.listen(conn, "before_cursor_execute", note)
    yield found
    sa.event.remove(conn, "before_cursor_execute", note)


def sequential_scans(
    conn: sa.Connection, work: Callable[[sa.Connection], Any], small: Collection[str] = ()
) -> list[str]:
    """Run a query function and return the sequential scans of large tables in the plans of its statements."""
    with recorded(conn) as statements:
        work(conn)
    assert statements
    found = []
    for statement, parameters in statements:
        if statement.split(None, 1)[0] not in ("SELECT", "UPDATE", "DELETE", "WITH", "INSERT"):
            continue
        [[plan]] = (conn.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", parameters).scalar_one(),)
        found += [f"{name}: {statement}" for name in _sequential(plan["Plan"]) if name not in small]
    return found


def _sequential(plan: dict[str, Any]) -> Iterator[str]:
    if plan["Node Type"] == "Seq Scan":
        yield plan["Relation Name"]
    for part in plan.get("Plans", ()):
        yield from _sequential(part)
