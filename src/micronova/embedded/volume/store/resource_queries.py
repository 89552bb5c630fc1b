"""Statements that the queries of several resources share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import sqlalchemy as sa

from micronova.embedded.common import revisions
from micronova.embedded.common.chunks import chunks
from micronova.embedded.volume.model import ResourceColumns

R = TypeVar("R")


class Revised(Protocol):
    """A resource as it was read."""

    @property
    def id(self) -> str:
        """The key of its row."""

    @property
    def revision(self) -> int:
        """The revision that its row had."""


def read_one(conn: sa.Connection, statement: sa.Select[Any], kind: Callable[..., R]) -> R | None:
    """Return the only row of a statement as a `kind`; None if there is none."""
    row = conn.execute(statement).one_or_none()
    return None if row is None else kind(**row._mapping)


@dataclass(frozen=True)
class Metadata:
    """The metadata of one kind of resource: a table with the columns `key` and `value` beside the id of the owner."""

    owner: sa.Column[str]

    def of(self, conn: sa.Connection, ids: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return the metadata of resources, by id; resources without metadata are missing."""
        found: dict[str, dict[str, str]] = {}
        table = self.owner.table
        for part in chunks(ids):
            for row in conn.execute(table.select().where(self.owner.in_(part)).order_by(table.c.key)):
                found.setdefault(row._mapping[self.owner], {})[row.key] = row.value
        return found

    def set(self, conn: sa.Connection, id: str, items: Mapping[str, str]) -> None:
        """Replace the metadata of a resource."""
        conn.execute(self.owner.table.delete().where(self.owner == id))
        if items:
            rows = [{self.owner.name: id, "key": key, "value": value} for key, value in sorted(items.items())]
            conn.execute(self.owner.table.insert(), rows)

    def has(self, owner_id: sa.Column[str], key: str, value: str) -> sa.ColumnElement[bool]:
        """Return the condition that the resource with this id has an item."""
        columns = self.owner.table.c
        return sa.exists().where(self.owner == owner_id, columns.key == key, columns.value == value)


@dataclass(frozen=True)
class Rows:
    """The rows of volumes, of snapshots or of backups."""

    table: sa.Table

    def insert(self, conn: sa.Connection, made: msgspec.Struct) -> None:
        """Write a new row; fields that are not columns are left out."""
        fields = msgspec.structs.asdict(made)
        conn.execute(self.table.insert(), {column.name: fields[column.name] for column in self.table.columns})

    def update(self, conn: sa.Connection, read: Revised, values: ResourceColumns, now: int) -> None:
        """Change a row; raise Changed if another request has changed it meanwhile."""
        revisions.update(conn, self.table.c.revision, read.id, read.revision, values, now)

    def touch(self, conn: sa.Connection, id: str, values: ResourceColumns, now: int) -> None:
        """Change a row, whatever others have changed; the owner of its operation does that."""
        revisions.touch(conn, self.table.c.revision, self.table.c.id == id, now=now, **values)

    def set_status(self, conn: sa.Connection, id: str, status: str, now: int) -> None:
        """Set the status of a row as `touch` does."""
        revisions.touch(conn, self.table.c.revision, self.table.c.id == id, now=now, status=status)

    def delete(self, conn: sa.Connection, id: str) -> None:
        """Delete a row."""
        conn.execute(self.table.delete().where(self.table.c.id == id))

    def ids(self, conn: sa.Connection, host: str) -> set[str]:
        """Return the ids of all resources whose files a host has."""
        return set(conn.execute(sa.select(self.table.c.id).where(self.table.c.host == host)).scalars())

    def count(self, conn: sa.Connection, conditions: Sequence[sa.ColumnElement[bool]]) -> int:
        """Return how many rows meet the conditions."""
        return int(conn.execute(sa.select(sa.func.count()).select_from(self.table).where(*conditions)).scalar_one())


class Readable(NamedTuple):
    """What decides whether a resource can be copied."""

    size: int  # GiB
    status: str


def lock_to_read(conn: sa.Connection, table: sa.Table, id: str) -> Readable | None:
    """Keep a resource as it is until the transaction ends; return None if it is gone."""
    chosen = sa.select(table.c.size, table.c.status).where(table.c.id == id)
    row = conn.execute(chosen.with_for_update(read=True)).one_or_none()
    return None if row is None else Readable(row.size, row.status)
