"""Records which rows each write transaction locks, and in which order.

PostgreSQL locks a row for SELECT … FOR UPDATE, UPDATE, DELETE and INSERT … ON CONFLICT. The recorder notes these
statements on SQLite, where the same code runs, and asks the database for the rows that each of them is about to lock.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.db.prepared import Prepared
from micronova.db.tables import metadata

R = TypeVar("R")
Key = tuple[Any, ...]
_TEXT_UPDATE = re.compile(r"\bUPDATE (\w+) SET", re.IGNORECASE)


class Lock(NamedTuple):
    """A locked row; one that belongs to an instance is locked by those alone who hold the instance's lock."""

    table: str
    key: Key
    instance: str | None = None


@dataclasses.dataclass
class Transaction:
    """One write transaction: the rows it inserted, and those it locked, in order."""

    name: str
    inserted: set[Lock] = dataclasses.field(default_factory=set)
    locked: list[Lock] = dataclasses.field(default_factory=list)
    unordered: list[str] = dataclasses.field(default_factory=list)  # statements that lock several rows in no order
    gone: set[str] = dataclasses.field(default_factory=set)  # instances that it wanted to lock and that are deleted

    def lock(self, rows: list[Lock], ordered: bool, statement: str) -> None:
        """Note that a statement locks these rows."""
        new = [row for row in rows if row not in self.inserted and row not in self.locked]
        if len(new) > 1 and not ordered and new[0].instance is None:
            self.unordered.append(f"{self.name}: {' '.join(statement.split())}")
        self.locked += sorted(new)


def _owner(table: sa.Table, row: Any) -> str | None:
    """Return the instance that a row belongs to; operations have a place of their own in the order of locks."""
    if table.name == "operations":
        return None
    owner: str | None = row.get("instance_uuid", row.get("consumer_uuid"))
    return owner


class LockRecorder:
    """Attach it to a SQLite database before its roles start."""

    def __init__(self, database: Database) -> None:
        self.transactions: list[Transaction] = []
        self._engine: sa.Engine = database._engine  # type: ignore[attr-defined]
        self._current: Transaction | None = None
        self._looking = False
        write = database.write

        async def recorded(fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
            result: R = await write(self._recording(fn), *args, **kwargs)
            return result

        database.write = recorded  # type: ignore[method-assign]
        self._bind, self._bind_each = bind, bind_each = Prepared._bind, Prepared._bind_each
        recorder = self

        def noted(prepared: Prepared, conn: sa.Connection, parameters: Mapping[str, Any]) -> Any:
            recorder._before(conn, prepared._on(conn), [], dict(parameters), None)
            return bind(prepared, conn, parameters)

        def each_noted(prepared: Prepared, conn: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> Any:
            recorder._before(conn, prepared._on(conn), [dict(row) for row in rows], {}, None)
            return bind_each(prepared, conn, rows)

        Prepared._bind = noted  # type: ignore[method-assign, assignment]
        Prepared._bind_each = each_noted  # type: ignore[method-assign, assignment]
        sa.event.listen(self._engine, "before_execute", self._before)

    def close(self) -> None:
        """Let prepared statements go their way again."""
        Prepared._bind = self._bind  # type: ignore[method-assign]
        Prepared._bind_each = self._bind_each  # type: ignore[method-assign]

    def _recording(self, fn: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(fn)
        def run(conn: sa.Connection, *args: Any, **kwargs: Any) -> R:
            self._current = Transaction(fn.__qualname__)
            try:
                return fn(conn, *args, **kwargs)
            finally:
                self.transactions.append(self._current)
                self._current = None

        return run

    def _before(
        self, conn: sa.Connection, statement: Any, multi: list[dict[str, Any]], params: dict[str, Any], _options: Any
    ) -> None:
        if self._current is None or self._looking or conn.get_execution_options().get("micronova_read"):
            return
        if conn.engine is not self._engine:  # every recorder sees the queries of all databases
            return
        if isinstance(statement, sa.TextualSelect):
            statement = statement.element
        self._looking = True
        try:
            for values in multi or [params]:
                self._note(conn, self._current, statement, values)
        finally:
            self._looking = False

    def _note(self, conn: sa.Connection, current: Transaction, statement: Any, values: dict[str, Any]) -> None:
        if isinstance(statement, sa.Select) and statement._for_update_arg is not None:
            table = next(iter(statement.selected_columns)).table
            rows = self._rows(conn, table, statement.whereclause, values)
            current.lock(rows, _locks_in_order(statement), str(statement.compile(dialect=conn.dialect)))
            if table.name == "instances" and not rows and "uuid" in values:
                current.gone.add(values["uuid"])
        elif isinstance(statement, sa.Update | sa.Delete):
            assert isinstance(statement.table, sa.Table)
            table = statement.table
            rows = self._rows(conn, table, statement.whereclause, values)
            current.lock(rows, _locks_in_order(statement), str(statement.compile(dialect=conn.dialect)))
        elif isinstance(statement, sa.Insert):
            self._insert(current, statement, values)
        elif isinstance(statement, sa.TextClause) and (found := _TEXT_UPDATE.search(statement.text)):
            self._text(current, found[1], values)

    def _insert(self, current: Transaction, statement: Any, values: dict[str, Any]) -> None:
        table = statement.table
        rows = [
            {getattr(c, "name", c): v for c, v in row.items()}
            for part in statement._multi_values
            for row in (part.values() if isinstance(part, dict) else part)
        ]
        for row in rows or [{**(statement._values or {}), **values}]:
            named = {getattr(column, "name", column): _value(value, values) for column, value in row.items()}
            key = tuple(named.get(column.name) for column in table.primary_key)
            lock = Lock(table.name, key, _owner(table, named))
            if statement._post_values_clause is None:
                current.inserted.add(lock)
            else:
                current.lock([lock], True, "")

    def _text(self, current: Transaction, table: str, values: dict[str, Any]) -> None:
        """Note the two statements that are written as text: claims, and members of groups."""
        if table == "inventories":
            keys = [(values[f"p{n}"], values[f"c{n}"]) for n in range(sum(name[0] == "c" for name in values))]
        else:
            keys = [tuple(values[column.name] for column in metadata.tables[table].primary_key)]
        current.lock([Lock(table, key) for key in keys], True, table)

    def _rows(self, conn: sa.Connection, table: sa.Table, where: Any, values: dict[str, Any]) -> list[Lock]:
        query = sa.select(table)
        if where is not None:
            query = query.where(where)
        names = query.compile(dialect=conn.dialect).params
        found = conn.execute(query, {name: value for name, value in values.items() if name in names}).mappings()
        keys = [column.name for column in table.primary_key]
        return [Lock(table.name, tuple(row[name] for name in keys), _owner(table, row)) for row in found]


def _value(value: Any, values: dict[str, Any]) -> Any:
    """Return the value of a parameter of a statement."""
    return values.get(value.key, value.value) if isinstance(value, sa.BindParameter) else value


def _locks_in_order(statement: Any) -> bool:
    """Say whether a statement is, or has within it, a SELECT … ORDER BY key FOR UPDATE."""
    return any(
        isinstance(part, sa.Select)
        and part._for_update_arg is not None
        and bool(part._order_by_clauses)
        and part._order_by_clauses[0] is next(iter(part._order_by_clauses[0].table.primary_key))
        for part in sa.sql.visitors.iterate(statement)
    )
