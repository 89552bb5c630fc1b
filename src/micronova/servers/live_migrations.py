"""Requests about a live migration that is in progress: to abort it, or to force its end."""

import itertools
import logging
from typing import Final

import sqlalchemy as sa

from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.rpcapi import ConductorAPI
from micronova.db import instance_actions, instances, server_migrations
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.notifications.notifier import Notifier
from micronova.objects import migration_states, states
from micronova.objects.clock import Clock, micros
from micronova.objects.context import RequestContext
from micronova.objects.errors import Conflict, Invalid, MicronovaError, NotFound, Unavailable
from micronova.objects.instance import InstanceRow
from micronova.objects.migration import MigrationRow
from micronova.rpc.errors import RpcError
from micronova.servers.actions import check_lock

log = logging.getLogger(__name__)

CANCEL: Final = "live_migration_cancel"
FORCE_COMPLETE: Final = "live_migration_force_complete"
"""Names of instance actions."""
_ON_THE_WAY: Final = (migration_states.PREPARING, migration_states.RUNNING)
UNDONE: Final = ("unbind", "undo")
"""Steps of an operation whose guest returns to the source: to abort them would leave it paused."""


class LiveMigrations:
    """Aborts live migrations, and lets them end soon."""

    def __init__(
        self, *, database: Database, clock: Clock, compute: ComputeAPI, conductor: ConductorAPI, notifier: Notifier
    ) -> None:
        self._database = database
        self._clock = clock
        self._compute = compute
        self._conductor = conductor
        self._notifier = notifier

    async def abort(self, context: RequestContext, row: InstanceRow, number: int | None, *, early: bool) -> None:
        """Abort a live migration; with `early` also one that does not run yet.

        Like a reset of the state, this overtakes the operation: the source gets the order to let the guest continue.
        """
        check_lock(context, row)
        status, operations = await self._database.write(self._abort, context, row["uuid"], number, early)
        await self._conductor.run_operations(context.for_bus(), operations)
        # What has begun on its way is rolled back.
        names = ["live_migration_abort"] + ["live_migration_rollback"] * (status in _ON_THE_WAY)
        for name, phase in itertools.product(names, ("start", "end")):
            self._notifier.instance(f"{name}.{phase}", row, context=context.for_bus())

    def _abort(
        self, conn: sa.Connection, context: RequestContext, id: str, number: int | None, early: bool
    ) -> tuple[str, tuple[str, ...]]:
        """Abort it; return the status that it had, and the operation that undoes it, if the guest was touched."""
        row = instances.lock_existing(conn, id)
        if row["task_state"] != states.MIGRATING:
            raise Conflict(f"Cannot 'abort live migration' instance {id} while it is in task_state {row['task_state']}")
        migration = _of_instance(conn, id, number)
        if migration is None:
            raise NotFound(f"Migration {number} not found for instance {id}")
        allowed = {migration_states.RUNNING}
        if early:
            allowed |= {migration_states.ACCEPTED, migration_states.QUEUED, migration_states.PREPARING}
        if migration["status"] not in allowed:
            raise Invalid(
                f"Migration {number} state of instance {id} is {migration['status']}. Cannot abort live migration "
                "while the migration is in this state."
            )
        if any(operation["step"] in UNDONE for operation in operation_rows.open_of(conn, id)):
            raise Invalid(f"Migration {number} of instance {id} has failed and is being undone. Cannot abort it.")
        now, epoch = micros(self._clock.now()), row["epoch"] + 1
        instances.update(conn, id, now, {"progress": 0, "epoch": epoch})
        operation_rows.cancel_open(conn, id, now)
        event = "compute_live_migration_abort"
        instance_actions.record_done(conn, row, context, CANCEL, now, event=event, host=migration["source_compute"])
        # The guest has not arrived: the status is none of those.
        cancelled, bus_context = migration_states.CANCELLED, context.for_bus()
        undo = server_migrations.abandon(
            conn, row, now, epoch=epoch, status=cancelled, down_time=None, context=bus_context
        )
        instances.update(conn, id, now, {"task_state": server_migrations.idle_task_state(conn, id)})
        return str(migration["status"]), undo or ()

    async def force_complete(self, context: RequestContext, row: InstanceRow, number: int | None) -> None:
        """Let a live migration that runs end soon; the guest may be paused for it."""
        check_lock(context, row)
        bus_context = context.for_bus()
        source, epoch = await self._database.write(self._check_running, context, row["uuid"], number)

        async def end(problem: str | None) -> None:
            await self._database.write(self._record_end, context, row["uuid"], source, epoch, problem)

        self._notifier.instance(f"{FORCE_COMPLETE}.start", row, context=bus_context)
        try:
            await self._compute.force_complete_live_migration(bus_context, source, row["uuid"])
        except RpcError as error:
            log.warning("host %s of instance %s does not answer: %s", source, row["uuid"], error)
            problem = "The host does not answer."
            await end(problem)
            raise Unavailable(problem) from error
        except MicronovaError as error:
            await end(error.message)
            raise
        await end(None)
        self._notifier.instance(f"{FORCE_COMPLETE}.end", row, context=bus_context)

    def _check_running(
        self, conn: sa.Connection, context: RequestContext, id: str, number: int | None
    ) -> tuple[str, int]:
        """Record the request; return the host that sends the guest, and the server's epoch."""
        row = instances.lock_existing(conn, id)
        if row["vm_state"] != states.ACTIVE:
            raise Conflict(f"Cannot 'force_complete' instance {id} while it is in vm_state {row['vm_state']}")
        if row["task_state"] != states.MIGRATING:
            raise Conflict(f"Cannot 'force_complete' instance {id} while it is in task_state {row['task_state']}")
        migration = _of_instance(conn, id, number)
        if migration is None:
            raise Invalid(f"Migration {number} not found for instance {id}")
        if migration["status"] != migration_states.RUNNING:
            raise Invalid(
                f"Migration {number} state of instance {id} is {migration['status']}. Cannot force complete while the "
                "migration is in this state."
            )
        now, source = micros(self._clock.now()), str(migration["source_compute"])
        request = context.request_id
        instance_actions.start(conn, id, request, FORCE_COMPLETE, context.user_id, context.project_id, now)
        instance_actions.event_start(conn, id, request, row["epoch"], f"compute_{FORCE_COMPLETE}", now, source)
        return source, row["epoch"]

    def _record_end(
        self,
        conn: sa.Connection,
        context: RequestContext,
        id: str,
        source: str,
        epoch: int,
        problem: str | None,
    ) -> None:
        """Record that the host has answered, or why it has not."""
        now, request = micros(self._clock.now()), context.request_id
        result = "Success" if problem is None else "Error"
        event = f"compute_{FORCE_COMPLETE}"
        instance_actions.event_finish(conn, id, request, epoch, event, now, result, source, problem)
        instance_actions.finish(conn, id, request, now, None if problem is None else "Error")


def _of_instance(conn: sa.Connection, id: str, number: int | None) -> MigrationRow | None:
    """Return the live migration of a server by its number, or None."""
    for migration in server_migrations.of_instance(conn, id):
        if migration["id"] == number and migration["migration_type"] == migration_states.LIVE_MIGRATION:
            return migration
    return None
