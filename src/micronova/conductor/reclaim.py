"""Reclaims servers that have been soft-deleted for long enough: each gets a `delete` operation.

A restore is either refused or comes first. A server whose soft delete waits for its host is reclaimed as well.
"""

import logging
from uuid import UUID

import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.own_requests import MOST_BEGUN, TOGETHER, accept_own, owners_could_act, record_on
from micronova.db import instances
from micronova.objects import states
from micronova.objects.clock import micros
from micronova.objects.instance import InstanceChanges, InstanceRow

log = logging.getLogger(__name__)

NAMESPACE = UUID("4f2f5c0a-1d0e-4a55-8f3c-3b7d3d1f6a52")
"""Of the ids of these operations and requests, which follow from the instance and its epoch."""
NAME = "reclaim"
LONGEST_INTERVAL = 60.0
"""Seconds between two runs; with a shorter `reclaim_instance_interval` they are as far apart as that."""


async def reclaim(dependencies: ConductorDependencies, interval: float) -> None:
    """Delete the servers that have been soft-deleted for longer than `interval` seconds."""
    engine = dependencies.engine
    if not owners_could_act(engine, interval):
        return
    before = micros(engine.clock.now() - interval)
    for _ in range(MOST_BEGUN // TOGETHER):
        found = await engine.database.read(instances.soft_deleted_before, before, TOGETHER)
        if begun := await record_on(engine.database, found, _begin, dependencies, before):
            log.info("soft-deleted servers that are reclaimed: %d", len(begun))
        if len(found) < TOGETHER:
            return


def _begin(conn: sa.Connection, id: str, dependencies: ConductorDependencies, before: int) -> list[str]:
    """Record the operation, unless the server was restored or is being deleted."""
    row = instances.lock(conn, id)
    if row is None or not _is_soft_deleted(row):
        return []
    if row["deleted_at"] is None or row["deleted_at"] >= before:
        return []
    changes: InstanceChanges = {"task_state": states.DELETING}
    return accept_own(conn, dependencies, row, changes, namespace=NAMESPACE, kind="delete", payload=None, endless=True)


def _is_soft_deleted(row: InstanceRow) -> bool:
    return row["task_state"] == states.SOFT_DELETING or (row["vm_state"], row["task_state"]) == (
        states.SOFT_DELETED,
        None,
    )
