"""The queries about transfers."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.volume.model import Transfer
from micronova.embedded.volume.store.paging import Listed, Page, list_rows
from micronova.embedded.volume.store.resource_queries import read_one
from micronova.embedded.volume.tables import transfers

SORTABLE: Mapping[str, sa.Column[Any]] = {name: transfers.c[name] for name in ("id", "name", "volume_id", "created_at")}


def get(conn: sa.Connection, transfer_id: str) -> Transfer | None:
    """Return a transfer, or None."""
    return read_one(conn, transfers.select().where(transfers.c.id == transfer_id), Transfer)


def list_transfers(conn: sa.Connection, page: Page, conditions: Sequence[sa.ColumnElement[bool]]) -> Listed[Transfer]:
    """Return a page of transfers."""
    return list_rows(conn, transfers.select(), Transfer, page, conditions)


def insert(conn: sa.Connection, made: Transfer) -> bool:
    """Write a new transfer; return False if the volume has one."""
    return insert_if_absent(conn, transfers, msgspec.structs.asdict(made))


def delete(conn: sa.Connection, transfer_id: str) -> None:
    """Delete a transfer."""
    conn.execute(transfers.delete().where(transfers.c.id == transfer_id))
