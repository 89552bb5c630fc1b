"""Tables full of rows that PostgreSQL makes itself, the plans that it has for statements over them, and what they read.

A plan without a sequential scan may still walk a whole index and drop most rows by a filter. So tests of hot paths
bound the rows that PostgreSQL reads (`rows_read`), besides refusing sequential scans.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import pytest
import sqlalchemy as sa

from micronova.db.engine import Database

P = ParamSpec("P")
R = TypeVar("R")

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


class _RolledBack(Exception):
    """Ends a transaction whose changes are not to be kept."""


async def rolled_back(
    database: Database, work: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Return the result of a function, in a transaction that is rolled back: other tests see no change."""
    results: list[R] = []

    def run(conn: sa.Connection) -> None:
        results.append(work(conn, *args, **kwargs))
        raise _RolledBack

    with pytest.raises(_RolledBack):
        await database.write(run)
    return results[-1]


@contextlib.contextmanager
def recorded(conn: sa.Connection) -> Iterator[list[tuple[str, Any]]]:
    """Record the statements of a connection with their parameters."""
    found: list[tuple[str, Any]] = []

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool) -> None:
        # An INSERT of several rows with RETURNING has the parameters of all rows in one tuple.
        found.append((statement, parameters[0] if isinstance(parameters, list) else parameters))

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


_ROWS_READ = """
SELECT c.relname,
       pg_stat_get_xact_tuples_returned(c.oid)
       + coalesce(sum(pg_stat_get_xact_tuples_returned(i.indexrelid)), 0) AS rows
FROM pg_class c LEFT JOIN pg_index i ON i.indrelid = c.oid
WHERE c.relkind = 'r' AND c.relnamespace = current_schema()::regnamespace
GROUP BY c.oid, c.relname
"""


def rows_read(conn: sa.Connection, work: Callable[[sa.Connection], Any]) -> dict[str, int]:
    """Run a query function; return the rows and the index entries that PostgreSQL reads of each table.

    It counts what a filter drops, too.
    """
    conn.exec_driver_sql("SET LOCAL max_parallel_workers_per_gather = 0")  # workers count for themselves
    before = _read_so_far(conn)
    work(conn)
    return {table: rows - before[table] for table, rows in _read_so_far(conn).items() if rows > before[table]}


def _read_so_far(conn: sa.Connection) -> dict[str, int]:
    return {row.relname: int(row.rows) for row in conn.exec_driver_sql(_ROWS_READ)}


def too_many(read: dict[str, int], most: int, small: Collection[str] = ()) -> dict[str, int]:
    """Return the tables of which more rows were read, without those that are small in every cloud."""
    return {table: rows for table, rows in read.items() if rows > most and table not in small}
