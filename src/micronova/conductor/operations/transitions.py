"""The transitions of operations of all kinds: to a host, to the next step, to the end.

Methods with a connection run in the transaction of the caller, so that an operation and its instance change together.
`dispatch`, `end_and_wake`, `cancel_in` and `lock_current` lock the instance. The callers of the others that write have
locked it, except those of `return_to_host` and `_explain_wait`, which change only operations, and of `end` for an
instance that is gone.
"""

import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.orders import with_secrets
from micronova.conductor.operations.placing import ServerToPlace
from micronova.conductor.operations.volume_connections import LockCurrent, VolumeConnections
from micronova.db import (
    allocations,
    departures,
    explanations,
    instance_actions,
    instances,
    server_migrations,
    topologies,
)
from micronova.db import operations as operation_rows
from micronova.db import services as service_rows
from micronova.notifications import usage
from micronova.objects import states
from micronova.objects.errors import (
    GuestElsewhere,
    HostNotHeard,
    HostUnavailable,
    NoValidHost,
    SecretNotReadable,
    Stale,
    Unavailable,
)
from micronova.objects.explanation import COMPUTE_FILTER, Explanation, explanation_of
from micronova.objects.instance import Fault, InstanceChanges, InstanceRow
from micronova.objects.migration import MigrationRow
from micronova.objects.network import VIF
from micronova.objects.operations import Result, Step
from micronova.objects.orders import WorkOrder
from micronova.objects.port_resources import ServedPort, all_answered
from micronova.objects.scheduling import RequestSpec
from micronova.objects.service_names import COMPUTE
from micronova.rpc.errors import BusUnavailable

log = logging.getLogger(__name__)

LONGEST_WAIT_FOR_HOSTS = 15.0  # seconds until a server that found no host is placed again; hosts may be back soon
LONGEST_WAIT_FOR_REMOVAL = 2.0  # seconds between two looks whether another host has removed its guest

_USAGE_CHANGES = frozenset({"rescue.end", "resize_prep.start", "resize_revert.start", "shelve.start"})
"""Notifications before which Nova sends instance.exists."""

SEQUENCE_STEP: Final = 1 << 20
"""Distance of the sequence numbers of events that have the same epoch."""


class Notification(NamedTuple):
    """A notification to send."""

    name: str
    row: InstanceRow
    fault: Fault | None = None
    sender: str | None = None  # as in `Notifier.instance`
    details: Mapping[str, Any] | None = None  # fields that only this one has, besides those of its kind


Release = Callable[[sa.Connection, Operation, InstanceRow | None], None]
"""Gives back what a cancelled operation holds."""


def server_of(conn: sa.Connection, operation: Operation) -> InstanceRow | None:
    """Return the server of an operation; None if it is gone, or a later request has overtaken the operation."""
    row = instances.get(conn, operation.instance_uuid)
    return None if row is None or row["epoch"] != operation.epoch else row


def _persisted(operation: Operation, step: Step, owner: str, epoch: int, payload: bytes | None) -> Operation:
    """Return an operation as `Transitions.persist` has stored it; without `payload` it keeps the one that it has."""
    kept = operation.payload if payload is None else payload
    return msgspec.structs.replace(operation, step=step, owner=owner, epoch=epoch, payload=kept)


class Transitions:
    """The transitions of one kind of operation.

    Who works on an operation has to know whether it is still current (`Operation.is_current`), or another conductor has
    leased it, or its host has it:

    - A transaction asks with `lock_and_is_current`, which locks the operation, or with `lock_current`, which locks the instance as
      well. That also refuses an operation that is overtaken: a later request has raised the epoch, and may have left
      the operation open for its owner to end.
    - Work on ports is in another service. It asks with a check before each change: `check_current` for ports that the
      operation creates; `check_not_overtaken` to bind ports of a server that exists; `check_not_continued` to delete
      ports, for which the operation need not be current if its server is being deleted.
    """

    def __init__(self, dependencies: ConductorDependencies, event: str) -> None:
        """`event` is the kind's event in the instance action."""
        self._dependencies = dependencies
        self._engine = dependencies.engine
        self._event = event
        self.volumes = VolumeConnections(dependencies, self.lock_current)

    # --- to a host -------------------------------------------------------------------------------------------

    def dispatch(
        self,
        conn: sa.Connection,
        operation: Operation,
        host: str,
        changes: InstanceChanges,
        payload: bytes | None = None,
        *,
        step: Step = "dispatched",
        event: str | None = None,
        endless: bool = False,
    ) -> Operation | None:
        """Make a host the owner of an operation, change the instance and start the event.

        Return the operation as it is persisted, or None if it is no longer current or is overtaken. `event` is that of
        the step, if the kind has several; a step with the event "" has none.
        """
        now = self._engine.now()
        epoch = changes.get("epoch", operation.epoch)
        known = instances.lock(conn, operation.instance_uuid)
        if known is None or known["epoch"] != operation.epoch:
            return None
        owner = operation_rows.host_owner(host)
        if not self.persist(conn, operation, step, payload=payload, owner=owner, epoch=epoch, endless=endless):
            return None
        if changes:
            instances.update(conn, operation.instance_uuid, now, changes, epoch=operation.epoch)
        # The epoch numbers the event: each attempt of a build has an event of its own.
        if event != "":
            instance_actions.event_start(
                conn, operation.instance_uuid, operation.context.request_id, epoch, event or self._event, now, host=host
            )
        return _persisted(operation, step, owner, epoch, payload)

    async def send(self, operation: Operation, order: WorkOrder) -> None:
        """Send an order. If the bus does not take it, or a key cannot be read, the reply to a heartbeat has it."""
        log.info("order %s for instance %s goes to host %s", order.kind, order.instance.uuid, order.host)
        try:
            order = with_secrets(order, self._dependencies.secrets)
            await self._dependencies.compute.send_order(operation.context, order)
        except (BusUnavailable, SecretNotReadable) as error:
            log.warning(
                "order %s for instance %s was not sent to host %s: %s; the reply to a heartbeat has it",
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

    def require_own_copy(
        self, conn: sa.Connection, row: InstanceRow, migration: MigrationRow, since: int | None = None
    ) -> None:
        """Raise HostUnavailable if the host that a server does not belong to has its only copy that can be used.

        The server's own host has a copy as well. It must be up, and be heard of after the time `since`, if that is
        given: else raise HostNotHeard, with the host in its details.
        """
        host = row["host"]
        if host is None or server_migrations.other_copy(conn, row, migration) is None:
            return
        now, down_time = self._engine.now(), self._dependencies.service_down_time
        if not service_rows.host_is_up(conn, host, now, down_time):
            raise HostUnavailable(f"Host {host}, whose guest stays, does not answer.")
        if since is not None and not service_rows.host_is_up(conn, host, now, down_time, since=since):
            raise HostNotHeard("The host whose guest stays has not been heard of since that was asked.", host=host)

    def require_no_other_guest(self, conn: sa.Connection, instance_uuid: str, host: str) -> None:
        """Raise GuestElsewhere if another host than this one still has to remove a guest of the server, and is up.

        Two guests of one server must not run. A host that is down removes its guest when it is back.
        """
        now, down_time = self._engine.now(), self._dependencies.service_down_time
        others = [departure["host"] for departure in departures.elsewhere(conn, instance_uuid, host)]
        if up := [other for other in others if service_rows.host_is_up(conn, other, now, down_time)]:
            raise GuestElsewhere(f"The guest may run on {', '.join(up)}, until it is removed there.")

    def host_is_lost(self, conn: sa.Connection, host: str) -> bool:
        """Return whether a host is lost, so that something may be done without it that cannot be undone.

        It is asked in the transaction that does it. Raise HostUnavailable if the host is silent and this conductor may
        not have got its heartbeats.
        """
        if not service_rows.host_is_lost(conn, host, self._engine.now(), self._dependencies.service_down_time):
            return False
        if not self._engine.health.healthy() and not service_rows.host_is_forced_down(conn, host):
            raise HostUnavailable(f"Whether host {host} is lost is not known: heartbeats may have been lost, too.")
        return True

    async def wait_for_hosts(self, servers: Sequence[ServerToPlace[Any]], error: NoValidHost) -> bool:
        """If silent hosts may return, postpone servers that found no host; return whether they are postponed."""
        if not await self._hosts_may_return(error):
            return False
        if (explanation := explanation_of(error)) is not None:
            explanation = msgspec.structs.replace(explanation, waits=True)
            await self._engine.database.write(self._explain_wait, servers, explanation)
        reason = Unavailable("A host that does not answer for the moment may have room.")
        operations = [server.operation for server in servers]
        await self._engine.postpone(operations, reason, longest=LONGEST_WAIT_FOR_HOSTS)
        return True

    def explain_failure(self, conn: sa.Connection, operation: Operation, error: Exception) -> None:
        """Record why the scheduler found no host, for admins, if that is why the operation fails."""
        if isinstance(error, NoValidHost) and (explanation := explanation_of(error)) is not None:
            explanations.record(conn, operation.id, explanation, again=True)

    def _explain_wait(
        self, conn: sa.Connection, servers: Sequence[ServerToPlace[Any]], explanation: Explanation
    ) -> None:
        """Record why servers wait for a host."""
        explained = ""  # the operation that has the filters
        for server in servers:
            id = server.operation.id
            if server.operation.is_current(operation_rows.get(conn, id)):
                own = explanation.sharing_filters(explained)
                explanations.record(conn, id, own, again=server.payload.placed_before)
                explained = explained or id

    async def _hosts_may_return(self, error: NoValidHost) -> bool:
        """Return whether hosts are silent only for a short time, or only because nobody got their heartbeats."""
        if error.hosts_may_return:
            return True
        if self._engine.health.healthy():
            return False
        # The heartbeats may have arrived since the scheduler decided.
        explanation = explanation_of(error)
        if explanation and any(step.name == COMPUTE_FILTER and step.removed for step in explanation.filters):
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
        lease_seconds: float | None = None,
        endless: bool = False,
    ) -> bool:
        """Persist the next step of an operation; its owner is this conductor unless another is named.

        The lease expires after `lease_seconds`, by default after the engine's: until then nobody takes the operation.
        With `endless` it has no deadline from now on.

        Return False, and change nothing, if the operation has got another owner.
        """
        return operation_rows.persist_step(
            conn,
            operation.id,
            operation.lease,
            step=step,
            payload=operation.payload if payload is None else payload,
            until=self._engine.until(lease_seconds),
            new_owner=owner or self._engine.owner,
            new_epoch=epoch,
            endless=endless,
        )

    def advance(
        self,
        conn: sa.Connection,
        operation: Operation,
        step: Step,
        *,
        payload: bytes | None = None,
        changes: InstanceChanges | None = None,
        endless: bool = False,
        lease_seconds: float | None = None,
    ) -> Operation:
        """Persist that this conductor continues with a step at the next epoch; return the operation as it is then.

        The epoch tells the orders of one operation to the same host apart. `persist` has what `endless` and
        `lease_seconds` are.
        """
        epoch = operation.epoch + 1
        values: InstanceChanges = {**(changes or {}), "epoch": epoch}
        instances.update(conn, operation.instance_uuid, self._engine.now(), values, epoch=operation.epoch)
        self.persist(conn, operation, step, payload=payload, epoch=epoch, endless=endless, lease_seconds=lease_seconds)
        return _persisted(operation, step, self._engine.owner, epoch, payload)

    def continue_at(
        self, conn: sa.Connection, operation: Operation, step: Step, *, payload: bytes | None = None
    ) -> Operation:
        """Persist that this conductor continues with a step at the same epoch; return the operation as it is then.

        The caller has locked the operation and found it current.
        """
        self.persist(conn, operation, step, payload=payload)
        return _persisted(operation, step, self._engine.owner, operation.epoch, payload)

    def lock_and_is_current(self, conn: sa.Connection, operation: Operation) -> bool:
        """Lock the operation and return whether it is current."""
        return operation.is_current(operation_rows.get(conn, operation.id, lock=True))

    def lock_current(self, conn: sa.Connection, operation: Operation) -> InstanceRow | None:
        """Lock the instance and the operation; return the instance.

        Return None if the operation is no longer current or is overtaken.
        """
        row = instances.lock(conn, operation.instance_uuid)
        if not self.lock_and_is_current(conn, operation) or row is None or row["epoch"] != operation.epoch:
            return None
        return row

    async def check_current(self, operation: Operation) -> None:
        """Raise Stale if the operation is not current."""
        if not operation.is_current(await self._engine.database.read(operation_rows.get, operation.id)):
            raise Stale(f"Operation {operation.id} has got another owner.")

    async def check_not_overtaken(self, operation: Operation) -> None:
        """Raise Stale if the operation is not current, or if a later request has changed its instance."""
        if await self._engine.database.read(self._is_overtaken, operation):
            raise Stale(f"Operation {operation.id} is overtaken.")

    def _is_overtaken(self, conn: sa.Connection, operation: Operation) -> bool:
        if server_of(conn, operation) is None:
            return True
        return not operation.is_current(operation_rows.get(conn, operation.id))

    def continued_elsewhere(self, conn: sa.Connection, operation: Operation) -> bool:
        """Return whether another owner may use the server's ports: it has the operation, and no delete has begun."""
        if operation.is_current(operation_rows.get(conn, operation.id)):
            return False
        instance = instances.get(conn, operation.instance_uuid)
        return instance is not None and instance["task_state"] != states.DELETING

    async def check_not_continued(self, operation: Operation) -> None:
        """Raise Stale if another owner may use the server's ports."""
        if await self._engine.database.read(self.continued_elsewhere, operation):
            raise Stale(f"Operation {operation.id} has got another owner, which may use the server's ports.")

    async def delete_ports(self, operation: Operation) -> None:
        """Delete the server's ports, if there is a network service; raise Stale if another owner may use them."""
        if self._dependencies.network_client is not None:
            check = functools.partial(self.check_not_continued, operation)
            await self._dependencies.network_client.deallocate(operation.instance_uuid, check=check)

    async def served_ports(self, consumer: str, spec: RequestSpec) -> tuple[ServedPort, ...]:
        """Return what a server holds for its ports.

        Raise Unavailable if it is not what they ask for: a scheduler of an earlier version has claimed nothing for
        them. Its claim is replaced when the server is placed again.
        """
        held = await self._engine.database.read(topologies.assignments_of, [consumer])
        served = held[consumer][1].ports if consumer in held else ()
        if not all_answered(served, spec.ports):
            raise Unavailable("Nothing is claimed for what the server's ports ask for: the server is placed again.")
        return served

    async def rebind(
        self,
        operation: Operation,
        row: InstanceRow,
        host: str,
        zone: str | None,
        check: Callable[[], Awaitable[None]] | None = None,
        lock: LockCurrent | None = None,
        *,
        holder: str | None = None,
        exact: bool = False,
    ) -> tuple[VIF, ...] | None:
        """Connect the server's volumes, and bind its ports, to a host that it moves to.

        `holder` holds what ports ask for on that host, if the server itself does not: the migration of a server that
        returns. With `exact`, raise Conflict if a port asks for something else by now.

        Return its interfaces, None without a network service. Raise what `check` raises, which is called before each
        change of a port; else Stale if the operation is overtaken. `lock` is as in `VolumeConnections.connect`.
        """
        await self.volumes.connect(operation, row, host, lock=lock)
        if self._dependencies.network_client is None:
            return None
        consumer = holder or row["uuid"]
        held = await self._engine.database.read(topologies.assignments_of, [consumer]) if row["network_info"] else {}
        return await self._dependencies.network_client.rebind(
            instance_uuid=row["uuid"],
            host=host,
            zone=zone,
            port_ids=[vif["port_id"] for vif in row["network_info"]],
            served=held[consumer][1].ports if consumer in held else (),
            exact=exact,
            check=check or functools.partial(self.check_not_overtaken, operation),
        )

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

    def end_event(
        self,
        conn: sa.Connection,
        operation: Operation,
        *,
        host: str | None,
        error: str | None = None,
        event: str | None = None,
    ) -> None:
        """End the event of a step; the instance action continues. `event` is as in `dispatch`."""
        instance_actions.event_finish(
            conn,
            operation.instance_uuid,
            operation.context.request_id,
            operation.epoch,
            event or self._event,
            self._engine.now(),
            result="Success" if error is None else "Error",
            host=host,
            details=error,
        )

    def end_conductor_event(
        self, conn: sa.Connection, operation: Operation, event: str, *, outer: bool = False, error: str | None = None
    ) -> None:
        """Record an event of the conductor's own part, which ends with the dispatch; the host's has the next epoch.

        With `outer` the event contains another event of the conductor. Both begin with the operation. The
        outer one has the lower sequence number and so counts as the earlier one.
        """
        instance_actions.event_finish(
            conn,
            operation.instance_uuid,
            operation.context.request_id,
            operation.epoch - (SEQUENCE_STEP if outer else 0),
            event,
            self._engine.now(),
            result="Success" if error is None else "Error",
            details=error,
            start_time=operation.created_at,
        )

    def add_event(self, conn: sa.Connection, operation: Operation, event: str, host: str, number: int) -> None:
        """Record an event that has ended with success, the `number`th one after that of the step."""
        instance_actions.event_finish(
            conn,
            operation.instance_uuid,
            operation.context.request_id,
            operation.epoch + number * SEQUENCE_STEP,
            event,
            self._engine.now(),
            host=host,
        )

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

        Without `host` the event keeps the one that it began with.
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
        reason = (fault["message"] if fault else "") if failed else None
        self.end_event(conn, operation, host=host, error=reason, event=event)
        instance_actions.finish(conn, operation.instance_uuid, request_id, now, message="Error" if failed else None)
        return True

    def end_without_event(self, conn: sa.Connection, operation: Operation) -> bool:
        """End an operation that has failed, and its instance action; its event has ended before.

        Return False if it has got another owner.
        """
        now = self._engine.now()
        if not operation_rows.finish(conn, operation.id, now, "error", operation.lease):
            return False
        instance_actions.finish(conn, operation.instance_uuid, operation.context.request_id, now, message="Error")
        return True

    def release_claim(self, conn: sa.Connection, operation: Operation, row: InstanceRow | None) -> None:
        """Release the claim of a cancelled operation, unless the instance is on a host: a `release` of `cancel`."""
        if row is None or row["host"] is None:
            allocations.release(conn, operation.instance_uuid, now=self._engine.now())

    async def cancel(self, operation: Operation, release: Release | None = None) -> None:
        """End an operation that a later request has overtaken; operations that wait for this are taken at once."""
        waiting = await self._engine.database.write(self.cancel_in, operation, release)
        await self.count_end_and_run_waiting(operation, "cancelled", waiting)

    async def count_end_and_run_waiting(self, operation: Operation, result: Result, waiting: list[str] | None) -> None:
        """Count an operation that a committed transaction has ended, and take the operations that waited for it.

        Do nothing if `waiting` is None: the operation has got another owner.
        """
        if waiting is None:
            return
        self._engine.ended(operation, result)
        if waiting:
            await self._engine.lease_and_run(waiting)

    def cancel_in(self, conn: sa.Connection, operation: Operation, release: Release | None = None) -> list[str] | None:
        """End an overtaken operation and give back what it holds; return the operations that waited for this.

        Return None, and change nothing, if it has got another owner.
        """

        def end(row: InstanceRow | None) -> bool:
            if not self.end(conn, operation, "cancelled"):
                return False
            if release is not None:
                release(conn, operation, row)
            return True

        return self.end_and_wake(conn, operation, end)

    def end_and_wake(
        self, conn: sa.Connection, operation: Operation, end: Callable[[InstanceRow | None], bool]
    ) -> list[str] | None:
        """End an operation by `end`, which gets the locked instance; return the operations that waited for this.

        Return None if `end` returns False: the operation has got another owner.
        """
        row = instances.lock(conn, operation.instance_uuid)
        operation_rows.lock_open_of(conn, operation.instance_uuid)
        return operation_rows.wake(conn, operation.instance_uuid) if end(row) else None

    def notify_exists(self, operation: Operation, row: InstanceRow) -> None:
        """Send instance.exists of the present audit period: what is charged for a server is about to change."""
        if not self._dependencies.notifier.enabled:
            return
        now = self._dependencies.engine.now()
        present = usage.Period(usage.last_completed(self._dependencies.audit_period, now).end, now)
        exists = functools.partial(usage.exists, row, operation.context, present)
        self._dependencies.notifier.announce(operation.context, exists)

    def notify(
        self,
        name: str,
        operation: Operation,
        row: InstanceRow,
        fault: Fault | None = None,
        details: Mapping[str, Any] | None = None,
        sender: str | None = None,
    ) -> None:
        """Send the notification with this name; `details` are the fields that only this kind's have.

        `sender` is as in `Notifier.instance`.
        """
        if name in _USAGE_CHANGES:
            self.notify_exists(operation, row)
        self._dependencies.notifier.instance(
            name, row, context=operation.context, fault=fault, details=details, sender=sender
        )
