"""Confirms resizes that nobody has confirmed or reverted in time (`resize_confirm_window`): a job of the whole cloud.

The sweep runs the operations. A resize is not confirmed while the server's host is down: then the guest on its source
is the only copy of its disks that can be used, and its owner can revert.
"""

import logging
from uuid import UUID

import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.own_requests import accept_own, owners_could_act
from micronova.db import instances, server_migrations, services
from micronova.objects import migration_states, states
from micronova.objects.clock import micros
from micronova.objects.instance import InstanceChanges
from micronova.objects.operations import ResizedPayload

log = logging.getLogger(__name__)

CONFIRM = "confirm_resize"
NAMESPACE = UUID("2f9c5a0e-7f0d-4d0b-9f0c-1f4b5f3c9a11")
"""Of the ids of these operations and requests, which follow from the instance and its epoch."""
NAME = "confirm_resizes"
LONGEST_INTERVAL = 60.0
"""Seconds between two runs; with a shorter window they are as far apart as that."""
TOGETHER = 1000
"""Resizes that are read at once."""


async def confirm_overdue(dependencies: ConductorDependencies, window: float) -> None:
    """Confirm the resizes that ended more than `window` seconds ago."""
    engine = dependencies.engine
    if not owners_could_act(engine, window):
        return
    before, last = micros(engine.clock.now() - window), ""
    while found := await engine.database.read(server_migrations.unconfirmed, before, TOGETHER, after=last):
        for migration, instance in found:
            if await engine.database.write(_confirm, dependencies, migration, instance):
                log.info("the resize of server %s is confirmed: its owner has not done it in time", instance)
        last = found[-1][0]


def _confirm(conn: sa.Connection, dependencies: ConductorDependencies, migration: str, instance: str) -> bool:
    """Confirm a resize; return False if it cannot be confirmed any more, or not now."""
    row, known = instances.lock(conn, instance), server_migrations.get(conn, migration)
    if row is None or known is None or known["status"] != migration_states.FINISHED:
        return False
    if (row["vm_state"], row["task_state"]) != (states.RESIZED, None):
        return False
    now = dependencies.engine.now()
    if row["host"] is None or not services.host_is_up(conn, row["host"], now, dependencies.service_down_time):
        return False
    changes: InstanceChanges = {"task_state": states.ACTIONS[CONFIRM].task_state}
    payload = ResizedPayload(migration=migration)
    # A sweep starts the operation.
    accept_own(conn, dependencies, row, changes, namespace=NAMESPACE, kind=CONFIRM, payload=payload)
    server_migrations.update(conn, migration, now, {"status": migration_states.CONFIRMING})
    return True
