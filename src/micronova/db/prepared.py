"""Statements of the hot paths: compiled once per database, run on the driver's own cursor, rows as plain dictionaries.

SQLAlchemy writes the SQL and knows the types; per execution its machinery costs more than the statement. So what runs
for every request goes around it. It still begins and ends transactions, and sees the errors: it tells a lost connection
from a wrong statement.
"""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.sql.compiler import SQLCompiler

Processor = Callable[[Any], Any]


class _Compiled(NamedTuple):
    """What the driver needs of a statement."""

    sql: str
    binds: list[tuple[str, Processor | None]]  # in the order of the statement's parameters
    fixed: dict[str, Any]  # values that the statement itself has
    columns: list[str]
    processors: list[tuple[int, Processor]]

    def values(self, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the parameters as the driver takes them; raise KeyError if one is missing."""
        known = {**self.fixed, **parameters} if self.fixed else parameters
        return tuple(known[name] if process is None else process(known[name]) for name, process in self.binds)


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
        _, cursor = self._execute(conn, parameters)
        changed: int = cursor.rowcount
        cursor.close()
        return changed

    def run_each(self, conn: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run a statement for each of the rows."""
        if rows:
            self._execute_many(conn, rows)

    def first(self, conn: sa.Connection, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the first row, or None."""
        rows = self.all(conn, parameters)
        return rows[0] if rows else None

    def all(self, conn: sa.Connection, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return all rows."""
        compiled, cursor = self._execute(conn, parameters)
        found = cursor.fetchall()
        cursor.close()
        rows = []
        for values in found:
            if compiled.processors:
                values = list(values)
                for index, process in compiled.processors:
                    values[index] = process(values[index])
            rows.append(dict(zip(compiled.columns, values, strict=True)))
        return rows

    def _execute(self, conn: sa.Connection, parameters: Mapping[str, Any]) -> tuple[_Compiled, Any]:
        """Run the statement and return its cursor; raise SQLAlchemy's error if it breaks a constraint."""
        compiled = self._compiled.get(conn.dialect.name) or self._compile(conn)
        return compiled, _run_on_driver(conn, "execute", compiled.sql, compiled.values(parameters))

    def _execute_many(self, conn: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        compiled = self._compiled.get(conn.dialect.name) or self._compile(conn)
        _run_on_driver(conn, "executemany", compiled.sql, [compiled.values(row) for row in rows]).close()

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
        made = self._compiled[conn.dialect.name] = _Compiled(
            sql=str(compiled),
            binds=[(name, _to_driver(binds[name].type, conn.dialect)) for name in compiled.positiontup or ()],
            fixed=fixed,
            columns=[column.name for column in statement.exported_columns],
            processors=[
                (index, process)
                for index, column in enumerate(statement.exported_columns)
                if (process := _from_driver(column.type, conn.dialect)) is not None
            ],
        )
        return made


def _run_on_driver(
    conn: sa.Connection, method: Literal["execute", "executemany"], sql: str, values: Sequence[Any]
) -> Any:
    """Return the driver's cursor with what the statement gave; raise the errors that SQLAlchemy would raise."""
    if conn.dialect.name == "sqlite":  # `db.engine` has begun, and turns all errors but these into its own
        try:
            return getattr(cast(sqlite3.Connection, conn.connection.dbapi_connection), method)(sql, values)
        except sqlite3.IntegrityError as error:
            raise sa.exc.IntegrityError(sql, values, error) from error
    if not conn.in_transaction():
        conn.begin()
    cursor = conn.connection.cursor()
    for listener in conn.dispatch.before_cursor_execute:
        listener(conn, cursor, sql, values, None, method == "executemany")
    try:
        getattr(cursor, method)(sql, values)
    except BaseException as error:
        # As SQLAlchemy does with its own statements: it gives up a connection that is lost or was interrupted.
        known = isinstance(error, conn.dialect.loaded_dbapi.Error)
        conn._handle_dbapi_exception(error, sql if known else None, values, cursor, None)
    return cursor


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
