"""Accepting what is to be done to a server that exists: one transaction with its new state and the operation.

A request is accepted when its transaction is committed. Only then is a conductor told, and that message may get lost.
"""

import logging
import random
from collections.abc import Callable
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.compute import states
from micronova.conductor.kinds import Notifier
from micronova.conductor.operations import new_row
from micronova.conductor.power import PowerPayload
from micronova.conductor.rpcapi import ConductorAPI
from micronova.db import actions, instances, nodes
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.http.context import RequestContext
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Conflict, InstanceNotFound, NotSupported
from micronova.objects.ids import new_uuid
from micronova.rpc.contract import Context
from micronova.rpc.errors import BusUnavailable

log = logging.getLogger(__name__)

NEVER = 253_402_300_799_000_000  # the end of the year 9999: a delete has no deadline


class Acceptance:
    """What may be done to servers, by the table of states."""

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

    # --- work for a conductor --------------------------------------------------------------------------------

    async def delete(self, context: RequestContext, row: Any) -> None:
        """Accept the end of a server; from here on it always converges."""
        check_lock(context, row)
        rpc = rpc_context(context)
        operation = await self._database.write(self._begin_delete, context, row["uuid"], rpc)
        if operation is not None:
            await self._hint(rpc, operation)

    async def power(
        self, context: RequestContext, row: Any, kind: str, action_name: str, parameters: dict[str, str] | None = None
    ) -> None:
        """Accept a start, stop, reboot, pause or the like."""
        payload = PowerPayload(action=action_name, parameters=parameters or {})
        await self.begin(context, row, kind, states.ACTIONS[action_name], payload)

    async def begin(
        self,
        context: RequestContext,
        row: Any,
        kind: str,
        action: states.Action,
        payload: msgspec.Struct,
        check: Callable[[Any], None] | None = None,
    ) -> str:
        """Accept an action that may start in the server's state, and return its operation.

        `check` is called with the locked server, and raises when there is more that speaks against it.
        """
        if action.respects_lock:
            check_lock(context, row)
        rpc = rpc_context(context)
        operation = await self._database.write(self._begin, context, row["uuid"], kind, action, payload, check, rpc)
        await self._hint(rpc, operation)
        return operation

    def _begin_delete(self, conn: sa.Connection, context: RequestContext, id: str, rpc: Context) -> str | None:
        row = _locked(conn, id)
        if row["task_state"] == states.DELETING:
            return None  # asked for already
        action = states.ACTIONS["delete"]
        return self._accept(conn, context, row, "delete", action, None, rpc, deadline=NEVER)

    def _begin(
        self,
        conn: sa.Connection,
        context: RequestContext,
        id: str,
        kind: str,
        action: states.Action,
        payload: msgspec.Struct,
        check: Callable[[Any], None] | None,
        rpc: Context,
    ) -> str:
        row = _locked(conn, id)
        reason = states.refusal(action, row["vm_state"], row["task_state"], row["host"] is not None)
        if reason is not None:
            raise Conflict(f"Cannot '{kind}' instance {id} {reason}")
        if action.capability is not None and nodes.lacks(conn, row["node_uuid"], action.capability):
            raise NotSupported(f"Cannot '{kind}' instance {id}: the hypervisor of its host is not able to.")
        if check is not None:
            check(row)
        deadline = micros(self._clock.now() + self._timeout)
        return self._accept(conn, context, row, kind, action, payload, rpc, deadline=deadline)

    def _accept(
        self,
        conn: sa.Connection,
        context: RequestContext,
        row: Any,
        kind: str,
        action: states.Action,
        payload: msgspec.Struct | None,
        rpc: Context,
        *,
        deadline: int,
    ) -> str:
        """Show that it is being done, end what was done before, and record the operation; the instance is locked."""
        now, id, epoch = micros(self._clock.now()), row["uuid"], row["epoch"] + 1
        instances.update(conn, id, now, {"task_state": action.task_state, "epoch": epoch})
        _overtake(conn, id, now)
        actions.start(conn, id, context.request_id, kind, context.user_id, context.project_id, now)
        operation = new_row(
            id=new_uuid(self._random),
            kind=kind,
            version=1,
            instance_uuid=id,
            group_id=id,
            step="new",
            epoch=epoch,
            now=now,
            deadline=deadline,
            context=rpc,
            payload=payload,
        )
        operation_rows.insert(conn, [operation])
        return str(operation["id"])

    async def _hint(self, rpc: Context, operation: str) -> None:
        try:
            await self._conductor.run_operations(rpc, (operation,))
        except BusUnavailable as error:
            log.warning("the bus did not take a hint (%s); the next sweep starts the work", error)

    # --- what is done at once --------------------------------------------------------------------------------

    async def lock(self, context: RequestContext, row: Any, reason: str | None) -> None:
        """Keep everybody but admins from changing a server."""
        if await self._database.write(self._lock, context, row["uuid"], reason):
            locked = {**row, "locked_by": lock_holder(context, row), "locked_reason": reason}
            self._notifier.instance("lock", locked, context=rpc_context(context))

    async def unlock(self, context: RequestContext, row: Any) -> None:
        """Let a server be changed again."""
        await self._database.write(self._unlock, context, row["uuid"])
        unlocked = {**row, "locked_by": None, "locked_reason": None}
        self._notifier.instance("unlock", unlocked, context=rpc_context(context))

    async def reset_state(self, row: Any, vm_state: str) -> None:
        """Set what a server is by hand; what is being done to it is given up."""
        await self._database.write(self._reset_state, row["uuid"], vm_state)

    def _lock(self, conn: sa.Connection, context: RequestContext, id: str, reason: str | None) -> bool:
        row = _locked(conn, id)
        holder = lock_holder(context, row)
        if row["locked_by"] is not None and holder == "owner":
            return False  # an admin's lock, and its reason, stay as they are
        self._note(conn, context, id, "lock", {"locked_by": holder, "locked_reason": reason})
        return True

    def _unlock(self, conn: sa.Connection, context: RequestContext, id: str) -> None:
        _locked(conn, id)
        self._note(conn, context, id, "unlock", {"locked_by": None, "locked_reason": None})

    def _note(self, conn: sa.Connection, context: RequestContext, id: str, action: str, values: dict[str, Any]) -> None:
        now = micros(self._clock.now())
        instances.update(conn, id, now, values)
        actions.start(conn, id, context.request_id, action, context.user_id, context.project_id, now, finished=True)

    def _reset_state(self, conn: sa.Connection, id: str, vm_state: str) -> None:
        row = _locked(conn, id)
        if row["task_state"] == states.DELETING:
            raise Conflict(f"Cannot reset the state of instance {id}: it is being deleted, which goes on to its end.")
        now = micros(self._clock.now())
        instances.update(conn, id, now, {"vm_state": vm_state, "task_state": None, "epoch": row["epoch"] + 1})
        _overtake(conn, id, now)


def check_lock(context: RequestContext, row: Any) -> None:
    """Refuse a change of a locked server to everybody but admins."""
    if row["locked_by"] and "admin" not in context.roles:
        raise Conflict(f"Instance {row['uuid']} is locked")


def lock_holder(context: RequestContext, row: Any) -> str:
    """Say in which role a caller locks a server: who is of its project is an owner, whatever else it may do."""
    return "owner" if context.project_id == row["project_id"] else "admin"


def rpc_context(context: RequestContext) -> Context:
    """Return a request's context as messages carry it."""
    return Context(
        request_id=context.request_id,
        user_id=context.user_id,
        project_id=context.project_id,
        roles=context.roles,
        traceparent=context.traceparent,
    )


def _locked(conn: sa.Connection, id: str) -> Any:
    row = instances.lock(conn, id)
    if row is None:
        raise InstanceNotFound(f"Instance {id} could not be found.")
    return row


def _overtake(conn: sa.Connection, id: str, now: int) -> None:
    """End what is done to a server, in its history as well: something else is done now."""
    for context in operation_rows.cancel_others(conn, id, now):
        actions.cut_short(conn, id, msgspec.msgpack.decode(context, type=Context).request_id, now)
