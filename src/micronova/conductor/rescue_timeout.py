"""Unrescues servers that have been rescued for longer than `rescue_timeout`; a periodic job of the whole cloud.

A server that another operation changes is left to the next run. The lock of a server does not matter, as in Nova.
"""

import logging
from uuid import UUID

import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.own_requests import TOGETHER, accept_own, record_on
from micronova.db import instances
from micronova.objects import states
from micronova.objects.clock import micros
from micronova.objects.instance import InstanceChanges
from micronova.objects.operations import PowerPayload

log = logging.getLogger(__name__)

NAMESPACE = UUID("3f6c1d1e-0d35-4a41-a8ff-6a7a0f1f5c9b")
"""Of the ids of these operations and requests, which follow from the instance and its epoch."""
NAME = "unrescue"
UNRESCUE = "unrescue"
INTERVAL = 60.0
"""Seconds between two runs."""


async def unrescue_overdue(dependencies: ConductorDependencies, timeout: float) -> None:
    """Unrescue the servers whose rescue began more than `timeout` seconds ago."""
    engine = dependencies.engine
    before = engine.now() - micros(timeout)
    found = await engine.database.read(instances.rescued_before, before, TOGETHER)  # the next run takes the others
    for id in await record_on(engine.database, found, _begin, dependencies, before):
        log.info("server %s has been rescued for more than %g s and is unrescued", id, timeout)


def _begin(conn: sa.Connection, id: str, dependencies: ConductorDependencies, before: int) -> list[str]:
    """Record the operation, unless the server is not to be unrescued now."""
    row = instances.lock(conn, id)
    if row is None or row["host"] is None or (row["vm_state"], row["task_state"]) != (states.RESCUED, None):
        return []
    if (row["launched_at"] or 0) >= before:
        return []
    changes: InstanceChanges = {"task_state": states.ACTIONS[UNRESCUE].task_state}
    payload = PowerPayload(action=UNRESCUE)
    return accept_own(conn, dependencies, row, changes, namespace=NAMESPACE, kind=UNRESCUE, payload=payload)
