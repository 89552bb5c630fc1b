"""The pages of lists: which part of a list a request asks for, and the statement that reads it."""

from collections.abc import Sequence
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
    keys: tuple[SortKey, ...]  # the last one is unique


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
        id_column = page.keys[-1].column if page.keys[-1].column.name == "id" else _id_of(page.keys)
        after = keyset.position(conn, page.keys, id_column == page.marker, *visible)
        if after is None:
            raise NotFound(f"The marker {page.marker[:64]} could not be found.")
    rows = list(conn.execute(keyset.page(statement.offset(page.offset), page.keys, after, page.limit)))
    return rows, len(rows) == page.limit


def _id_of(keys: Sequence[SortKey]) -> sa.ColumnElement[Any]:
    return next(key.column for key in keys if getattr(key.column, "name", "") == "id")
