"""What the kinds of operations share: their tools, and the way of an operation through a host."""

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa

from micronova.compute.hooks import Hooks
from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.operations import Engine, Kind, Operation
from micronova.conductor.secrets import SecretBox
from micronova.db import actions, instances
from micronova.db import operations as rows
from micronova.db import services as service_rows
from micronova.objects.errors import BuildAborted, MicronovaError
from micronova.objects.network import VIF
from micronova.objects.orders import Report, WorkOrder
from micronova.rpc.errors import BusUnavailable

log = logging.getLogger(__name__)

HOST = "host:"


class GroupNames(Protocol):
    """What the conductor needs to know of security groups."""

    async def names_of(self, server: str) -> list[str]:
        """Return the names of the groups of an instance's ports."""


class Networks(Protocol):
    """What the conductor needs of the network service; `micronova.network.client` has the real one."""

    @property
    def groups(self) -> GroupNames:
        """The security groups of instances."""

    async def allocate(
        self,
        *,
        instance_uuid: str,
        project_id: str,
        host: str,
        zone: str,
        requests: Any,
        security_groups: list[str],
        hostname: str,
        fresh: bool,
    ) -> tuple[VIF, ...]:
        """Make or take over the ports of an instance and bind them to its host; safe to repeat.

        `fresh` says that nobody can have tried before.
        """

    async def attach(
        self,
        *,
        instance_uuid: str,
        project_id: str,
        host: str,
        zone: str,
        request: Any,
        hostname: str,
        operation: str,
    ) -> VIF:
        """Give an instance one more port, bound to its host and marked with the operation; safe to repeat."""

    async def release(self, *, instance_uuid: str, port_id: str | None = None, operation: str | None = None) -> None:
        """Let go of one port, or of those that an operation gave the instance; safe to repeat."""

    async def network_info(self, instance_uuid: str) -> tuple[VIF, ...]:
        """Return the interfaces of an instance as they are now."""

    async def deallocate(self, *, instance_uuid: str) -> None:
        """Delete the ports that we made and unbind the user's own; safe to repeat."""


class Images(Protocol):
    """What the conductor needs of the image service."""

    def ticket_url(self, image_id: str) -> str | None:
        """Return where a host can fetch the image for a short time."""


class Notifier(Protocol):
    """Where notifications go."""

    def instance(self, event: str, row: Any, *, context: Any, fault: dict[str, Any] | None = None) -> None:
        """Send `instance.EVENT` about an instance, without waiting."""


@dataclass(kw_only=True)
class Tools:
    """What the kinds of operations work with."""

    engine: Engine
    compute: ComputeAPI
    secrets: SecretBox
    networks: Networks | None
    images: Images | None
    notifier: Notifier
    service_down_time: float
    hooks: Hooks = field(default_factory=Hooks)
    access_network: str | None = None


Event = tuple[str, Any, dict[str, Any] | None]  # a notification that is due: its name, the instance, the fault


class Continue(msgspec.Struct):
    """After a report: this conductor goes on with the operation, and these notifications are due."""

    operation: Operation
    events: Sequence[Event] = ()


class Ended(msgspec.Struct):
    """After a report: the operation is over, and these notifications are due."""

    accepted: bool = True
    destroy: bool = False
    built: bool = False  # a server is ACTIVE: what wants to come after a build is run
    events: Sequence[Event] = ()


def fault_of(error: BaseException | str, now: int, code: int = 500) -> dict[str, Any]:
    """Return the fault that users see on the server; what is not ours keeps its inside to the log."""
    if isinstance(error, MicronovaError):
        return {"code": code, "message": error.message[:255], "details": _details(error), "created": now}
    if isinstance(error, str):
        return {"code": code, "message": error[:255], "details": "", "created": now}
    return {
        "code": code,
        "message": "An unexpected error happened; the log has the reason under the request id of this action.",
        "details": f"{type(error).__name__}: {error}"[:1000],
        "created": now,
    }


def _details(error: MicronovaError) -> str:
    return "; ".join(f"{key}: {value}" for key, value in error.details.items())[:4000]


class HostKind(Kind):
    """An operation that a host carries out: dispatched as an order, ended by the host's report."""

    order_kind: str
    event: str  # the name of the event in the instance action

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.engine = tools.engine

    # --- what kinds decide -----------------------------------------------------------------------------------

    @abstractmethod
    def order(self, conn: sa.Connection, operation: Operation, row: Any) -> WorkOrder:
        """Return the order, from what is in the database; also used to send it again."""

    @abstractmethod
    def reported(self, conn: sa.Connection, operation: Operation, row: Any, report: Report) -> Continue | Ended:
        """Apply a host's report, in the transaction that ends or continues the operation."""

    def host_stops(self, conn: sa.Connection, operation: Operation) -> Continue | None:
        """The host that works on it says goodbye: go on without it now, or None: it is taken up again at its return.

        Should it not return, its lease runs out as that of any dead host.
        """
        return None

    # --- what they share -------------------------------------------------------------------------------------

    def apply_report(self, conn: sa.Connection, operation_row: Any, report: Report) -> Continue | Ended:
        """Check that a report is not stale and apply it. The instance's row is locked before the operation's."""
        row = instances.lock(conn, report.instance_uuid)
        operation_row = rows.get(conn, report.operation_id, lock=True)
        if (
            operation_row is None
            or operation_row["finished_at"] is not None
            or operation_row["epoch"] != report.epoch
            or operation_row["owner"] != HOST + report.host
            or row is None
        ):
            again = (
                operation_row is not None
                and operation_row["epoch"] == report.epoch
                and (operation_row["result"] == "success")
            )
            # A build that ended too late: the guest goes only if the instance is not (any more) on this host.
            here = row is not None and row["host"] == report.host
            return Ended(accepted=again, destroy=not here and self.order_kind == "build")
        return self.reported(conn, Operation.of(operation_row), row, report)

    async def hand_over(self, operation: Operation, order: WorkOrder) -> None:
        """Send the order; a lost one is sent again by the host's next heartbeat."""
        try:
            await self.tools.compute.send_order(operation.context, order)
        except BusUnavailable as error:
            log.warning("%s for %s was not sent (%s); the next heartbeat fetches it", order.kind, order.host, error)

    def dispatch(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: Any,
        host: str,
        values: dict[str, Any],
        payload: bytes | None = None,
    ) -> WorkOrder | None:
        """Make the host the owner: the instance's new values, the operation's step, the event; None if overtaken."""
        now = self.engine.now()
        epoch = values.get("epoch", operation.epoch)
        known = instances.lock(conn, operation.instance_uuid)
        if known is None or known["epoch"] != operation.epoch:
            return None
        moved = self.persist(conn, operation, "dispatched", payload=payload, owner=HOST + host, epoch=epoch)
        if not moved:  # another conductor has taken over: the instance is its, too
            return None
        if values:
            instances.update(conn, operation.instance_uuid, now, values, epoch=operation.epoch)
        # An event is numbered by the epoch that it happens at: each try of a build has one of its own.
        actions.event_start(
            conn, operation.instance_uuid, operation.context.request_id, epoch, self.event, now, host=host
        )
        sent = msgspec.structs.replace(operation, epoch=epoch)
        if payload is not None:
            sent.payload = payload
        return self.order(conn, sent, {**row, **values})

    def persist(
        self,
        conn: sa.Connection,
        operation: Operation,
        step: str,
        *,
        owner: str | None = None,
        epoch: int | None = None,
        payload: bytes | None = None,
        seconds: float | None = None,
    ) -> bool:
        """Persist how far an operation is, for its next owner (this conductor, if none is named) to go on from.

        Says whether it was still in these hands.
        """
        return rows.step(
            conn,
            operation.id,
            owner=operation.owner,
            epoch=operation.epoch,
            step=step,
            payload=operation.payload if payload is None else payload,
            until=self.engine.until(seconds),
            new_owner=owner or self.engine.owner,
            new_epoch=epoch,
        )

    def end(
        self,
        conn: sa.Connection,
        operation: Operation,
        result: str,
        *,
        host: str | None = None,
        fault: dict[str, Any] | None = None,
        event: str | None = None,
        payload: bytes | None = None,
    ) -> bool:
        """End the operation, its event and its action; say whether it was still in these hands."""
        now = self.engine.now()
        if not rows.finish(
            conn, operation.id, now, result, owner=operation.owner, epoch=operation.epoch, payload=payload
        ):
            return False
        request_id = operation.context.request_id
        if result == "cancelled":
            actions.cut_short(conn, operation.instance_uuid, request_id, now)
            return True
        failed = result == "error"
        actions.event_finish(
            conn,
            operation.instance_uuid,
            request_id,
            operation.epoch,
            event or self.event,
            now,
            result="Error" if failed else "Success",
            host=host,
            details=fault["message"] if fault else None,
        )
        actions.finish(conn, operation.instance_uuid, request_id, now, message="Error" if failed else None)
        return True

    async def cancel(self, operation: Operation) -> None:
        """End an operation that was overtaken; who overtook it may wait for that, and goes on at once."""
        waiting = await self.engine.database.write(self.cancelled, operation)
        self.engine.ended(operation, "cancelled")
        if waiting:
            await self.engine.take(waiting)

    def cancelled(self, conn: sa.Connection, operation: Operation) -> list[str]:
        """End it and let go of what it holds, unless another conductor has taken it over; return who waits."""
        row = instances.lock(conn, operation.instance_uuid)
        if not self.end(conn, operation, "cancelled"):
            return []
        self.let_go(conn, operation, row)
        return rows.wake(conn, operation.instance_uuid)

    def let_go(self, conn: sa.Connection, operation: Operation, row: Any) -> None:
        """Give back what an operation that was overtaken holds."""

    def owns(self, conn: sa.Connection, operation: Operation) -> bool:
        """Lock the operation and say whether it is still in these hands; the instance is locked already."""
        row = rows.get(conn, operation.id, lock=True)
        return (
            row is not None
            and row["finished_at"] is None
            and row["owner"] == operation.owner
            and row["epoch"] == operation.epoch
        )

    async def host_is_down(self, host: str) -> bool:
        """Say whether a host has not been heard of for too long (and we could have heard it)."""
        if not self.engine.healthy():
            return False
        found = await self.engine.database.read(service_rows.list_, binary="nova-compute", host=host)
        if not found or found[0].forced_down:
            return True
        return bool(self.engine.clock.now() - found[0].last_seen_at / 1e6 > self.tools.service_down_time)

    async def hosts_may_be_unheard(self) -> bool:
        """Say whether hosts seem to be down only because nobody was there to hear them: after a restart, say."""
        if self.engine.healthy():
            return False
        oldest = self.engine.now() - int(self.tools.service_down_time * 1e6)
        return await self.engine.database.read(service_rows.any_silent, "nova-compute", oldest)

    def give_back_to_host(self, conn: sa.Connection, operation: Operation, host: str) -> None:
        """The host is alive after all: its next heartbeat takes the order up."""
        self.persist(conn, operation, "dispatched", owner=HOST + host)

    def notify(self, event: str, operation: Operation, row: Any, fault: dict[str, Any] | None = None) -> None:
        """Send a notification. Those of the end are due just once, when it is persisted: so it is counted here, too."""
        self.tools.notifier.instance(event, row, context=operation.context, fault=fault)
        if event.endswith(".end"):
            self.engine.ended(operation, "success")
        elif event.endswith(".error"):
            self.engine.ended(operation, "error")


def abort_error(report: Report) -> MicronovaError:
    """Return a host's failure as an error with its words."""
    return BuildAborted(report.message or "The host could not carry out the order.", details=report.details or "")
