"""Requests on a server that exists.

These are the actions of the table of states, delete and restore, and changes that the API makes itself (lock, unlock,
reset of the state).

A request is accepted when its transaction is committed. Only then a message tells a conductor, and that message may be
lost.
"""

from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec

import sqlalchemy as sa

from micronova.compute.rpcapi import ComputeAPI
from micronova.db import instance_actions, instances, nodes, quotas, server_migrations
from micronova.db import operations as operation_rows
from micronova.db.secrets import Secrets
from micronova.db.server_migrations import HostAsked
from micronova.notifications.notifier import API
from micronova.objects import migration_states, states
from micronova.objects.clock import micros
from micronova.objects.context import Context, RequestContext
from micronova.objects.errors import Conflict, HostNotHeard, NotSupported
from micronova.objects.ids import new_uuid
from micronova.objects.instance import InstanceChanges, InstanceRow, changed
from micronova.objects.operations import BIND_PORTS, Payload, PowerPayload
from micronova.servers.action_recorder import ActionRecorder
from micronova.servers.dependencies import RequestDependencies

P = ParamSpec("P")

HOST_ANSWER_TIMEOUT: Final = 5.0
"""Seconds in which a server's host has to answer before the copy of its disks on another host is given up."""


class ServerActions:
    """Accepts requests on servers that exist."""

    def __init__(self, dependencies: RequestDependencies, compute: ComputeAPI, *, reclaim_interval: float) -> None:
        """`reclaim_interval` is how many seconds a deleted server can be restored; 0: it is deleted at once."""
        self._compute = compute
        self._database = dependencies.database
        self._clock = dependencies.clock
        self._random = dependencies.random
        self._conductor = dependencies.conductor
        self._notifier = dependencies.notifier
        self._recorder = ActionRecorder(dependencies)
        self._quota_defaults = dependencies.quota_defaults
        self._service_down_time = dependencies.service_down_time
        self._reclaim_interval = reclaim_interval

    # --- operations ------------------------------------------------------------------------------------------

    async def delete(self, context: RequestContext, row: InstanceRow, *, force: bool = False) -> None:
        """Accept a delete, which is repeated until it succeeds.

        Where deletion is deferred, the server can be restored for a time, unless `force` is given.
        """
        check_lock(context, row)
        operations = await self._with_host_asked(self._begin_delete, context, row["uuid"], force)
        if operations:
            await self._conductor.run_operations(context.for_bus(), operations)

    async def restore(self, context: RequestContext, row: InstanceRow) -> None:
        """Accept the request to restore a server that is soft-deleted."""
        check_lock(context, row)
        operations = await self._database.write(self._begin_restore, context, row["uuid"])
        await self._conductor.run_operations(context.for_bus(), operations)

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
        payload: Payload,
        check: Callable[[InstanceRow], None] | None = None,
        *,
        respects_lock: bool = True,
        secrets: Secrets | None = None,
        timeout: float | None = None,
    ) -> str:
        """Accept an action if the server's state and its lock allow it; return the id of its operation.

        `check` is called with the server, whose row is locked, and raises if the action must be refused for another
        reason. Without `respects_lock` a server that a user has locked accepts the action as well. `secrets` are stored
        encrypted until the operation ends. The operation fails if it has not ended after `timeout` seconds
        (`RequestDependencies.operation_timeout`).
        """
        if respects_lock:
            check_lock(context, row)
        operations = await self._database.write(
            self.check_and_record,
            context,
            row["uuid"],
            kind,
            action,
            payload,
            check,
            secrets=secrets,
            timeout=timeout,
        )
        await self._conductor.run_operations(context.for_bus(), operations)
        return operations[0]

    async def _with_host_asked(
        self,
        write: Callable[Concatenate[sa.Connection, HostAsked | None, P], tuple[str, ...]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[str, ...]:
        """Run a transaction; if it needs to know whether the server's host is there, ask that host and repeat it."""
        try:
            return await self._database.write(write, None, *args, **kwargs)
        except HostNotHeard as error:
            host = str(error.details["host"])
        asked = HostAsked(host, await self._compute.answers(host, HOST_ANSWER_TIMEOUT))
        return await self._database.write(write, asked, *args, **kwargs)

    def _begin_delete(
        self, conn: sa.Connection, asked: HostAsked | None, context: RequestContext, id: str, force: bool
    ) -> tuple[str, ...]:
        row = instances.lock_existing(conn, id)
        if row["task_state"] == states.DELETING:
            return ()  # it is being deleted already
        if self._reclaim_interval > 0 and not force:
            if row["task_state"] == states.SOFT_DELETING or row["vm_state"] == states.SOFT_DELETED:
                return ()
            if _can_be_soft_deleted(row):
                return self._begin_soft_delete(conn, asked, context, row)
        changes: InstanceChanges = {"task_state": states.DELETING}
        operations = self._recorder.record(conn, context, row, "delete", changes, None, endless=True)
        # If the server is moving, its own host gets the order to delete; `abandon` records a departure for the other
        # host.
        now, epoch = micros(self._clock.now()), row["epoch"] + 1
        failed = migration_states.FAILED
        server_migrations.abandon(conn, row, now, epoch=epoch, status=failed, down_time=None, context=None)
        return operations

    def _begin_soft_delete(
        self, conn: sa.Connection, asked: HostAsked | None, context: RequestContext, row: InstanceRow
    ) -> tuple[str, ...]:
        changes: InstanceChanges = {
            "task_state": states.SOFT_DELETING,
            "deleted_at": micros(self._clock.now()),
            "progress": 0,
        }
        operations = self._recorder.record(conn, context, row, "soft_delete", changes, None, endless=True)
        operations += self._end_move(conn, asked, context.for_bus(), row, migration_states.FAILED, switched_off=True)
        if row["deleted_at"] is None:
            quotas.release_server(conn, row)
        return operations

    def _begin_restore(self, conn: sa.Connection, context: RequestContext, id: str) -> tuple[str, ...]:
        row = instances.lock_existing(conn, id)
        action = states.ACTIONS["restore"]
        check_state(action, row)
        changes: InstanceChanges = {"task_state": action.task_state, "deleted_at": None}
        operations = self._recorder.record(conn, context, row, "restore", changes, PowerPayload(action="restore"))
        if row["deleted_at"] is not None:  # else it is charged
            limits = quotas.limits_for(conn, row["project_id"], self._quota_defaults, row["user_id"])
            quotas.charge_server(conn, row, limits)
        return operations

    def check_and_record(
        self,
        conn: sa.Connection,
        context: RequestContext,
        id: str,
        kind: str,
        action: states.Action,
        payload: Payload,
        check: Callable[[InstanceRow], None] | None = None,
        *,
        operation_id: str | None = None,
        deferred_for: float = 0.0,
        secrets: Secrets | None = None,
        timeout: float | None = None,
    ) -> tuple[str, ...]:
        """Record an action in the caller's transaction, if the server's state and its host's driver allow it.

        `check`, `secrets` and `timeout` are as in `begin`. `ActionRecorder.record` explains `operation_id`,
        `deferred_for` and what is returned.
        """
        row = instances.lock_existing(conn, id)
        check_state(action, row)
        check_capability(conn, action, row)
        if check is not None:
            check(row)
        return self._recorder.record(
            conn,
            context,
            row,
            kind,
            {"task_state": action.task_state},
            payload,
            operation_id=operation_id,
            deferred_for=deferred_for,
            secrets=secrets,
            timeout=timeout,
        )

    # --- changes without an operation ------------------------------------------------------------------------

    async def lock(self, context: RequestContext, row: InstanceRow, reason: str | None) -> None:
        """Lock a server: only admins may change it."""
        if await self._database.write(self._lock, context, row["uuid"], reason):
            locked = changed(row, {"locked_by": lock_holder(context, row), "locked_reason": reason})
            self._notifier.instance("lock", locked, context=context.for_bus(), sender=API)

    async def unlock(self, context: RequestContext, row: InstanceRow) -> None:
        """Unlock a server."""
        await self._database.write(self._unlock, context, row["uuid"])
        unlocked = changed(row, {"locked_by": None, "locked_reason": None})
        self._notifier.instance("unlock", unlocked, context=context.for_bus(), sender=API)

    async def reset_state(self, context: RequestContext, row: InstanceRow, vm_state: str) -> None:
        """Set the state of a server and cancel its operations; one that moves stays on the host that it belongs to.

        It keeps a task state until its guest is again what it was before the move. A later reset ends that if it hangs.
        """
        operations = await self._with_host_asked(self._reset_state, context.for_bus(), row["uuid"], vm_state)
        if operations:
            await self._conductor.run_operations(context.for_bus(), operations)

    def _lock(self, conn: sa.Connection, context: RequestContext, id: str, reason: str | None) -> bool:
        row = instances.lock_existing(conn, id)
        holder = lock_holder(context, row)
        if row["locked_by"] is not None and holder == "owner":
            return False  # an admin's lock, and its reason, stay as they are
        self.record_done(conn, context, row, "lock", {"locked_by": holder, "locked_reason": reason})
        return True

    def _unlock(self, conn: sa.Connection, context: RequestContext, id: str) -> None:
        row = instances.lock_existing(conn, id)
        self.record_done(conn, context, row, "unlock", {"locked_by": None, "locked_reason": None})

    def record_done(
        self, conn: sa.Connection, context: RequestContext, row: InstanceRow, name: str, values: InstanceChanges
    ) -> None:
        """Change a server, whose row is locked, and record an instance action of this name that has ended."""
        now = micros(self._clock.now())
        instances.update(conn, row["uuid"], now, values)
        instance_actions.record_done(conn, row, context, name, now, event=f"api_{name}")

    def _reset_state(
        self, conn: sa.Connection, asked: HostAsked | None, context: Context, id: str, vm_state: str
    ) -> tuple[str, ...]:
        row = instances.lock_existing(conn, id)
        if row["task_state"] == states.DELETING:
            raise Conflict(
                f"Cannot reset the state of instance {id}: it is being deleted, and a delete cannot be cancelled."
            )
        now = micros(self._clock.now())
        changes: InstanceChanges = {"vm_state": vm_state, "task_state": None, "epoch": row["epoch"] + 1}
        instances.update(conn, id, now, {**changes, "deleted_at": None})
        server_migrations.end_undo(conn, row, now, self._service_down_time)
        operation_rows.cancel_open(conn, id, now)
        instance_actions.record_done(conn, row, context, "resetState", now)
        operations = self._end_move(conn, asked, context, row, migration_states.ERROR)
        if (task_state := server_migrations.idle_task_state(conn, id)) is not None:
            instances.update(conn, id, now, {"task_state": task_state})
        # An offload may have unbound its ports.
        if row["task_state"] == states.SHELVING_OFFLOADING and instances.has_ports_or_volumes(conn, row):
            operations += (self._bind_ports(conn, context, row, row["epoch"] + 1, now),)
        if row["deleted_at"] is not None:  # it is not soft-deleted any more
            quotas.charge_server(conn, row, {})
        return operations

    def _end_move(
        self,
        conn: sa.Connection,
        asked: HostAsked | None,
        context: Context,
        row: InstanceRow,
        status: str,
        *,
        switched_off: bool = False,
    ) -> tuple[str, ...]:
        """End the move of a server, whose row is locked, at the next epoch; it stays on the host that it belongs to.

        Raise Conflict if that would remove the only copy of its disks. Raise HostNotHeard if this depends on whether
        its host is there, and nobody has `asked` the host. With `switched_off` the request switches the guest off.

        Return the operations that undo the move, and that bind its ports and volumes again if the move may have bound
        them elsewhere.
        """
        now, epoch = micros(self._clock.now()), row["epoch"] + 1
        undo = server_migrations.abandon(
            conn,
            row,
            now,
            epoch=epoch,
            status=status,
            down_time=self._service_down_time,
            context=context,
            switched_off=switched_off,
            asked=asked,
        )
        if undo is None or not instances.has_ports_or_volumes(conn, row):
            return undo or ()
        return (*undo, self._bind_ports(conn, context, row, epoch, now))

    def _bind_ports(self, conn: sa.Connection, context: Context, row: InstanceRow, epoch: int, now: int) -> str:
        """Record and return the operation that binds the ports and volumes of a server to its host again."""
        id = new_uuid(self._random)
        operation_rows.follow_up(conn, row["uuid"], BIND_PORTS, id=id, epoch=epoch, now=now, context=context)
        return id


def check_lock(context: RequestContext, row: InstanceRow) -> None:
    """Raise Conflict if the server is locked and the caller is not an admin."""
    if row["locked_by"] and not context.is_admin:
        raise Conflict(f"Instance {row['uuid']} is locked")


def check_state(action: states.Action, row: InstanceRow) -> None:
    """Raise Conflict if the server's state does not allow the action."""
    reason = states.refusal(action, row["vm_state"], row["task_state"], row["host"] is not None)
    if reason is not None:
        raise Conflict(f"Cannot '{action.shown_name}' instance {row['uuid']} {reason}")


def _can_be_soft_deleted(row: InstanceRow) -> bool:
    """Return whether a server can be soft-deleted: it has run, and has a host, which may be away for the moment."""
    return (
        row["launched_at"] is not None and row["host"] is not None and row["task_state"] != states.SHELVING_OFFLOADING
    )


def check_capability(conn: sa.Connection, action: states.Action, row: InstanceRow) -> None:
    """Raise NotSupported if the driver of the server's host cannot do the action."""
    if action.capability is not None and nodes.lacks(conn, row["node_uuid"], action.capability):
        refused = f"Cannot '{action.shown_name}' instance {row['uuid']}"
        raise NotSupported(f"{refused}: the hypervisor of its host is not able to.")


def lock_holder(context: RequestContext, row: InstanceRow) -> str:
    """Return "owner" if the caller belongs to the server's project, else "admin"."""
    return "owner" if context.project_id == row["project_id"] else "admin"
