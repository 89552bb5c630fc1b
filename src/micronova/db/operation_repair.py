"""What operators do with operations: list them, try one again at once, cancel one."""

from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from micronova.db import operations as operation_rows
from micronova.db.tables import deleted_instances, instances, operations
from micronova.objects.errors import Conflict, NotFound
from micronova.objects.operations import OperationRow

_o = operations.c


class Listed(NamedTuple):
    """An operation and the name of its server."""

    row: OperationRow
    server: str


def list_open(
    conn: sa.Connection, most: int, *, kind: str = "", server: str = "", owner: str = ""
) -> tuple[list[Listed], int]:
    """Return the oldest open operations, and how many there are; of one kind, server or owner if these are given."""
    where: list[sa.ColumnElement[bool]] = [_o.finished_at.is_(None)]
    where += [column == value for column, value in ((_o.kind, kind), (_o.instance_uuid, server)) if value]
    if owner:
        where.append(_o.owner.in_((owner, operation_rows.host_owner(owner))))
    query = (
        sa.select(operations, instances.c.display_name)
        .outerjoin(instances, instances.c.uuid == _o.instance_uuid)
        .where(*where)
        .order_by(_o.created_at, _o.id)
        .limit(most)
    )
    found = [_listed(row) for row in conn.execute(query)]
    total: int = conn.execute(sa.select(sa.func.count()).select_from(operations).where(*where)).scalar_one()
    return found, total


def _listed(row: sa.Row[tuple[object, ...]]) -> Listed:
    values = dict(row._mapping)
    return Listed(server=str(values.pop("display_name") or ""), row=OperationRow(**values))  # type: ignore[typeddict-item]


def find(conn: sa.Connection, id: str) -> Listed:
    """Return an operation, open or ended; raise NotFound if there is none, or the records of it were purged."""
    row = operation_rows.get(conn, id)
    if row is None:
        raise NotFound(f"There is no operation {id}: `micronova operation list` shows those that are open.")
    names: Sequence[str] = (
        conn.execute(
            sa.union_all(
                *(
                    sa.select(table.c.display_name).where(table.c.uuid == row["instance_uuid"])
                    for table in (instances, deleted_instances)
                )
            )
        )
        .scalars()
        .all()
    )
    return Listed(row, names[0] if names else "")


def retry(conn: sa.Connection, id: str) -> None:
    """End the pause of an operation, so that the next sweep takes it; raise Conflict if a host works on it."""
    row = _lock_open(conn, id)
    if (row["owner"] or "").startswith(operation_rows.host_owner("")):
        raise Conflict(
            f"{_host(row)} works on operation {id}. If it lost the order, its next heartbeat brings it again; "
            "if it is down, a conductor takes the operation over."
        )
    conn.execute(operations.update().where(_o.id == id).values(lease_until=0))


def cancel(conn: sa.Connection, id: str) -> None:
    """Let an operation fail as if its deadline were over; raise Conflict if it is one that must be completed."""
    row = _lock_open(conn, id)
    if row["deadline"] == operation_rows.NO_DEADLINE:
        raise Conflict(f"Operation {id} ({row['kind']}) must be completed: it is repeated until it succeeds.")
    conn.execute(operations.update().where(_o.id == id).values(deadline=operation_rows.CANCELLED, lease_until=0))


def _host(row: OperationRow) -> str:
    return (row["owner"] or "").removeprefix(operation_rows.host_owner(""))


def _lock_open(conn: sa.Connection, id: str) -> OperationRow:
    row = operation_rows.get(conn, id, lock=True)
    if row is None:
        raise NotFound(f"There is no operation {id}: `micronova operation list` shows those that are open.")
    if row["finished_at"] is not None:
        raise Conflict(f"Operation {id} ({row['kind']}) has ended already: {row['result']}.")
    return row
