"""The queries about what the back end of a machine stores."""

from collections.abc import Iterator
from typing import NamedTuple

import sqlalchemy as sa

from micronova.embedded.volume.tables import snapshots, volumes


class Sum(NamedTuple):
    """How many volumes or snapshots of a project there are, and how large they are together."""

    project_id: str
    number: int
    size: int  # GiB


def allocated(conn: sa.Connection, host: str) -> int:
    """Return the size of all volumes and snapshots, in GiB."""
    return sum(each.size for table in (volumes, snapshots) for each in sums(conn, table, host))


def sums(conn: sa.Connection, table: sa.Table, host: str) -> Iterator[Sum]:
    """Yield the sums of the volumes or the snapshots, by project."""
    chosen = sa.select(table.c.project_id, sa.func.count(), sa.func.sum(table.c.size)).where(table.c.host == host)
    for project_id, number, size in conn.execute(chosen.group_by(table.c.project_id)):
        yield Sum(project_id, number, int(size))
