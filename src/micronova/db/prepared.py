"""Statements of the hot paths: compiled once per database, run on the driver itself, rows as plain dictionaries.

SQLAlchemy writes the SQL and knows the types; per execution its machinery costs more than the statement. So what runs
for every request goes around it, to `sqlite3` or to asyncpg, and so do BEGIN and COMMIT. SQLAlchemy still sees the
errors: it tells a lost connection from a wrong statement.
"""

import collections
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.util.concurrency import await_

Processor = Callable[[Any], Any]
_named_tuple: Callable[..., Any] = collections.namedtuple


class _Driver(Protocol):
    """What runs statements; it raises the errors that SQLAlchemy would raise."""

    def changed(self, conn: sa.Connection, sql: str, values: Sequence[Any]) -> int:
        """Run a statement without an answer; return how many rows it has changed."""

    def rows(self, conn: sa.Connection, sql: str, values: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Run a statement; return all rows."""

    def each(self, conn: sa.Connection, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run a statement with each of these values."""


class _Compiled(NamedTuple):
    """What the driver needs of a statement."""

    driver: _Driver
    sql: str
    names: list[str]  # in the order of the statement's parameters
    to_driver: list[tuple[int, Processor]]
    fixed: dict[str, Any]  # values that the statement itself has
    columns: list[str]
    from_driver: list[tuple[int, Processor]]
    record: Callable[[Iterable[Any]], Any]  # makes a named tuple of a row

    def values(self, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the parameters as the driver takes them; raise KeyError if one is missing."""
        known = {**self.fixed, **parameters} if self.fixed else parameters
        values = [known[name] for name in self.names]
        for index, process in self.to_driver:
            values[index] = process(values[index])
        return tuple(values)


class Prepared:
    """A statement that is compiled when it is first run.

    Columns that an INSERT does not name get the constant defaults of their table; functions are not called for them.
    `column.in_()` takes expressions such as `sa.literal`, not plain values, whose number SQLAlchemy would fill in at
    each execution.
    """

    def __init__(self, statement: sa.Executable | Callable[[sa.Connection], sa.Executable]) -> None:
        """`statement` may be a function that returns the one for a connection: `PerDialect.on`."""
        self._statement = statement
        self._compiled: dict[str, _Compiled] = {}  # by dialect

    def run(self, conn: sa.Connection, parameters: Mapping[str, Any]) -> int:
        """Run a statement that returns no rows; return how many rows it has changed."""
        compiled, values = self._bind(conn, parameters)
        return compiled.driver.changed(conn, compiled.sql, values)

    def run_each(self, conn: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run a statement for each of the rows."""
        if len(rows) == 1:
            self.run(conn, rows[0])
        elif rows:
            compiled, values = self._bind_each(conn, rows)
            compiled.driver.each(conn, compiled.sql, values)

    def first(self, conn: sa.Connection, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the first row, or None."""
        rows = self.all(conn, parameters)
        return rows[0] if rows else None

    def all(self, conn: sa.Connection, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return all rows."""
        compiled, rows = self._rows(conn, parameters)
        return [dict(zip(compiled.columns, row, strict=True)) for row in rows]

    def records(self, conn: sa.Connection, parameters: Mapping[str, Any]) -> list[Any]:
        """Return all rows as named tuples."""
        compiled, rows = self._rows(conn, parameters)
        return [compiled.record(row) for row in rows]

    def _rows(self, conn: sa.Connection, parameters: Mapping[str, Any]) -> tuple[_Compiled, Sequence[Sequence[Any]]]:
        """Run the statement; return it, and the rows with values as SQLAlchemy would return them."""
        compiled, values = self._bind(conn, parameters)
        found = compiled.driver.rows(conn, compiled.sql, values)
        if not compiled.from_driver:
            return compiled, found
        rows = [list(row) for row in found]
        for index, process in compiled.from_driver:
            for row in rows:
                row[index] = process(row[index])
        return compiled, rows

    def _bind(self, conn: sa.Connection, parameters: Mapping[str, Any]) -> tuple[_Compiled, tuple[Any, ...]]:
        """Return the statement for a database, and the parameters as its driver takes them."""
        compiled = self._compiled.get(conn.dialect.name) or self._compile(conn)
        return compiled, compiled.values(parameters)

    def _bind_each(
        self, conn: sa.Connection, rows: Sequence[Mapping[str, Any]]
    ) -> tuple[_Compiled, list[tuple[Any, ...]]]:
        compiled = self._compiled.get(conn.dialect.name) or self._compile(conn)
        return compiled, [compiled.values(row) for row in rows]

    def _on(self, conn: sa.Connection) -> sa.Executable:
        return self._statement if isinstance(self._statement, sa.Executable) else self._statement(conn)

    def _compile(self, conn: sa.Connection) -> _Compiled:
        statement: Any = self._on(conn)
        compiled: SQLCompiler = statement.compile(dialect=conn.dialect)
        if compiled.post_compile_params:
            raise ValueError(f"Not a constant statement: {compiled}")
        binds = compiled.binds
        fixed = {name: bind.effective_value for name, bind in binds.items() if not bind.required}
        defaults: dict[str, Any] = {column.key: column.default for column in compiled.insert_prefetch}
        fixed |= {name: default.arg for name, default in defaults.items() if default.is_scalar}
        names = compiled.positiontup or ()
        columns = [column.name for column in statement.exported_columns]
        record = _named_tuple("Row", columns, rename=True)
        made = self._compiled[conn.dialect.name] = _Compiled(
            driver=_DRIVERS[conn.dialect.name],
            sql=str(compiled),
            names=list(names),
            to_driver=[
                (index, process)
                for index, name in enumerate(names)
                if (process := _to_driver(binds[name].type, conn.dialect)) is not None
            ],
            fixed=fixed,
            columns=columns,
            record=record._make,
            from_driver=[
                (index, process)
                for index, column in enumerate(statement.exported_columns)
                if (process := _from_driver(column.type, conn.dialect)) is not None
            ],
        )
        return made


class _SQLite:
    """`db.engine` begins transactions, and turns all errors but broken constraints into its own."""

    def changed(self, conn: sa.Connection, sql: str, values: Sequence[Any]) -> int:
        cursor = self._run(conn, "execute", sql, values)
        changed = cursor.rowcount
        cursor.close()
        return changed

    def rows(self, conn: sa.Connection, sql: str, values: Sequence[Any]) -> Sequence[Sequence[Any]]:
        cursor = self._run(conn, "execute", sql, values)
        rows = cursor.fetchall()
        cursor.close()
        return rows

    def each(self, conn: sa.Connection, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        self._run(conn, "executemany", sql, rows).close()

    def _run(
        self, conn: sa.Connection, method: Literal["execute", "executemany"], sql: str, values: Sequence[Any]
    ) -> sqlite3.Cursor:
        _tell(conn, sql, values, many=method == "executemany")
        raw = cast(sqlite3.Connection, conn.connection.dbapi_connection)
        try:
            cursor: sqlite3.Cursor = getattr(raw, method)(sql, values)
        except sqlite3.IntegrityError as error:
            raise sa.exc.IntegrityError(sql, values, error) from error
        return cursor


class _Postgres:
    """asyncpg, which prepares each statement once per connection; `db.postgres` begins transactions."""

    def changed(self, conn: sa.Connection, sql: str, values: Sequence[Any]) -> int:
        _tell(conn, sql, values)
        status: str = on_asyncpg(conn, "execute", sql, *values)
        return int(status.rpartition(" ")[2])  # such as UPDATE 1

    def rows(self, conn: sa.Connection, sql: str, values: Sequence[Any]) -> Sequence[Sequence[Any]]:
        _tell(conn, sql, values)
        rows: Sequence[Sequence[Any]] = on_asyncpg(conn, "fetch", sql, *values)
        return rows

    def each(self, conn: sa.Connection, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        _tell(conn, sql, rows, many=True)
        on_asyncpg(conn, "executemany", sql, rows)


def _tell(conn: sa.Connection, sql: str, values: Sequence[Any], *, many: bool = False) -> None:
    """Tell those who listen to a connection's statements, as SQLAlchemy does."""
    if conn._has_events or conn.engine._has_events:
        for listener in conn.dispatch.before_cursor_execute:
            listener(conn, None, sql, values, None, many)


_DRIVERS: dict[str, _Driver] = {"sqlite": _SQLite(), "postgresql": _Postgres()}


def on_asyncpg(
    conn: sa.Connection, method: Literal["execute", "fetch", "executemany"], sql: str, *values: Any, **options: Any
) -> Any:
    """Call a method of asyncpg's connection with a statement; raise the errors that SQLAlchemy would raise.

    As after an error of its own statements, SQLAlchemy gives up a connection that is lost or was interrupted.
    """
    adapter: Any = conn.connection.dbapi_connection
    try:
        try:
            return await_(getattr(adapter.driver_connection, method)(sql, *values, **options))
        except Exception as error:
            adapter._handle_exception(error)  # raises the error of the DBAPI, if it is one
    except BaseException as error:
        known = isinstance(error, conn.dialect.loaded_dbapi.Error)
        conn._handle_dbapi_exception(error, sql if known else None, values, None, None)


def _from_driver(type_: sa.types.TypeEngine[Any], dialect: Dialect) -> Processor | None:
    own = type_.dialect_impl(dialect)
    if dialect.name == "postgresql":  # its driver decodes JSON, and numbers by the column's own type
        if isinstance(own, sa.Float):
            return _as_float
        return None if isinstance(own, sa.JSON | sa.Numeric) else own.result_processor(dialect, None)
    # SQLAlchemy calls two functions of its own for each value. Rows of servers have many values in JSON.
    return _decoded if isinstance(own, sa.JSON) else own.result_processor(dialect, None)


def _as_float(value: Any) -> Any:
    return None if value is None else float(value)  # PostgreSQL computes times as decimals


def _decoded(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, str) else value  # SQLite stores a number as one


def _to_driver(type_: sa.types.TypeEngine[Any], dialect: Dialect) -> Processor | None:
    processor: Processor | None = type_.dialect_impl(dialect).bind_processor(dialect)
    return processor
