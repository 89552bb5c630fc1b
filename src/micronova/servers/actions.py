"""Server actions: one transaction sets the task state and records the operation.

A request is accepted when its transaction is committed. Only then a message tells a conductor, and that message may be
lost.
"""

import random
from collections.abc import Callable

import msgspec
import sqlalchemy as sa

from micronova.conductor.rpcapi import ConductorAPI
from micronova.db import instance_actions, instances, nodes
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.notifications.notifier import Notifier
from micronova.objects import states
from micronova.objects.clock import Clock, micros
from micronova.objects.context import RequestContext
from micronova.objects.errors import Conflict, NotSupported
from micronova.objects.ids import new_uuid
from micronova.objects.instance import InstanceChanges, InstanceRow, changed
from micronova.objects.operations import PowerPayload

NO_DEADLINE = 253_402_300_799_000_000  # of a delete: the end of the year 9999


class ServerActions:
    """Accepts the actions that the table of states allows."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        random: random.Random,
        conductor: ConductorAPI,
        notifier: Notifier,
        timeout: float,
    ) -> None:
        self._database = database
        self._clock = clock
        self._random = random
        self._conductor = conductor
        self._notifier = notifier
        self._timeout = timeout

    # --- operations ------------------------------------------------------------------------------------------

    async def delete(self, context: RequestContext, row: InstanceRow) -> None:
        """Accept a delete. It is repeated until it succeeds."""
        check_lock(context, row)
        operation = await self._database.write(self._begin_delete, context, row["uuid"])
        if operation is not None:
            await self._conductor.run_operations(context.for_bus(), (operation,))

    async def power(
        self,
        context: RequestContext,
        row: InstanceRow,
        kind: str,
        action_name: str,
        parameters: dict[str, str] | None = None,
    ) -> None:
        """Accept a start, stop, reboot, pause or another action that only changes the power state."""
        payload = PowerPayload(action=action_name, parameters=parameters or {})
        await self.begin(context, row, kind, states.ACTIONS[action_name], payload)

    async def begin(
        self,
        context: RequestContext,
        row: InstanceRow,
        kind: str,
        action: states.Action,
        payload: msgspec.Struct,
        check: Callable[[InstanceRow], None] | None = None,
        *,
        respects_lock: bool = True,
    ) -> str:
        """Accept an action if the server's state and its lock allow it; return the id of its operation.

        `check` is called with the server, whose row is locked, and raises if the action must be refused for another
        reason. Without `respects_lock` a server that a user has locked accepts the action as well.
        """
        if respects_lock:
            check_lock(context, row)
        operation = await self._database.write(self._begin, context, row["uuid"], kind, action, payload, check)
        await self._conductor.run_operations(context.for_bus(), (operation,))
        return operation

    def _begin_delete(self, conn: sa.Connection, context: RequestContext, id: str) -> str | None:
        row = instances.lock_existing(conn, id)
        if row["task_state"] == states.DELETING:
            return None  # it is being deleted already
        return self._accept(conn, context, row, "delete", states.DELETING, None, deadline=NO_DEADLINE)

    def _begin(
        self,
        conn: sa.Connection,
        context: RequestContext,
        id: str,
        kind: str,
        action: states.Action,
        payload: msgspec.Struct,
        check: Callable[[InstanceRow], None] | None,
    ) -> str:
        row = instances.lock_existing(conn, id)
        check_state(kind, action, row)
        if action.capability is not None and nodes.lacks(conn, row["node_uuid"], action.capability):
            raise NotSupported(f"Cannot '{kind}' instance {id}: the hypervisor of its host is not able to.")
        if check is not None:
            check(row)
        deadline = micros(self._clock.now() + self._timeout)
        return self._accept(conn, context, row, kind, action.task_state, payload, deadline=deadline)

    def _accept(
        self,
        conn: sa.Connection,
        context: RequestContext,
        row: InstanceRow,
        kind: str,
        task_state: str,
        payload: msgspec.Struct | None,
        *,
        deadline: int,
    ) -> str:
        """Record the action on the server, whose row is locked; return the id of its operation."""
        id = new_uuid(self._random)
        operation_rows.accept_action(
            conn,
            row,
            {"task_state": task_state},
            id=id,
            kind=kind,
            context=context.for_bus(),
            payload=payload,
            now=micros(self._clock.now()),
            deadline=deadline,
        )
        return id

    # --- changes without an operation ------------------------------------------------------------------------

    async def lock(self, context: RequestContext, row: InstanceRow, reason: str | None) -> None:
        """Lock a server: only admins may change it."""
        if await self._database.write(self._lock, context, row["uuid"], reason):
            locked = changed(row, {"locked_by": lock_holder(context, row), "locked_reason": reason})
            self._notifier.instance("lock", locked, context=context.for_bus())

    async def unlock(self, context: RequestContext, row: InstanceRow) -> None:
        """Unlock a server."""
        await self._database.write(self._unlock, context, row["uuid"])
        unlocked = changed(row, {"locked_by": None, "locked_reason": None})
        self._notifier.instance("unlock", unlocked, context=context.for_bus())

    async def reset_state(self, row: InstanceRow, vm_state: str) -> None:
        """Set the state of a server and cancel its operations."""
        await self._database.write(self._reset_state, row["uuid"], vm_state)

    def _lock(self, conn: sa.Connection, context: RequestContext, id: str, reason: str | None) -> bool:
        row = instances.lock_existing(conn, id)
        holder = lock_holder(context, row)
        if row["locked_by"] is not None and holder == "owner":
            return False  # an admin's lock, and its reason, stay as they are
        self._note(conn, context, id, "lock", {"locked_by": holder, "locked_reason": reason})
        return True

    def _unlock(self, conn: sa.Connection, context: RequestContext, id: str) -> None:
        instances.lock_existing(conn, id)
        self._note(conn, context, id, "unlock", {"locked_by": None, "locked_reason": None})

    def _note(self, conn: sa.Connection, context: RequestContext, id: str, name: str, values: InstanceChanges) -> None:
        """Change a server and record an instance action of this name that has ended."""
        now = micros(self._clock.now())
        instances.update(conn, id, now, values)
        instance_actions.start(
            conn, id, context.request_id, name, context.user_id, context.project_id, now, finished=True
        )

    def _reset_state(self, conn: sa.Connection, id: str, vm_state: str) -> None:
        row = instances.lock_existing(conn, id)
        if row["task_state"] == states.DELETING:
            raise Conflict(
                f"Cannot reset the state of instance {id}: it is being deleted, and a delete cannot be cancelled."
            )
        now = micros(self._clock.now())
        instances.update(conn, id, now, {"vm_state": vm_state, "task_state": None, "epoch": row["epoch"] + 1})
        operation_rows.cancel_open(conn, id, now)


def check_lock(context: RequestContext, row: InstanceRow) -> None:
    """Raise Conflict if the server is locked and the caller is not an admin."""
    if row["locked_by"] and not context.is_admin:
        raise Conflict(f"Instance {row['uuid']} is locked")


def check_state(kind: str, action: states.Action, row: InstanceRow) -> None:
    """Raise Conflict if the server's state does not allow the action; `kind` is its name in the message."""
    reason = states.refusal(action, row["vm_state"], row["task_state"], row["host"] is not None)
    if reason is not None:
        raise Conflict(f"Cannot '{kind}' instance {row['uuid']} {reason}")


def lock_holder(context: RequestContext, row: InstanceRow) -> str:
    """Return "owner" if the caller belongs to the server's project, else "admin"."""
    return "owner" if context.project_id == row["project_id"] else "admin"
