"""Selects of the hot paths: compiled once per database, run on the driver's own cursor, rows as plain dictionaries.

SQLAlchemy writes the SQL and knows the types; per execution its machinery costs more than the query. So a query that
runs for every request goes around it. Only for selects with plain parameters (strings, numbers).
"""

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import Dialect

Processor = Callable[[Any], Any]


class Query:
    """A select that is prepared when it is first run on a kind of database."""

    def __init__(self, statement: sa.Select[Any]) -> None:
        self._statement = statement
        self._prepared: dict[str, tuple[str, list[str], list[str], list[tuple[int, Processor]]]] = {}

    def first(self, conn: sa.Connection, **parameters: Any) -> dict[str, Any] | None:
        """Return the first row, or None."""
        rows = self.all(conn, **parameters)
        return rows[0] if rows else None

    def all(self, conn: sa.Connection, **parameters: Any) -> list[dict[str, Any]]:
        """Return all rows."""
        if conn.dialect.name != "sqlite":
            # Over a network SQLAlchemy must see the errors: it tells a lost connection from a wrong statement.
            return [dict(row) for row in conn.execute(self._statement, parameters).mappings()]
        prepared = self._prepared.get(conn.dialect.name) or self._prepare(conn.dialect)
        sql, names, columns, processors = prepared
        cursor = conn.connection.cursor()
        try:
            cursor.execute(sql, tuple([parameters[name] for name in names]))
            found = cursor.fetchall()
        finally:
            cursor.close()
        rows = []
        for values in found:
            if processors:
                values = list(values)
                for index, process in processors:
                    values[index] = process(values[index])
            rows.append(dict(zip(columns, values, strict=True)))
        return rows

    def _prepare(self, dialect: Dialect) -> tuple[str, list[str], list[str], list[tuple[int, Processor]]]:
        compiled = self._statement.compile(dialect=dialect)
        columns = list(self._statement.selected_columns)
        processors: list[tuple[int, Processor]] = [
            (index, process)
            for index, column in enumerate(columns)
            if (process := column.type.dialect_impl(dialect).result_processor(dialect, None)) is not None
        ]
        names = list(getattr(compiled, "positiontup", None) or ())
        prepared = (str(compiled), names, [column.name for column in columns], processors)
        self._prepared[dialect.name] = prepared
        return prepared
