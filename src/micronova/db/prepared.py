"""Statements of the hot paths: compiled once per database, run on the driver's own cursor, rows as plain dictionaries.

SQLAlchemy writes the SQL and knows the types; per execution its machinery costs more than the statement. So what runs
for every request goes around it on SQLite. Over a network SQLAlchemy must see the errors: it tells a lost connection
from a wrong statement.
"""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

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

    def values(self, parameters: Mapping[str, Any]) -> list[Any]:
        """Return the parameters as the driver takes them; raise KeyError if one is missing."""
        known = {**self.fixed, **parameters} if self.fixed else parameters
        return [known[name] if process is None else process(known[name]) for name, process in self.binds]


class Prepared:
    """A statement that is compiled when it is first run.

    Columns that an INSERT does not name get the constant defaults of their table; functions are not called for them.
    `column.in_()` takes expressions such as `sa.literal`, not plain values, whose number SQLAlchemy would fill in at
    each execution.
    """

    def __init__(self, statement: sa.Executable | Callable[[sa.Connection], sa.Executable]) -> None:
        """`statement` may be a function that returns the one for a connection: `PerDialect.on`."""
        self._statement = statement
        self._compiled: _Compiled | None = None  # for SQLite

    def run(self, conn: sa.Connection, parameters: Mapping[str, Any]) -> int:
        """Run a statement that returns no rows; return how many rows it has changed."""
        if conn.dialect.name != "sqlite":
            return conn.execute(self._on(conn), parameters).rowcount
        _, cursor = self._execute(conn, parameters)
        changed: int = cursor.rowcount
        cursor.close()
        return changed

    def run_each(self, conn: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run a statement for each of the rows."""
        if conn.dialect.name == "sqlite":
            if rows:
                self._execute_many(conn, rows)
        elif rows:
            conn.execute(self._on(conn), rows)

    def first(self, conn: sa.Connection, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the first row, or None."""
        rows = self.all(conn, parameters)
        return rows[0] if rows else None

    def all(self, conn: sa.Connection, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return all rows."""
        if conn.dialect.name != "sqlite":
            return [dict(row) for row in conn.execute(self._on(conn), parameters).mappings()]
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
        compiled = self._compiled or self._compile(conn)
        values = compiled.values(parameters)
        try:
            return compiled, _driver(conn).execute(compiled.sql, values)
        except sqlite3.IntegrityError as error:
            raise sa.exc.IntegrityError(compiled.sql, values, error) from error

    def _execute_many(self, conn: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        compiled = self._compiled or self._compile(conn)
        values = [compiled.values(row) for row in rows]
        try:
            _driver(conn).executemany(compiled.sql, values).close()
        except sqlite3.IntegrityError as error:
            raise sa.exc.IntegrityError(compiled.sql, values, error) from error

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
        self._compiled = _Compiled(
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
        return self._compiled


def _driver(conn: sa.Connection) -> sqlite3.Connection:
    return cast(sqlite3.Connection, conn.connection.dbapi_connection)


def _from_driver(type_: sa.types.TypeEngine[Any], dialect: Dialect) -> Processor | None:
    own = type_.dialect_impl(dialect)
    # SQLAlchemy calls two functions of its own for each value. Rows of servers have many values in JSON.
    return _decoded if isinstance(own, sa.JSON) else own.result_processor(dialect, None)


def _decoded(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, str) else value  # SQLite stores a number as one


def _to_driver(type_: sa.types.TypeEngine[Any], dialect: Dialect) -> Processor | None:
    processor: Processor | None = type_.dialect_impl(dialect).bind_processor(dialect)
    return processor
