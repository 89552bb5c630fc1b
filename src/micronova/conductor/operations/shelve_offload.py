"""Taking a shelved server from its host: the end of a shelve, or an operation of its own.

Steps: `unbind` (the server's ports are unbound, and stay its own) → `offload` (the host removes the guest): the server
has no host and no claim any more. Before `unbind` the image is looked for once more, because it is all that is left of
the server's disk, unless that is a volume; if it is gone, the server stays SHELVED. Once the host has its order,
nothing but a later request stops the operation. A host that is down removes the guest when it is back and reads the
record of the departure.
"""

import functools
import uuid

import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import HostKind
from micronova.conductor.operations.made_images import COMPLETE, MadeImages
from micronova.conductor.operations.operation_kind import NoMoreWork, StepResult
from micronova.conductor.operations.orders import minimal_order
from micronova.conductor.operations.placing import NO_HOST
from micronova.conductor.operations.transitions import Notification, server_of
from micronova.db import allocations, departures, instances
from micronova.db import operations as operation_rows
from micronova.objects import shelved, states
from micronova.objects.block_device import root_volume
from micronova.objects.errors import OperationFailed
from micronova.objects.instance import InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.operations import BIND_PORTS
from micronova.objects.orders import Report, WorkOrder

ACTION = states.ACTIONS["shelve_offload"]
EVENT = "compute_shelve_offload_instance"
NAMESPACE = uuid.UUID("e0b1a7f2-7a35-4e1c-9d0d-6b52f0c1f7a4")
"""Of the ids of the operations that bind the ports again."""


class Offloading:
    """The steps `unbind` and `offload` of a kind of operation."""

    def __init__(self, dependencies: ConductorDependencies, kind: HostKind) -> None:
        self._dependencies = dependencies
        self._engine = dependencies.engine
        self._kind = kind
        self._images = MadeImages(dependencies.image_client)

    async def run(self, operation: Operation) -> None:
        """Continue from the persisted step; a step before `offload` counts as `unbind`."""
        row = await self._engine.database.read(server_of, operation)
        if row is None or row["host"] is None:
            await self._kind.transitions.cancel(operation)
            return
        if operation.step != "offload":
            if not await self._keeps_disk(row):
                await self.fail(operation, OperationFailed("The image of the server is gone: unshelve the server."))
                return
            await self._unbind(operation, row)
        if await self._kind.transitions.host_is_down(row["host"]):
            result = await self._engine.database.write(self._continue_without_host, operation)
            self._engine.committed(self._kind.name, "without host")
            if operation.step != "offload" and result.ended:
                self._kind.transitions.notify("shelve_offload.start", operation, row)
            self._kind.announce(operation, result)
            return
        order = await self._engine.database.write(self._dispatch, operation, row, row["host"])
        self._engine.committed(self._kind.name, "offload")
        if order is None:
            await self._kind.transitions.cancel(operation)
            return
        if operation.step != "offload":
            self._kind.transitions.notify("shelve_offload.start", operation, row)
        await self._kind.transitions.send(operation, order)

    async def _keeps_disk(self, row: InstanceRow) -> bool:
        """Return whether the server's disk is a volume, or there is an image of it."""
        if root_volume(await self._kind.transitions.volumes.wanted_volumes(row["uuid"])) is not None:
            return True
        image = shelved.image_of(row)
        return image is not None and await self._images.status(image) == COMPLETE

    async def _unbind(self, operation: Operation, row: InstanceRow) -> None:
        await self._kind.transitions.volumes.connect(operation, row, None)
        if self._dependencies.network_client is not None and row["network_info"]:
            await self._dependencies.network_client.unbind(
                row["uuid"], check=functools.partial(self._kind.transitions.check_not_overtaken, operation)
            )

    def _dispatch(self, conn: sa.Connection, operation: Operation, row: InstanceRow, host: str) -> WorkOrder | None:
        dispatched = self._kind.transitions.dispatch(
            conn, operation, host, {}, step="offload", event=EVENT, endless=True
        )
        return None if dispatched is None else self.order(dispatched, row)

    def order(self, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to remove the guest."""
        return minimal_order(operation, row, now=self._engine.now(), kind="shelve_offload")

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Take the server from its host; if the host failed, send it the order again after a pause."""
        if report.outcome != "done":
            return self._kind.postponed(conn, operation, row, report)
        return self._left(conn, operation, row)

    def _continue_without_host(self, conn: sa.Connection, operation: Operation) -> NoMoreWork:
        row = self._kind.transitions.lock_current(conn, operation)
        if row is None:
            return NoMoreWork()
        assert row["host"] is not None
        departures.record(conn, row["host"], row["uuid"], operation.epoch, self._engine.now())
        return self._left(conn, operation, row)

    def _left(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> NoMoreWork:
        """End the operation: the server has no host any more, and holds nothing there."""
        now = self._engine.now()
        changes: InstanceChanges = {
            "vm_state": states.state_after(ACTION, row["vm_state"]),
            "task_state": None,
            **NO_HOST,
        }
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self._kind.transitions.end(conn, operation, "success", host=row["host"], event=EVENT)
        allocations.release(conn, row["uuid"], now=now, group_uuid=row["server_group_id"])
        return NoMoreWork(ended="success", notifications=[Notification("shelve_offload.end", changed(row, changes))])

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Leave the server on its host, and bind its ports again, which may be unbound.

        It stays SHELVED. One whose root disk is a volume stays as it was, or is STOPPED if its guest is off.
        """
        if not await self._kind.commit_failure(operation, error, self.failed):
            await self._kind.transitions.cancel(operation)

    def failed(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception, power: int | None = None
    ) -> NoMoreWork:
        """Record a failure; `power` is the guest's power state, if the host has just changed it."""
        now = self._engine.now()
        fault = fault_of(error, now)
        power = row["power_state"] if power is None else power
        after = states.after_power_change(row["vm_state"], power)
        changes: InstanceChanges = {"task_state": None, "fault": fault, "power_state": power, "vm_state": after}
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self._kind.transitions.end(conn, operation, "error", host=row["host"], fault=fault, event=EVENT)
        if not instances.has_ports_or_volumes(conn, row):
            return NoMoreWork(ended="error")
        id, context = str(uuid.uuid5(NAMESPACE, f"{operation.id} {operation.epoch}")), operation.context
        operation_rows.follow_up(conn, row["uuid"], BIND_PORTS, id=id, epoch=operation.epoch, now=now, context=context)
        return NoMoreWork(ended="error", follow_ups=(id,))


class ShelveOffload(HostKind):
    """The operation behind the server action `shelveOffload`, and behind `shelved_offload_time`."""

    name = "shelve_offload"
    action_event = EVENT

    def __init__(self, dependencies: ConductorDependencies) -> None:
        super().__init__(dependencies)
        self._offloading = Offloading(dependencies, self)

    def may_fail(self, operation: Operation) -> bool:
        """Return False if the host may have begun to remove the guest."""
        return operation.step != "offload"

    async def run(self, operations: list[Operation]) -> None:
        """Continue from the persisted step."""
        for operation in operations:
            await self._offloading.run(operation)

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to remove the guest."""
        return self._offloading.order(operation, row)

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Take the server from its host."""
        return self._offloading.reported(conn, operation, row, report)

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Leave the server SHELVED."""
        await self._offloading.fail(operation, error)
