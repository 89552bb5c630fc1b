"""The pages of lists: which part of a list a request asks for, and the statement that reads it."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import sqlalchemy as sa

from micronova.db import keyset
from micronova.db.keyset import SortKey
from micronova.objects.errors import NotFound

R = TypeVar("R")


class Page(NamedTuple):
    """Which part of a list is asked for, and in which order."""

    limit: int
    marker: str | None
    offset: int
    keys: tuple[SortKey, ...]  # one of them is the id


class Listed(NamedTuple, Generic[R]):
    """The resources of a page."""

    resources: list[R]
    more: bool  # there may be a next page
    total: int | None = None  # how many there are in all, if that is asked for


def fetch(
    conn: sa.Connection, statement: sa.Select[Any], page: Page, *visible: sa.ColumnElement[bool]
) -> tuple[list[sa.Row[Any]], bool]:
    """Return the rows of a page, and whether it is full; raise NotFound unless the marker is visible.

    As in Cinder a full page has a link to the next one, which may be empty.
    """
    after = None
    if page.marker is not None:
        after = keyset.position(conn, page.keys, _id_of(page.keys) == page.marker, *visible)
        if after is None:
            raise NotFound(f"The marker {page.marker[:64]} could not be found.")
    rows = list(conn.execute(keyset.page(statement.offset(page.offset), page.keys, after, page.limit)))
    return rows, len(rows) == page.limit


def list_rows(
    conn: sa.Connection,
    statement: sa.Select[Any],
    kind: Callable[..., R],
    page: Page,
    conditions: Sequence[sa.ColumnElement[bool]],
) -> Listed[R]:
    """Return a page of the rows that meet the conditions, each as a `kind`; raise as `fetch` does."""
    rows, more = fetch(conn, statement.where(*conditions), page, *conditions)
    return Listed([kind(**row._mapping) for row in rows], more)


def _id_of(keys: Sequence[SortKey]) -> sa.ColumnElement[Any]:
    return next(key.column for key in keys if getattr(key.column, "name", "") == "id")
