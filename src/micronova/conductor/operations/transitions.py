"""The transitions of operations of all kinds: to a host, to the next step, to the end.

Methods with a connection run in the transaction of the caller, so that an operation and its instance change together.
`dispatch` and `cancel_in` lock the instance; the callers of the others have locked it.
"""

import logging
from collections.abc import Callable, Sequence

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.dependencies import Dependencies
from micronova.conductor.operations.engine import Operation
from micronova.db import instance_actions, instances
from micronova.db import operations as operation_rows
from micronova.db import services as service_rows
from micronova.objects import states
from micronova.objects.errors import NoValidHost, Stale
from micronova.objects.explanation import COMPUTE_FILTER
from micronova.objects.instance import Fault, InstanceChanges, InstanceRow
from micronova.objects.network import VIF
from micronova.objects.operations import Result, Step
from micronova.objects.orders import WorkOrder
from micronova.objects.service_names import COMPUTE
from micronova.rpc.errors import BusUnavailable

log = logging.getLogger(__name__)

Notification = tuple[str, InstanceRow, Fault | None]
"""A notification to send: its name, the instance, the fault."""

Release = Callable[[sa.Connection, Operation, InstanceRow | None], None]
"""Gives back what a cancelled operation holds."""


class Transitions:
    """The transitions of one kind of operation; `event` is the kind's event in the instance action."""

    def __init__(self, dependencies: Dependencies, event: str) -> None:
        self._dependencies = dependencies
        self._engine = dependencies.engine
        self._event = event

    # --- to a host -------------------------------------------------------------------------------------------

    def dispatch(
        self,
        conn: sa.Connection,
        operation: Operation,
        host: str,
        changes: InstanceChanges,
        payload: bytes | None = None,
    ) -> Operation | None:
        """Make a host the owner of an operation, change the instance and start the event.

        Return the operation as it is persisted, or None if another request or conductor has taken over.
        """
        now = self._engine.now()
        epoch = changes.get("epoch", operation.epoch)
        known = instances.lock(conn, operation.instance_uuid)
        if known is None or known["epoch"] != operation.epoch:
            return None
        owner = operation_rows.host_owner(host)
        if not self.persist(conn, operation, "dispatched", payload=payload, owner=owner, epoch=epoch):
            return None
        if changes:
            instances.update(conn, operation.instance_uuid, now, changes, epoch=operation.epoch)
        # The epoch numbers the event: each attempt of a build has an event of its own.
        instance_actions.event_start(
            conn, operation.instance_uuid, operation.context.request_id, epoch, self._event, now, host=host
        )
        return msgspec.structs.replace(
            operation,
            owner=owner,
            step="dispatched",
            epoch=epoch,
            payload=operation.payload if payload is None else payload,
        )

    async def send(self, operation: Operation, order: WorkOrder) -> None:
        """Send an order. If the bus does not take it, the reply to the host's next heartbeat has it."""
        try:
            await self._dependencies.compute.send_order(operation.context, order)
        except BusUnavailable as error:
            log.warning(
                "order %s for instance %s was not sent to host %s: %s; the reply to its next heartbeat has it",
                order.kind,
                order.instance.uuid,
                order.host,
                error,
            )

    def return_to_host(self, conn: sa.Connection, operation: Operation, host: str) -> None:
        """Return the operation to its host, which is up; the host's next heartbeat renews the lease."""
        self.persist(conn, operation, "dispatched", owner=operation_rows.host_owner(host))

    async def host_is_down(self, host: str) -> bool:
        """Return whether a host has sent no heartbeat for too long, although this conductor could receive it."""
        if not self._engine.health.healthy():
            return False
        return not await self._engine.database.read(
            service_rows.host_is_up, host, self._engine.now(), self._dependencies.service_down_time
        )

    async def hosts_may_return(self, error: NoValidHost) -> bool:
        """Return whether hosts are silent only for a short time, or only because nobody got their heartbeats."""
        if error.details.get("hosts_may_return"):
            return True
        if self._engine.health.healthy():
            return False
        # The heartbeats may have arrived since the scheduler decided.
        reasons = error.details.get("reasons", ())
        if any(reason["name"] == COMPUTE_FILTER and reason["removed"] for reason in reasons):
            return True
        return await self._engine.database.read(
            service_rows.any_without_heartbeat, COMPUTE, self._engine.now(), self._dependencies.service_down_time
        )

    # --- progress and end ------------------------------------------------------------------------------------

    def persist(
        self,
        conn: sa.Connection,
        operation: Operation,
        step: Step,
        *,
        owner: str | None = None,
        epoch: int | None = None,
        payload: bytes | None = None,
        seconds: float | None = None,
    ) -> bool:
        """Persist the next step of an operation; its owner is this conductor unless another is named.

        Return False, and change nothing, if the operation has got another owner.
        """
        return operation_rows.step(
            conn,
            operation.id,
            operation.lease,
            step=step,
            payload=operation.payload if payload is None else payload,
            until=self._engine.until(seconds),
            new_owner=owner or self._engine.owner,
            new_epoch=epoch,
        )

    # `Operation.is_current` answers whether an operation is still the worker's own. A transaction asks with `owns`,
    # which locks the row. Work on ports is in another service: it asks with a check before each change. To delete
    # ports, an operation need not be current if its server is being deleted.

    def owns(self, conn: sa.Connection, operation: Operation) -> bool:
        """Lock the operation and return whether it is current."""
        return operation.is_current(operation_rows.get(conn, operation.id, lock=True))

    async def check_owned(self, operation: Operation) -> None:
        """Raise Stale if the operation is not current."""
        if not operation.is_current(await self._engine.database.read(operation_rows.get, operation.id)):
            raise Stale(f"Operation {operation.id} has got another owner.")

    def continued_elsewhere(self, conn: sa.Connection, operation: Operation) -> bool:
        """Return whether another owner may use the server's ports: it has the operation, and no delete has begun."""
        if operation.is_current(operation_rows.get(conn, operation.id)):
            return False
        instance = instances.get(conn, operation.instance_uuid)
        return instance is not None and instance["task_state"] != states.DELETING

    async def check_not_continued(self, operation: Operation) -> None:
        """Raise Stale if another owner may use the server's ports."""
        if await self._engine.database.read(self.continued_elsewhere, operation):
            raise Stale(f"Operation {operation.id} has got another owner.")

    async def withdraw(self, operation: Operation, vifs: Sequence[VIF]) -> None:
        """Delete the ports that an overtaken attempt created, unless the server has them."""
        created = [vif.port_id for vif in vifs if not vif.preserve_on_delete]
        if self._dependencies.network_client is None or not created:
            return

        async def check() -> None:
            instance = await self._engine.database.read(instances.get, operation.instance_uuid)
            if instance is not None and any(vif["port_id"] in created for vif in instance["network_info"]):
                raise Stale(f"Instance {operation.instance_uuid} has the ports of the attempt.")

        await self._dependencies.network_client.withdraw(created, check=check)

    def end(
        self,
        conn: sa.Connection,
        operation: Operation,
        result: Result,
        *,
        host: str | None = None,
        fault: Fault | None = None,
        event: str | None = None,
        payload: bytes | None = None,
    ) -> bool:
        """End the operation, its event and its instance action; return False if it has got another owner.

        When the transaction is committed, the caller counts the end: see `NoMoreWork.ended`.
        """
        now = self._engine.now()
        if not operation_rows.finish(conn, operation.id, now, result, operation.lease, payload=payload):
            return False
        request_id = operation.context.request_id
        if result == "cancelled":
            instance_actions.cancel(conn, operation.instance_uuid, request_id, now)
            return True
        failed = result == "error"
        instance_actions.event_finish(
            conn,
            operation.instance_uuid,
            request_id,
            operation.epoch,
            event or self._event,
            now,
            result="Error" if failed else "Success",
            host=host,
            details=fault["message"] if fault else None,
        )
        instance_actions.finish(conn, operation.instance_uuid, request_id, now, message="Error" if failed else None)
        return True

    async def cancel(self, operation: Operation, release: Release | None = None) -> None:
        """End an operation that a later request has overtaken; operations that wait for this are taken at once."""
        waiting = await self._engine.database.write(self.cancel_in, operation, release)
        if waiting is None:
            return
        self._engine.ended(operation, "cancelled")
        if waiting:
            await self._engine.lease_and_run(waiting)

    def cancel_in(self, conn: sa.Connection, operation: Operation, release: Release | None = None) -> list[str] | None:
        """End an overtaken operation and give back what it holds; return the operations that waited for this.

        Return None, and change nothing, if it has got another owner.
        """
        row = instances.lock(conn, operation.instance_uuid)
        operation_rows.lock_open_of(conn, operation.instance_uuid)
        if not self.end(conn, operation, "cancelled"):
            return None
        if release is not None:
            release(conn, operation, row)
        return operation_rows.wake(conn, operation.instance_uuid)

    def notify(self, name: str, operation: Operation, row: InstanceRow, fault: Fault | None = None) -> None:
        """Send the notification with this name."""
        self._dependencies.notifier.instance(name, row, context=operation.context, fault=fault)
