"""One more interface for a server, or one less.

Attaching: `new` (a port is made, or the user's is taken over, and bound) → `dispatched` (the host plugs it) → done, or
`cleanup` (it failed: the port has to go again). Detaching: `new` → `dispatched` (the host unplugs it) → `cleanup` (the
port is deleted, or let go if it is the user's) → done. A port carries the operation that gave it to the server, so
that a step that runs twice finds it; the server's list of interfaces has it from `dispatched` to the end of `cleanup`.
"""

from abc import abstractmethod
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.conductor.kinds import Continue, Ended, Event, HostKind, abort_error, fault_of
from micronova.conductor.operations import Operation
from micronova.conductor.orders import work_order
from micronova.db import instances
from micronova.objects.errors import BuildAborted, MicronovaError, Unavailable
from micronova.objects.network import VIF
from micronova.objects.orders import Report, WorkOrder


class InterfacePayload(msgspec.Struct, kw_only=True):
    """What is to be attached or detached, and what became of it."""

    request: Any = None  # the port to be, as the network client planned it
    port_id: str | None = None
    wait_for_plugs: list[str] = []
    error_code: str | None = None  # why an attachment is being undone
    error: str = ""


class InterfaceKind(HostKind):
    """What attaching and detaching share."""

    notification: str

    def order(self, conn: sa.Connection, operation: Operation, row: Any) -> WorkOrder:
        """Return the order; the list of interfaces in it describes the port."""
        payload = _payload(operation)
        return work_order(
            conn,
            operation,
            row,
            kind=self.order_kind,
            now=self.engine.now(),
            wait_for_plugs=tuple(payload.wait_for_plugs),
            parameters={"port_id": payload.port_id or ""},
        )

    async def run(self, operations: list[Operation]) -> None:
        """Go on from the persisted step."""
        for operation in operations:
            if operation.step == "cleanup":
                await self.clean_up(operation)
                continue
            row = await self.engine.database.read(instances.get, operation.instance_uuid)
            if row is None or row["epoch"] != operation.epoch or row["host"] is None:
                await self.overtaken(operation)
            elif await self.host_is_down(row["host"]):
                raise Unavailable(f"Host {row['host']} does not answer.")
            else:
                await self.order_host(operation, row)

    @abstractmethod
    async def order_host(self, operation: Operation, row: Any) -> None:
        """Have the server's host do its part."""

    @abstractmethod
    async def overtaken(self, operation: Operation) -> None:
        """Something else is done to the server now: let go of what this operation holds, and end it."""

    @abstractmethod
    async def clean_up(self, operation: Operation) -> None:
        """Let the port go, and end the operation."""

    async def send(self, operation: Operation, row: Any, vif: VIF | None, payload: bytes) -> None:
        """Make the host the owner, with the interface in the server's list, and send the order."""
        order = await self.engine.database.write(self._dispatch, operation, vif, payload)
        self.engine.stepped(self.name, "dispatched")
        if order is None:
            known = await self.engine.database.read(instances.get, operation.instance_uuid)
            if known is None or known["epoch"] != operation.epoch:  # else another conductor goes on with it
                await self.overtaken(operation)
            return
        self.notify(f"{self.notification}.start", operation, row)
        await self.hand_over(operation, order)

    def _dispatch(self, conn: sa.Connection, operation: Operation, vif: VIF | None, payload: bytes) -> WorkOrder | None:
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or row["host"] is None:
            return None
        values = {} if vif is None else {"network_info": [*_without(row, vif.port_id), msgspec.to_builtins(vif)]}
        return self.dispatch(conn, operation, row, row["host"], values, payload=payload)

    def to_clean_up(self, conn: sa.Connection, operation: Operation, payload: InterfacePayload) -> Continue:
        """Persist that only the port is left to deal with, by this conductor."""
        encoded = msgspec.msgpack.encode(payload)
        self.persist(conn, operation, "cleanup", payload=encoded)
        return Continue(msgspec.structs.replace(operation, owner=self.engine.owner, step="cleanup", payload=encoded))

    async def finish(self, operation: Operation) -> None:
        """End the operation after its clean-up, in the way that its payload says; the port's groups went with it."""
        values: dict[str, Any] = {}
        if self.tools.networks is not None:
            values["security_groups"] = await self.tools.networks.groups.names_of(operation.instance_uuid)
        events = await self.engine.database.write(self._finished, operation, values)
        if events is None:
            await self.cancel(operation)
            return
        for event, row, fault in events:
            self.notify(event, operation, row, fault)

    def _finished(self, conn: sa.Connection, operation: Operation, values: dict[str, Any]) -> list[Event] | None:
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or row["epoch"] != operation.epoch:
            return None
        payload = _payload(operation)
        return self.ended_with(conn, operation, row, payload, network_info=_without(row, payload.port_id), **values)

    def ended_with(
        self, conn: sa.Connection, operation: Operation, row: Any, payload: InterfacePayload, **values: Any
    ) -> list[Event]:
        """End the operation well, or with the payload's error; return the notifications that are due."""
        now = self.engine.now()
        fault = fault_of(BuildAborted(payload.error), now) if payload.error else None
        changed = {"task_state": None, **values}
        encoded = msgspec.msgpack.encode(payload)
        result = "error" if fault else "success"
        if not self.end(conn, operation, result, host=row["host"], fault=fault, payload=encoded):
            return []
        instances.update(conn, row["uuid"], now, changed, epoch=operation.epoch)
        return [(f"{self.notification}.{'error' if fault else 'end'}", {**row, **changed}, fault)]


class AttachInterface(InterfaceKind):
    """The operation behind POST /servers/{id}/os-interface."""

    name = "attach_interface"
    order_kind = "attach_interface"
    event = "compute_attach_interface"
    notification = "interface_attach"

    async def order_host(self, operation: Operation, row: Any) -> None:
        """Give the server a port and have it plugged."""
        payload = _payload(operation)
        if payload.port_id is not None:  # it was sent before, and its host has not been heard of since
            await self.send(operation, row, None, operation.payload)
            return
        assert self.tools.networks is not None  # or the API had refused it
        try:
            vif = await self.tools.networks.attach(
                instance_uuid=row["uuid"],
                project_id=row["project_id"],
                host=row["host"],
                zone=row["availability_zone"],
                request=payload.request,
                hostname=row["hostname"],
                operation=operation.id,
            )
        except Unavailable:
            raise
        except MicronovaError as error:
            await self.fail(operation, error)
            return
        payload.port_id = vif.port_id
        payload.wait_for_plugs = [] if vif.status == "ACTIVE" else [vif.port_id]
        await self.send(operation, row, vif, msgspec.msgpack.encode(payload))

    def reported(self, conn: sa.Connection, operation: Operation, row: Any, report: Report) -> Continue | Ended:
        """The interface is plugged; or it is not, and its port has to go."""
        payload = _payload(operation)
        if report.outcome == "done":
            return Ended(events=self.ended_with(conn, operation, row, payload))
        payload.error_code, payload.error = report.error_code, abort_error(report).message
        return self.to_clean_up(conn, operation, payload)

    async def overtaken(self, operation: Operation) -> None:
        """Let go of the port that this operation has or may have made."""
        await self._release(operation)
        await self.cancel(operation)

    async def clean_up(self, operation: Operation) -> None:
        """Take the port back from the server."""
        await self._release(operation)
        await self.finish(operation)

    async def _release(self, operation: Operation) -> None:
        if self.tools.networks is not None:
            await self.tools.networks.release(instance_uuid=operation.instance_uuid, operation=operation.id)

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Give up: the server is as it was before."""
        if operation.step != "cleanup":
            result = await self.engine.database.write(self._give_up, operation, error)
            if result is None:
                return
            self.engine.stepped(self.name, "cleanup")
            operation = result.operation
        await self.clean_up(operation)

    def _give_up(self, conn: sa.Connection, operation: Operation, error: Exception) -> Continue | None:
        instances.lock(conn, operation.instance_uuid)
        if not self.owns(conn, operation):
            return None
        payload = _payload(operation)
        payload.error_code = error.code if isinstance(error, MicronovaError) else MicronovaError.code
        payload.error = fault_of(error, self.engine.now())["message"]
        return self.to_clean_up(conn, operation, payload)


class DetachInterface(InterfaceKind):
    """The operation behind DELETE /servers/{id}/os-interface/{port_id}, also of a port that was deleted."""

    name = "detach_interface"
    order_kind = "detach_interface"
    event = "compute_detach_interface"
    notification = "interface_detach"

    async def order_host(self, operation: Operation, row: Any) -> None:
        """Have the interface unplugged."""
        await self.send(operation, row, None, operation.payload)

    def reported(self, conn: sa.Connection, operation: Operation, row: Any, report: Report) -> Continue | Ended:
        """The guest has let go of the interface; or it has not, and keeps it."""
        payload = _payload(operation)
        if report.outcome == "done":
            return self.to_clean_up(conn, operation, payload)
        payload.error_code, payload.error = report.error_code, abort_error(report).message
        return Ended(events=self.ended_with(conn, operation, row, payload))

    async def overtaken(self, operation: Operation) -> None:
        """The port is the server's still: whoever overtook it decides."""
        await self.cancel(operation)

    async def clean_up(self, operation: Operation) -> None:
        """Let go of the port: nothing is plugged into it any more."""
        if self.tools.networks is not None:
            port = _payload(operation).port_id
            await self.tools.networks.release(instance_uuid=operation.instance_uuid, port_id=port)
        await self.finish(operation)

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Give up: the server keeps the interface; unless it is unplugged already, then its port goes, however long."""
        if operation.step == "cleanup":
            await self.clean_up(operation)
            return
        events = await self.engine.database.write(self._give_up, operation, error)
        if events is None:
            await self.cancel(operation)
            return
        for event, row, fault in events:
            self.notify(event, operation, row, fault)

    def _give_up(self, conn: sa.Connection, operation: Operation, error: Exception) -> list[Event] | None:
        row = instances.lock(conn, operation.instance_uuid)
        if not self.owns(conn, operation):
            return []
        if row is None or row["epoch"] != operation.epoch:
            return None
        payload = _payload(operation)
        payload.error = fault_of(error, self.engine.now())["message"]
        return self.ended_with(conn, operation, row, payload)


def _payload(operation: Operation) -> InterfacePayload:
    return msgspec.msgpack.decode(operation.payload, type=InterfacePayload)


def _without(row: Any, port_id: str | None) -> list[Any]:
    return [vif for vif in row["network_info"] if vif["port_id"] != port_id]
