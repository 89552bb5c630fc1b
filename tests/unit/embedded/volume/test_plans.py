"""PostgreSQL's plans of the volume service's hot paths: no statement reads a whole table that grows with the cloud."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.db.keyset import SortKey
from micronova.embedded.volume.model import Operation
from micronova.embedded.volume.operations import messages
from micronova.embedded.volume.store import (
    attachment_queries,
    backup_queries,
    connection_queries,
    message_queries,
    operation_queries,
    paging,
    quotas,
    snapshot_queries,
    type_queries,
    volume_queries,
)
from micronova.embedded.volume.store.paging import Page
from micronova.embedded.volume.tables import attachments, backups, metadata, snapshots, transfers, volumes
from micronova.embedded.volume.tables import messages as message_rows
from tests.plans import Rows, fill, rolled_back, rows_read, sequential_scans, too_many
from tests.unit.db.databases import own_schema

pytestmark = [pytest.mark.postgresql, pytest.mark.asyncio(loop_scope="module")]

VOLUMES = 20_000
OPERATIONS = 400
MOST_READ = 700
"""Rows of a table that a hot path may read: a page of 50, or what a project has several times."""
MORE_READ = {"the next operations": 5 * OPERATIONS}
"""Operations are those that are not finished: what waits is read, with what it may have to wait for."""
SMALL = {"operations", "volume_types", "volume_type_encryptions", "quota_limits", "quota_class_limits", "services"}
"""Tables that do not grow with the number of volumes; operations are removed when they end."""

OF_PROJECT = {"project_id": "'p' || n % 1000", "created_at": "n * 1000"}
FILL: Rows = (
    ("volume_types", 10, {"id": "'t' || n", "name": "'type' || n"}),
    ("volumes", VOLUMES, {**OF_PROJECT, "id": "'v' || n", "host": "'h'", "volume_type_id": "'t' || n % 9"}),
    ("volume_metadata", VOLUMES, {"volume_id": "'v' || n", "key": "'k'", "value": "'v' || n"}),
    ("snapshots", VOLUMES, {**OF_PROJECT, "id": "'s' || n", "volume_id": "'v' || n", "volume_type_id": "'t' || n % 9"}),
    ("snapshot_metadata", VOLUMES, {"snapshot_id": "'s' || n", "key": "'k'", "value": "'v' || n"}),
    ("backups", VOLUMES, {**OF_PROJECT, "id": "'b' || n", "volume_id": "'v' || n"}),
    ("attachments", VOLUMES, {**OF_PROJECT, "id": "'a' || n", "volume_id": "'v' || n", "instance_uuid": "'i' || n"}),
    ("volume_connections", VOLUMES, {"volume_id": "'v' || n", "host": "'h' || n"}),
    ("transfers", VOLUMES, {**OF_PROJECT, "id": "'x' || n", "volume_id": "'v' || n"}),
    ("messages", VOLUMES, {**OF_PROJECT, "id": "'m' || n", "expires_at": "1000000000 + n"}),
    (
        "operations",
        OPERATIONS,
        {
            **OF_PROJECT,
            "id": "'o' || n",
            "host": "'h'",
            "resource_id": "'v' || n",
            "source_id": "'v' || n + 1",
        },
    ),
    ("quota_usages", VOLUMES, {"project_id": "'p' || n", "resource": "'volumes'", "used": "1"}),
)
OPERATION = Operation(
    id="new", kind="x", host="h", resource_id="v7", source_id=None, project_id="p7", request_id="r", payload={},
    cancelled=False, progress=0, attempts=0, not_before=0, created_at=0,
)  # fmt: skip


def page(table: sa.Table) -> Page:
    keys = (SortKey(table.c.created_at, True), SortKey(table.c.id, True))
    return Page(limit=50, marker=None, offset=0, keys=keys)


def after(table: sa.Table, marker: str) -> Page:
    return page(table)._replace(marker=marker)


def fetch(table: sa.Table) -> Callable[[sa.Connection], Any]:
    mine = table.c.project_id == "p7"
    return lambda conn: paging.fetch(conn, table.select().where(mine), page(table), mine)


def _message(conn: sa.Connection) -> None:
    resource, action = messages.Resource.VOLUME, messages.Action.CREATE_VOLUME
    made = messages.message("new", OPERATION, resource, action, messages.Detail.UNKNOWN, 1000)
    message_queries.add(conn, made)


HOT: dict[str, Callable[[sa.Connection], Any]] = {
    "volumes": lambda conn: volume_queries.list_volumes(conn, page(volumes), [volumes.c.project_id == "p7"], False),
    "volumes, a later page": lambda conn: volume_queries.list_volumes(
        conn, after(volumes, "v10007"), [volumes.c.project_id == "p7"], False
    ),
    "volumes of all projects": lambda conn: volume_queries.list_volumes(conn, page(volumes), [], False),
    "volumes with metadata": lambda conn: volume_queries.list_volumes(
        conn, page(volumes), [volumes.c.project_id == "p7", volume_queries.has_metadata("k", "v7")], True
    ),
    "volumes of all projects with metadata": lambda conn: volume_queries.list_volumes(
        conn, page(volumes), [volume_queries.has_metadata("k", "v7")], False
    ),
    "a summary": lambda conn: volume_queries.summary(conn, [volumes.c.project_id == "p7"]),
    "a volume": lambda conn: volume_queries.get(conn, "v7"),
    "snapshots": lambda conn: snapshot_queries.list_snapshots(
        conn, page(snapshots), [snapshots.c.project_id == "p7"], True
    ),
    "snapshots of a volume": lambda conn: snapshot_queries.of_volume(conn, "v7"),
    "a snapshot": lambda conn: snapshot_queries.get(conn, "s7"),
    "backups": lambda conn: backup_queries.list_backups(conn, page(backups), [backups.c.project_id == "p7"], True),
    "backups of a volume": lambda conn: backup_queries.list_backups(
        conn, page(backups), [backups.c.project_id == "p7", backups.c.volume_id == "v7"], False
    ),
    "attachments": fetch(attachments),
    "attachments of a server": lambda conn: attachment_queries.list_attachments(
        conn, page(attachments), [attachments.c.instance_uuid == "i7"]
    ),
    "whether a volume is connected": lambda conn: connection_queries.connected(conn, "h", "v7"),
    "transfers": fetch(transfers),
    "messages": fetch(message_rows),
    "a new message": _message,
    "whether volumes have a type": lambda conn: type_queries.delete(
        conn, type_queries.get(conn, "t9")  # type: ignore[arg-type]
    ),
    "the next operations": lambda conn: operation_queries.ready(conn, "h", 1, 200),
    "a charge to the quota": lambda conn: quotas.charge(conn, "p7", quotas.of_volume("t1", 1), quotas.QUOTAS),
    "the usage of a project": lambda conn: quotas.usage_of(conn, "p7"),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with own_schema(request, metadata) as opened:
        await opened.write(fill, metadata, FILL)
        yield opened


@pytest.mark.parametrize("name", HOT)
async def test_an_index_serves(database: Database, name: str) -> None:
    assert await rolled_back(database, sequential_scans, HOT[name], SMALL) == []
    assert too_many(await rolled_back(database, rows_read, HOT[name]), MORE_READ.get(name, MOST_READ)) == {}
