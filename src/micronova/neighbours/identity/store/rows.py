"""What the queries of all identity resources share: finding by id, lists with filters and pages, unique names."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy.dialects import postgresql, sqlite

from micronova.objects.errors import Conflict, Invalid, NotFound

Row = Mapping[Any, Any]  # column → value; SQLAlchemy's own row mappings are such

_BOOLEANS = {"true": True, "1": True, "yes": True, "y": True, "on": True, "": True,
             "false": False, "0": False, "no": False, "n": False, "off": False}  # fmt: skip


class Page(Struct, frozen=True):
    """A part of a list: so many, after this one."""

    limit: int | None = None
    marker: str | None = None


class Listed(Struct):
    """Rows of a list, and whether there are more."""

    rows: list[Row]
    more: bool = False


def find(conn: sa.Connection, table: sa.Table, key: str | None) -> Row | None:
    """Return the row with this id, if there is one."""
    if key is None:
        return None
    return conn.execute(table.select().where(table.c.id == key)).mappings().first()


def get(conn: sa.Connection, table: sa.Table, noun: str, key: str) -> Row:
    """Return the row with this id; raise NotFound."""
    row = find(conn, table, key)
    if row is None:
        raise NotFound(f"Could not find {noun}: {key[:64]}.")
    return row


@contextlib.contextmanager
def unique(message: str) -> Iterator[None]:
    """Turn a broken uniqueness into a Conflict with this message."""
    try:
        yield
    except sa.exc.IntegrityError:
        raise Conflict(message) from None


def truth(name: str, text: str) -> bool:
    """Read a boolean of a query string."""
    value = _BOOLEANS.get(text.lower())
    if value is None:
        raise Invalid(f"Invalid input for query parameter {name}: {text[:64]!r} is neither true nor false.")
    return value


def flag(query: Mapping[str, list[str]], name: str) -> bool:
    """Say whether a query string asks for something: `?effective` does, `?effective=0` does not."""
    return name in query and truth(name, query[name][-1])


def filters(table: sa.Table, query: Mapping[str, list[str]], names: Sequence[str]) -> list[sa.ColumnElement[bool]]:
    """Return conditions for the parameters of a query string that name columns; others are ignored.

    `name__contains`, `__startswith`, `__endswith` (and the same with an `i`) compare without regard to case.
    """
    conditions: list[sa.ColumnElement[bool]] = []
    for parameter, values in query.items():
        name, _, comparison = parameter.partition("__")
        if name not in names:
            continue
        column, value = table.c[name], values[-1]
        if isinstance(column.type, sa.Boolean):
            conditions.append(column.is_(truth(name, value)))
        elif not comparison:
            conditions.append(column == value)
        else:
            lowered, wanted = sa.func.lower(column), value.lower()
            match comparison.removeprefix("i"):
                case "contains":
                    conditions.append(lowered.contains(wanted, autoescape=True))
                case "startswith":
                    conditions.append(lowered.startswith(wanted, autoescape=True))
                case "endswith":
                    conditions.append(lowered.endswith(wanted, autoescape=True))
    return conditions


def listed(conn: sa.Connection, table: sa.Table, conditions: Sequence[sa.ColumnElement[bool]], page: Page) -> Listed:
    """Return a page of the rows that satisfy all conditions, oldest first."""
    order = (table.c.created_at, table.c.id)
    query = table.select().where(*conditions).order_by(*order)
    if page.marker is not None:
        after = find(conn, table, page.marker)
        if after is None:
            raise NotFound(f"Marker {page.marker[:64]} could not be found.")
        query = query.where(sa.tuple_(*order) > sa.tuple_(after["created_at"], after["id"]))
    if page.limit is not None:
        query = query.limit(page.limit + 1)
    rows: list[Row] = list(conn.execute(query).mappings())
    if page.limit is not None and len(rows) > page.limit:
        return Listed(rows[: page.limit], more=True)
    return Listed(rows)


def update(conn: sa.Connection, table: sa.Table, row: Row, values: Mapping[str, Any], conflict: str) -> Row:
    """Write changed columns and return the row as it is now."""
    if values:
        with unique(conflict):
            conn.execute(table.update().where(table.c.id == row["id"]).values(**values))
    return {**row, **values}


def parts(ids: Iterable[str | None], size: int = 1000) -> Iterator[list[str]]:
    """Yield distinct ids in lists that a statement can take as parameters."""
    wanted = iter(dict.fromkeys(each for each in ids if each))
    while part := list(itertools.islice(wanted, size)):
        yield part


def names(conn: sa.Connection, table: sa.Table, ids: Iterable[str | None]) -> dict[str, str]:
    """Return names by id, of those that exist."""
    found: dict[str, str] = {}
    for part in parts(ids):
        chosen = sa.select(table.c.id, table.c.name).where(table.c.id.in_(part))
        found.update((row.id, row.name) for row in conn.execute(chosen))
    return found


def insert_if_absent(conn: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> bool:
    """Insert a row unless one with its key is there; say whether it was inserted."""
    insert = (postgresql if conn.dialect.name == "postgresql" else sqlite).insert(table)
    return conn.execute(insert.values(**values).on_conflict_do_nothing()).rowcount > 0
