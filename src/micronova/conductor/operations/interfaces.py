"""Attaching an interface to a server, and detaching one.

Attaching: `new` (a port is created, or the user's is taken, and bound) → `dispatched` (the host plugs it: success) →
`cleanup` if it failed (the port is released: error). What the port asks for is claimed before it is bound, and given
back when it is released. Detaching: `new` → `dispatched` (the host unplugs it) → `cleanup`
(the port is deleted, or unbound if it is the user's: success). A port carries the id of the operation that attached
it, so that a step that runs twice finds it. The server's list of interfaces has it from `dispatched` to the end of
`cleanup`.
"""

import functools
from abc import abstractmethod

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import HostKind, reported_error
from micronova.conductor.operations.operation_kind import Continue, NoMoreWork, StepResult
from micronova.conductor.operations.orders import work_order
from micronova.conductor.operations.transitions import Notification, server_of
from micronova.db import instances, port_claims
from micronova.objects import states
from micronova.objects.errors import Invalid, MicronovaError, Stale, Unavailable
from micronova.objects.instance import InstanceChanges, InstanceRow, VIFData, changed, fault_of
from micronova.objects.network import VIF, PlannedPort, unplugged
from micronova.objects.operations import InterfacePayload, Result
from micronova.objects.orders import Report, WorkOrder
from micronova.objects.port_resources import PortResources, ServedPort


class InterfaceKind(HostKind):
    """What attaching and detaching share."""

    notification: str
    announces_failures = False

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order; the list of interfaces in it describes the port."""
        payload = operation.payload_as(InterfacePayload)
        return work_order(
            conn,
            operation,
            row,
            now=self._engine.now(),
            wait_for_plugs=tuple(payload.wait_for_plugs),
            parameters={"port_id": payload.port_id or ""},
        )

    def may_fail(self, operation: Operation) -> bool:
        """Return False if only the port is left to release."""
        return operation.step != "cleanup"

    async def run(self, operations: list[Operation]) -> None:
        """Continue from the persisted step."""
        for operation in operations:
            if operation.step == "cleanup":
                await self.clean_up(operation)
                continue
            row = await self._engine.database.read(server_of, operation)
            if row is None or row["host"] is None:
                await self.overtaken(operation)
            elif await self.transitions.host_is_down(row["host"]):
                raise Unavailable(f"Host {row['host']} does not answer.")
            else:
                await self.order_host(operation, row)

    @abstractmethod
    async def order_host(self, operation: Operation, row: InstanceRow) -> None:
        """Send the order to the server's host."""

    @abstractmethod
    async def overtaken(self, operation: Operation) -> None:
        """Cancel this operation, which a later request has overtaken, and release what it holds."""

    @abstractmethod
    async def clean_up(self, operation: Operation) -> None:
        """Release the port and end the operation."""

    async def send(self, operation: Operation, row: InstanceRow, vif: VIF | None, payload: bytes) -> None:
        """Make the host the owner, add the interface to the server's list, and send the order."""
        order = await self._engine.database.write(self._dispatch_with_vif, operation, vif, payload)
        self._engine.committed(self.name, "dispatched")
        if order is None:
            if await self._engine.database.read(self.transitions.continued_elsewhere, operation):
                await self.transitions.withdraw(operation, [vif] if vif is not None else [])
            else:
                await self.overtaken(operation)
            return
        if operation.step == "new":
            self.transitions.notify(f"{self.notification}.start", operation, row)
        await self.transitions.send(operation, order)

    def _dispatch_with_vif(
        self, conn: sa.Connection, operation: Operation, vif: VIF | None, payload: bytes
    ) -> WorkOrder | None:
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or row["host"] is None:
            return None
        values: InstanceChanges = {}
        if vif is not None:
            values["network_info"] = [*_without(row, vif.port_id), msgspec.to_builtins(vif)]
        dispatched = self.transitions.dispatch(conn, operation, row["host"], values, payload=payload)
        return None if dispatched is None else self.order(conn, dispatched, changed(row, values))

    def to_clean_up(self, conn: sa.Connection, operation: Operation, payload: InterfacePayload) -> Continue:
        """Persist that only the port is left to release, by this conductor."""
        encoded = payload.encode()
        return Continue(self.transitions.continue_at(conn, operation, "cleanup", payload=encoded))

    async def finish(self, operation: Operation) -> None:
        """End the operation as its payload says and record the security groups of the ports that are left."""
        values: InstanceChanges = {}
        if self._dependencies.network_client is not None:
            values["security_groups"] = await self._dependencies.network_client.security_groups.names_of(
                operation.instance_uuid
            )
        result = await self._engine.database.write(self._finished, operation, values)
        if result is None:
            await self.transitions.cancel(operation, self.release_claim)
            return
        self.announce(operation, result)

    def _finished(self, conn: sa.Connection, operation: Operation, values: InstanceChanges) -> NoMoreWork | None:
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or row["epoch"] != operation.epoch:
            return None
        payload = operation.payload_as(InterfacePayload)
        values = {**values, "network_info": _without(row, payload.port_id)}
        self.release_claim(conn, operation, row)
        return self.ended_with(conn, operation, row, payload, values)

    def release_claim(self, conn: sa.Connection, operation: Operation, row: InstanceRow | None) -> None:
        """Give back what the server holds for the port, which it does not have any more."""
        payload = operation.payload_as(InterfacePayload)
        port = payload.port_id or (payload.request.port_id if payload.request is not None else None)
        if row is not None and port is not None:
            port_claims.remove(conn, row["uuid"], [port], now=self._engine.now())

    def ended_with(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        payload: InterfacePayload,
        values: InstanceChanges | None = None,
    ) -> NoMoreWork:
        """End the operation, with the payload's error if it has one."""
        now = self._engine.now()
        fault = fault_of(payload.error, now) if payload.error else None
        vm_state = states.state_after(states.ACTIONS[self.name], row["vm_state"], failed=fault is not None)
        changes: InstanceChanges = {"task_state": None, "vm_state": vm_state, **(values or {})}
        encoded = payload.encode()
        result: Result = "error" if fault else "success"
        if not self.transitions.end(conn, operation, result, host=row["host"], fault=fault, payload=encoded):
            return NoMoreWork()
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        if fault and not self.announces_failures:
            return NoMoreWork(ended=result)
        name = f"{self.notification}.{'error' if fault else 'end'}"
        return NoMoreWork(ended=result, notifications=[Notification(name, changed(row, changes), fault)])


class AttachInterface(InterfaceKind):
    """The operation behind POST /servers/{id}/os-interface."""

    name = "attach_interface"
    action_event = "compute_attach_interface"
    notification = "interface_attach"
    announces_failures = True

    async def order_host(self, operation: Operation, row: InstanceRow) -> None:
        """Create or take the port and order the host to plug it."""
        payload = operation.payload_as(InterfacePayload)
        if payload.port_id is not None:  # the order was sent before, and the host has not reported
            await self.send(operation, row, None, operation.payload)
            return
        assert self._dependencies.network_client is not None and row["host"] is not None  # or the API had refused it
        assert payload.request is not None
        try:
            served = await self._claim(operation, row, payload.request)
            vif = await self._dependencies.network_client.attach(
                instance_uuid=row["uuid"],
                project_id=row["project_id"],
                host=row["host"],
                zone=row["availability_zone"],
                port=payload.request,
                hostname=row["hostname"],
                operation=operation.id,
                served=served,
                check=functools.partial(self.transitions.check_current, operation),
            )
        except (Stale, Unavailable):
            raise
        except MicronovaError as error:
            await self.fail(operation, error)
            return
        payload.port_id = vif.port_id
        payload.wait_for_plugs = unplugged([vif])
        await self.send(operation, row, vif, payload.encode())

    async def _claim(self, operation: Operation, row: InstanceRow, port: PlannedPort) -> tuple[ServedPort, ...]:
        """Claim what the port asks for on the server's node; raise Invalid if that has too little."""
        if port.resources is None:
            return ()
        served = await self._engine.database.write(self._claim_in, operation, port.resources)
        if served is None:
            raise Invalid(
                f"Failed to allocate additional resources to {row['uuid']} during interface attach: its host has too "
                f"little of what port {port.port_id} asks for."
            )
        return (served,)

    def _claim_in(self, conn: sa.Connection, operation: Operation, wanted: PortResources) -> ServedPort | None:
        row = self.transitions.lock_current(conn, operation)
        if row is None or row["node_uuid"] is None:
            raise Stale(f"Operation {operation.id} has got another owner, or was overtaken.")
        return port_claims.add(conn, row["uuid"], row["node_uuid"], wanted, now=self._engine.now())

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """End the operation if the interface is plugged; else release its port."""
        payload = operation.payload_as(InterfacePayload)
        if report.outcome == "done":
            return self.ended_with(conn, operation, row, payload)
        payload.error_code, payload.error = report.error_code, reported_error(report).message
        return self.to_clean_up(conn, operation, payload)

    async def overtaken(self, operation: Operation) -> None:
        """Release the port that this operation may have created, and cancel."""
        await self._release(operation)
        await self.transitions.cancel(operation, self.release_claim)

    async def clean_up(self, operation: Operation) -> None:
        """Release the port and end the operation."""
        await self._release(operation)
        await self.finish(operation)

    async def _release(self, operation: Operation) -> None:
        if self._dependencies.network_client is not None:
            await self._dependencies.network_client.detach(
                instance_uuid=operation.instance_uuid,
                operation=operation.id,
                check=functools.partial(self.transitions.check_not_continued, operation),
            )

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Release the port; the server is as before."""
        result = await self._engine.database.write(self._fail, operation, error)
        if result is None:
            return
        self._engine.committed(self.name, "cleanup")
        await self.clean_up(result.operation)

    def _fail(self, conn: sa.Connection, operation: Operation, error: Exception) -> Continue | None:
        instances.lock(conn, operation.instance_uuid)
        if not self.transitions.lock_and_is_current(conn, operation):
            return None
        payload = operation.payload_as(InterfacePayload)
        payload.error_code = error.code if isinstance(error, MicronovaError) else MicronovaError.code
        payload.error = fault_of(error, self._engine.now())["message"]
        return self.to_clean_up(conn, operation, payload)


class DetachInterface(InterfaceKind):
    """The operation behind DELETE /servers/{id}/os-interface/{port_id}, also of a port that was deleted."""

    name = "detach_interface"
    action_event = "compute_detach_interface"
    notification = "interface_detach"

    async def order_host(self, operation: Operation, row: InstanceRow) -> None:
        """Order the host to unplug the interface."""
        await self.send(operation, row, None, operation.payload)

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Release the port if the interface is unplugged; else the server keeps it."""
        payload = operation.payload_as(InterfacePayload)
        if report.outcome == "done":
            return self.to_clean_up(conn, operation, payload)
        payload.error_code, payload.error = report.error_code, reported_error(report).message
        return self.ended_with(conn, operation, row, payload)

    async def overtaken(self, operation: Operation) -> None:
        """Cancel; the server keeps the port."""
        await self.transitions.cancel(operation)

    async def clean_up(self, operation: Operation) -> None:
        """Release the port and end the operation."""
        if self._dependencies.network_client is not None:
            port = operation.payload_as(InterfacePayload).port_id
            await self._dependencies.network_client.detach(
                instance_uuid=operation.instance_uuid,
                port_id=port,
                check=functools.partial(self.transitions.check_not_continued, operation),
            )
        await self.finish(operation)

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Leave the interface with the server."""
        if not await self.commit_failure(operation, error, self._failed):
            await self.overtaken(operation)

    def _failed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception) -> NoMoreWork:
        payload = operation.payload_as(InterfacePayload)
        payload.error = fault_of(error, self._engine.now())["message"]
        return self.ended_with(conn, operation, row, payload)


def _without(row: InstanceRow, port_id: str | None) -> list[VIFData]:
    return [vif for vif in row["network_info"] if vif["port_id"] != port_id]
