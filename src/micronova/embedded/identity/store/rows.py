"""What the queries of all identity resources share: finding by id, lists with filters and pages, unique names."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import sqlalchemy as sa
from msgspec import Struct

from micronova.db import keyset
from micronova.db.keyset import SortKey
from micronova.embedded.common.chunks import chunks
from micronova.embedded.common.query import Query, QueryRules
from micronova.objects.errors import Conflict, Forbidden, Invalid, NotFound

R = TypeVar("R", bound=Mapping[str, object])  # the type of a row: value by column

QUERY = QueryRules(
    true=frozenset({"true", "1", "yes", "y", "on", ""}),
    false=frozenset({"false", "0", "no", "n", "off"}),
    not_boolean="Invalid input for query parameter {name}: {value!r} is neither true nor false.",
    not_integer="Invalid input for query parameter {name}: {value!r} is not an integer.",
    not_time="Invalid input for query parameter {name}: write a time like 2030-01-31T12:00:00Z.",
    not_limit="Invalid input for query parameter limit: {value!r} is not a number above 0.",
)


class Page(Struct, frozen=True):
    """The part of a list that is wanted: at most `limit` rows, after the row with the id `marker`."""

    limit: int | None = None
    marker: str | None = None


class Listed(Struct, Generic[R]):
    """The rows of a page, and whether more follow."""

    rows: list[R]
    more: bool = False


class Rows(Generic[R]):
    """Access to the rows of one kind of resource."""

    def __init__(self, table: sa.Table, noun: str) -> None:
        self.table = table
        self.noun = noun

    def find(self, conn: sa.Connection, key: str | None) -> R | None:
        """Return the row with this id, or None."""
        return None if key is None else self.first(conn, self.table.c.id == key)

    def get(self, conn: sa.Connection, key: str) -> R:
        """Return the row with this id; raise NotFound."""
        row = self.find(conn, key)
        if row is None:
            raise self.not_found(key)
        return row

    def not_found(self, key: str) -> NotFound:
        """Return the error for a row that does not exist, or is not for the caller to see."""
        return NotFound(f"Could not find {self.noun}: {key[:64]}.")

    def name_taken(self, row: Mapping[str, object]) -> str:
        """Return the message for a row whose name another one has, in the same domain if it has a domain."""
        where = " in the domain" if row.get("domain_id") else ""
        return f"There is a {self.noun} named {row['name']}{where} already."

    def check_room(
        self, conn: sa.Connection, of_user: sa.ColumnElement[bool], most: int, *, new: int = 1, verb: str = "have"
    ) -> None:
        """Raise Forbidden if a user cannot get `new` more rows; `of_user` is the condition for those that it has.

        The caller has locked the user, so that concurrent requests cannot exceed the limit together.
        """
        held = conn.execute(sa.select(sa.func.count()).select_from(self.table).where(of_user)).scalar_one()
        if held + new > most:
            raise Forbidden(f"A user may {verb} {most} {self.noun}s: delete some.")

    def lock(self, conn: sa.Connection, key: str) -> None:
        """Lock the row with this id until the transaction ends, so that concurrent ones wait. It need not exist."""
        conn.execute(self.table.update().where(self.table.c.id == key).values(id=key))

    def first(self, conn: sa.Connection, *conditions: sa.ColumnElement[bool]) -> R | None:
        """Return a row that satisfies the conditions, or None."""
        return cast(R | None, conn.execute(self.table.select().where(*conditions)).mappings().first())

    def all(self, conn: sa.Connection, *conditions: sa.ColumnElement[bool]) -> list[R]:
        """Return the rows that satisfy the conditions, oldest first."""
        table = self.table
        query = table.select().where(*conditions).order_by(table.c.created_at, table.c.id)
        return cast(list[R], list(conn.execute(query).mappings()))

    def by_ids(self, conn: sa.Connection, ids: Iterable[str | None]) -> dict[str, R]:
        """Return the rows with these ids, by id, as far as they exist."""
        found: dict[str, R] = {}
        for part in chunks(ids):
            query = self.table.select().where(self.table.c.id.in_(part))
            found.update((row["id"], cast(R, row)) for row in conn.execute(query).mappings())
        return found

    def page(self, conn: sa.Connection, conditions: Sequence[sa.ColumnElement[bool]], page: Page) -> Listed[R]:
        """Return a page of the rows that satisfy the conditions, oldest first; raise NotFound for the marker."""
        table = self.table
        keys = [SortKey(table.c.created_at), SortKey(table.c.id)]
        after = None
        if page.marker is not None:
            after = keyset.position(conn, keys, table.c.id == page.marker)
            if after is None:
                raise NotFound(f"Marker {page.marker[:64]} could not be found.")
        found, more = keyset.fetch(conn, table.select().where(*conditions), keys, after, page.limit)
        return Listed([cast(R, row._mapping) for row in found], more)

    def insert(self, conn: sa.Connection, row: R, conflict: str = "") -> R:
        """Insert a row and return it; raise Conflict with this message if it breaks a constraint."""
        with _unique(conflict):
            conn.execute(self.table.insert(), cast(dict[str, Any], row))
        return row

    def update(self, conn: sa.Connection, row: R, values: Mapping[str, Any], conflict: str = "") -> R:
        """Write the values and return the row with them; raise Conflict with this message."""
        if values:
            with _unique(conflict):
                conn.execute(self.table.update().where(self.table.c.id == row["id"]).values(**values))
        return cast(R, {**row, **values})

    def filters(self, query: Query, names: Sequence[str]) -> list[sa.ColumnElement[bool]]:
        """Return conditions for the parameters of a query string that name columns; others are ignored.

        `name__contains`, `__startswith`, `__endswith` (and the same with an `i`) compare without regard to case.
        """
        conditions: list[sa.ColumnElement[bool]] = []
        for parameter, values in query.items():
            name, _, comparison = parameter.partition("__")
            if name not in names:
                continue
            column, value = self.table.c[name], values[-1]
            if not comparison or isinstance(column.type, sa.Boolean):
                conditions.append(QUERY.matches(column, name, [value]))
            else:
                lowered, wanted = sa.func.lower(column), value.lower()
                match comparison.removeprefix("i"):
                    case "contains":
                        conditions.append(lowered.contains(wanted, autoescape=True))
                    case "startswith":
                        conditions.append(lowered.startswith(wanted, autoescape=True))
                    case "endswith":
                        conditions.append(lowered.endswith(wanted, autoescape=True))
                    case _:
                        raise Invalid(
                            f"Invalid query parameter {parameter[:64]!r}: use contains, startswith or endswith."
                        )
        return conditions


@contextlib.contextmanager
def _unique(message: str) -> Iterator[None]:
    try:
        yield
    except sa.exc.IntegrityError:
        if not message:
            raise
        raise Conflict(message) from None


def flag(query: Query, name: str) -> bool:
    """Return whether a parameter is set: it is in `?effective` and `?effective=1`, and not in `?effective=0`."""
    return name in query and QUERY.boolean(name, query[name][-1])
