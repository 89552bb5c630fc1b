"""The rows of operations as requests write them; `engine.py` works on the operations."""

import msgspec
import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.model import Operation
from micronova.embedded.volume.operations.base import OperationKind
from micronova.embedded.volume.operations.payloads import Payload
from micronova.embedded.volume.store import service_rows
from micronova.embedded.volume.tables import operations


def begin(
    conn: sa.Connection,
    core: Core,
    kind: type[OperationKind],
    *,
    id: str,
    resource_id: str,
    project_id: str,
    request_id: str,
    source_id: str | None = None,
    payload: Payload | None = None,
    not_before: int = 0,
) -> bool:
    """Write the row of an operation. Transactions do this before they change other rows; see ARCHITECTURE.md.

    Raise Invalid if the storage service is frozen.

    Return False if the row exists already, because the answer to the first commit was lost: then the transaction has
    nothing left to do.
    """
    service_rows.check_not_frozen(conn, core.host)
    # After all that it has to wait for, also if the clock was set back.
    ids = (resource_id, source_id or resource_id)
    before = sa.or_(operations.c.resource_id.in_(ids), operations.c.source_id == resource_id)
    latest = conn.execute(sa.select(sa.func.max(operations.c.created_at)).where(before)).scalar_one()
    row = Operation(
        id=id,
        kind=kind.name,
        host=core.host,
        resource_id=resource_id,
        source_id=source_id,
        project_id=project_id,
        request_id=request_id,
        payload={} if payload is None else msgspec.to_builtins(payload),
        cancelled=False,
        progress=0,
        attempts=0,
        not_before=not_before,
        created_at=max(core.now(), (latest or 0) + 1),
    )
    return insert_if_absent(conn, operations, msgspec.structs.asdict(row))


def get(conn: sa.Connection, id: str) -> Operation | None:
    """Return an operation; None if it has ended."""
    row = conn.execute(sa.select(operations).where(operations.c.id == id)).one_or_none()
    return None if row is None else Operation(**row._mapping)


def release(conn: sa.Connection, id: str) -> None:
    """Let an operation begin that was written with a time before which it does not."""
    conn.execute(operations.update().where(operations.c.id == id).values(not_before=0))


def remove(conn: sa.Connection, id: str) -> bool:
    """Remove an operation that has not begun; return whether there is one."""
    return conn.execute(operations.delete().where(operations.c.id == id)).rowcount == 1


def uses(conn: sa.Connection, id: str) -> bool:
    """Return whether an operation changes or reads a resource."""
    named = sa.or_(operations.c.resource_id == id, operations.c.source_id == id)
    return bool(conn.execute(sa.select(sa.exists().where(named))).scalar_one())


def cancel(conn: sa.Connection, resource_id: str, *, but: str) -> None:
    """Cancel the operations of a resource, except for one: their results are not wanted any more."""
    of_resource = operations.c.resource_id == resource_id
    conn.execute(operations.update().where(of_resource, operations.c.id != but).values(cancelled=True))
