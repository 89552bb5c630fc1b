"""Rebuilding a server: its host replaces the guest's disks by new ones, made from the server's image.

Steps: `new` (another image than before is checked on the server's host) → `dispatched` (the host rebuilds the guest).
If the root disk is a volume that gets the image: `new` → `prep` (the host switches the guest off) → `reimage` (the
volume is taken from the host, the volume service writes the image, the volume is connected again) → `dispatched`. The
conductor asks the volume service how far it is: an event may be lost, the status of a volume is not.

A rebuild that fails leaves the server in ERROR. It keeps its host, ports and claim. If the guest is as it was (its host
has not begun to replace it, or still reports this at the deadline), the server gets its image back.
"""

import msgspec
import sqlalchemy as sa

from micronova.clients.volume.client import CREATING, VolumeClient
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import HostKind, reported_error
from micronova.conductor.operations.operation_kind import Continue, FailedTask, NoMoreWork, StepResult
from micronova.conductor.operations.orders import switch_off_order, work_order
from micronova.conductor.operations.placing import asking_scheduler
from micronova.conductor.operations.transitions import Notification, server_of
from micronova.db import allocations, explanations, instances, nodes, providers
from micronova.notifications.notifier import CONDUCTOR
from micronova.objects import power_state, states
from micronova.objects.block_device import root_volume
from micronova.objects.errors import Conflict, Invalid, NotFound, NoValidHost, OperationFailed, Stale, Unavailable
from micronova.objects.explanation import Explanation
from micronova.objects.image import ImageMeta
from micronova.objects.instance import Fault, ImageData, InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.operations import RebuildPayload, Step
from micronova.objects.orders import Report, WorkOrder
from micronova.objects.scheduling import RequestSpec
from micronova.placement import extra_specs
from micronova.scheduler.rpcapi import SchedulerAPI

ACTION = states.ACTIONS["rebuild"]
CONDUCTOR_EVENT = "rebuild_server"
_BEING_RELEASED = ("in-use", "attaching", "detaching")  # statuses of a volume whose attachment is being deleted


class Rebuild(HostKind):
    """The operation behind the server action `rebuild`."""

    name = "rebuild"
    action_event = "compute_rebuild_instance"

    def __init__(self, dependencies: ConductorDependencies, scheduler: SchedulerAPI) -> None:
        super().__init__(dependencies)
        self._scheduler = scheduler

    async def run(self, operations: list[Operation]) -> None:
        """Continue from the persisted step."""
        for operation in operations:
            await self._run(operation)

    async def _run(self, operation: Operation) -> None:
        row = await self._engine.database.read(server_of, operation)
        if row is None or row["host"] is None:
            await self.transitions.cancel(operation)
            return
        explanation = None
        if operation.step == "new":
            explanation = await self._check_image(operation, row)
        elif await self.transitions.host_is_down(row["host"]):
            raise Unavailable(f"Host {row['host']} does not answer.")
        elif operation.step == "reimage":
            operation = await self._reimage(operation, row, row["host"])
        reimages = operation.payload_as(RebuildPayload).reimage
        step: Step = "prep" if reimages and operation.step in ("new", "prep") else "dispatched"
        order = await self._engine.database.write(self._dispatch, operation, step, explanation)
        self._engine.committed(self.name, step)
        if order is None:
            await self.transitions.cancel(operation)
            return
        if operation.step == "new":
            self.transitions.notify("rebuild.scheduled", operation, row, sender=CONDUCTOR)
            payload = operation.payload_as(RebuildPayload)
            before: InstanceRow = {**row, "image_ref": payload.previous_image_ref, "image": payload.previous_image}
            self.transitions.notify_exists(operation, before)
            self.transitions.notify("rebuild.start", operation, row)
        await self.transitions.send(operation, order)

    async def _reimage(self, operation: Operation, row: InstanceRow, host: str) -> Operation:
        """Let the volume service write the image to the root volume; return when the host can reach it again.

        Raise Unavailable if the volume is not free yet, OperationFailed if the image was not written.
        """
        volumes, payload = self.transitions.volumes, operation.payload_as(RebuildPayload)
        client, root = volumes.client(), root_volume(await volumes.wanted_volumes(row["uuid"]))
        image_id = None if row["image"] is None else row["image"]["id"]
        if root is None or root.volume_id is None or image_id is None:
            raise OperationFailed("The server has no root volume, or no image to write to it.")
        if not payload.asked:
            await volumes.connect(operation, row, None, only=root.uuid)
            if root.attachment_id is not None and root.connected_host is not None:
                await client.delete_attachment(root.attachment_id)  # a follow-up operation would do it, later
            await self._ask(client, root.volume_id, image_id)
            payload.asked = payload.begun = True
            taken = await self._engine.database.write(self._asked, operation, payload)
            if taken is None:
                raise Stale(f"Operation {operation.id} is overtaken.")
            self._engine.committed(self.name, "asked")
            operation = taken
        await volumes.wait_until_made(
            root.volume_id, self._dependencies.reimage_timeout_per_gb * float(root.size_gb or 0)
        )
        await volumes.connect(operation, row, host, only=root.uuid)
        return operation

    async def _ask(self, client: VolumeClient, volume_id: str, image_id: str) -> None:
        """Ask for the image to be written, unless that is under way since an earlier attempt."""
        try:
            await client.reimage(volume_id, image_id)
        except NotFound as error:
            raise OperationFailed(f"Volume {volume_id} cannot get the image: {error.message}") from error
        except (Invalid, Conflict) as error:
            status = (await client.volume(volume_id)).status
            if status in CREATING:
                return
            if status in _BEING_RELEASED:
                raise Unavailable(f"Volume {volume_id} is still {status}.") from None
            raise OperationFailed(f"Volume {volume_id} cannot get the image: {error.message}") from error

    def _asked(self, conn: sa.Connection, operation: Operation, payload: RebuildPayload) -> Operation | None:
        if self.transitions.lock_current(conn, operation) is None:
            return None
        return self.transitions.continue_at(conn, operation, "reimage", payload=payload.encode())

    async def _check_image(self, operation: Operation, row: InstanceRow) -> Explanation | None:
        """Return why the server's host can run its new image, or raise NoValidHost; the present one needs no check."""
        payload = operation.payload_as(RebuildPayload)
        if payload.reimage:  # its row has no image_ref
            is_other = _id(row["image"]) != _id(payload.previous_image)
        else:
            is_other = row["image_ref"] != payload.previous_image_ref
        if not is_other or row["node_uuid"] is None:
            return None
        spec = await self._engine.database.read(instances.request_spec, row["uuid"])
        if spec is None:
            return None
        if await self._engine.database.read(_lacks_traits, row["uuid"], spec):
            raise NoValidHost(
                "No valid host was found. The server's host and devices lack traits that the image requires."
            )
        with asking_scheduler(self._engine):
            return await self._scheduler.check_image(operation.context, spec, row["node_uuid"])

    def _dispatch(
        self, conn: sa.Connection, operation: Operation, step: Step, explanation: Explanation | None
    ) -> WorkOrder | None:
        """Make the server's host the owner; return the order.

        Return None if the operation is no longer current or is overtaken.

        The first dispatch raises the epoch. An order that is sent again has the same one: its host may have rebuilt the
        guest, and must not do it twice.
        """
        row = instances.lock(conn, operation.instance_uuid)
        if row is None or row["host"] is None:
            return None
        changes: InstanceChanges = {}
        if operation.step == "new":
            changes = {"epoch": operation.epoch + 1}
        payload = msgspec.structs.replace(operation.payload_as(RebuildPayload), unchanged=False)
        payload.begun = payload.begun or (step == "dispatched" and not nodes.host_asks(conn, row["host"]))
        encoded = payload.encode()
        # Switching the guest off is not an event of its own.
        event = "" if step == "prep" else None
        dispatched = self.transitions.dispatch(conn, operation, row["host"], changes, encoded, step=step, event=event)
        if dispatched is None:
            return None
        if operation.step == "new":
            self.transitions.end_conductor_event(conn, operation, CONDUCTOR_EVENT)
        if explanation is not None:
            explanations.record(conn, operation.id, explanation)
        return self.order(conn, dispatched, changed(row, changes))

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to rebuild the guest, or to switch it off before its volume gets the image."""
        if operation.step == "prep":
            return switch_off_order(conn, operation, row, now=self._engine.now())
        return work_order(
            conn,
            operation,
            row,
            now=self._engine.now(),
            secrets=self.secrets_of(operation),
            download_url=self._dependencies.download_url,
            parameters={"start": "no" if operation.payload_as(RebuildPayload).stopped else "yes"},
        )

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Set the server to ACTIVE, or to STOPPED as it was; if the host failed, to ERROR."""
        now = self._engine.now()
        changes: InstanceChanges = {"task_state": None}
        if report.power_state is not None:
            changes["power_state"] = report.power_state
        if operation.step == "prep" and report.outcome == "done":
            switched: InstanceChanges = {"power_state": power_state.SHUTDOWN}
            return Continue(self.transitions.advance(conn, operation, "reimage", changes=switched))
        if report.outcome != "done":
            if report.unchanged or not operation.payload_as(RebuildPayload).begun:
                changes |= self._put_back(conn, operation)
            return self._record_failure(conn, operation, row, fault_of(reported_error(report), now), changes)
        after = (
            states.STOPPED
            if operation.payload_as(RebuildPayload).stopped
            else states.state_after(ACTION, row["vm_state"])
        )
        changes |= {
            "vm_state": after,
            "launched_at": now,
            "config_drive": row["config_drive"] or report.config_drive,
        }
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self.transitions.end(conn, operation, "success", host=report.host)
        return NoMoreWork(ended="success", notifications=[Notification("rebuild.end", changed(row, changes))])

    def destruction_begins(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, unheard_since: int | None
    ) -> None:
        """Note that the host begins to replace the guest."""
        encoded = msgspec.structs.replace(operation.payload_as(RebuildPayload), begun=True).encode()
        self.transitions.persist(conn, operation, operation.step, payload=encoded, owner=operation.owner)

    def postponed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Let the host have its order again; note whether the guest is as it was, in case there is no more time."""
        payload = msgspec.structs.replace(operation.payload_as(RebuildPayload), unchanged=report.unchanged)
        noted = msgspec.structs.replace(operation, payload=payload.encode())
        return super().postponed(conn, noted, row, report)

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Set the server to ERROR; if its host has not begun, its guest still has the old image."""
        if not await self.commit_failure(operation, error, self._failed):
            await self.transitions.cancel(operation)

    def _failed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception) -> NoMoreWork:
        changes: InstanceChanges = {"task_state": None}
        payload = operation.payload_as(RebuildPayload)
        if payload.unchanged or not payload.begun:
            changes |= self._put_back(conn, operation)
        return self._record_failure(conn, operation, row, fault_of(error, self._engine.now()), changes)

    def _put_back(self, conn: sa.Connection, operation: Operation) -> InstanceChanges:
        """Return the changes that give a server its image back, which its guest still has."""
        payload = operation.payload_as(RebuildPayload)
        image = None if payload.previous_image is None else msgspec.convert(payload.previous_image, ImageMeta)
        instances.change_image(conn, operation.instance_uuid, image)
        return {"image_ref": payload.previous_image_ref, "image": payload.previous_image}

    def _record_failure(
        self, conn: sa.Connection, operation: Operation, row: InstanceRow, fault: Fault, changes: InstanceChanges
    ) -> NoMoreWork:
        """Record the fault and end the operation."""
        changes = {
            **changes,
            "fault": fault,
            "vm_state": states.state_after(ACTION, row["vm_state"], failed=True),
        }
        instances.update(conn, row["uuid"], self._engine.now(), changes, epoch=operation.epoch)
        if operation.step == "new":
            self.transitions.end(conn, operation, "error", fault=fault, event=CONDUCTOR_EVENT)
            failed_task = FailedTask(
                "rebuild_server", changed(row, changes), instances.request_spec(conn, row["uuid"]), fault
            )
            return NoMoreWork(ended="error", failed_task=failed_task)
        self.transitions.end(conn, operation, "error", host=row["host"], fault=fault)
        return NoMoreWork(ended="error", notifications=[Notification("rebuild.error", changed(row, changes), fault)])


def _id(image: ImageData | None) -> str | None:
    return None if image is None else image["id"]


def _lacks_traits(conn: sa.Connection, uuid: str, spec: RequestSpec) -> bool:
    """Return whether a server has an image whose traits the providers do not have that it holds resources of.

    The scheduler compares the traits that the node itself must have, or must not have. What the flavor asks for was
    compared when the server was placed.
    """
    required, forbidden = extra_specs.traits_of_image(spec.image)
    if required == extra_specs.node_traits_of_image(spec.flavor, spec.image)[0]:
        return False
    held = {each.node_uuid for each in allocations.get_many(conn, [uuid]).get(uuid, ())}
    traits = set[str]().union(*providers.traits_of(conn, held).values())
    return not required <= traits or bool(forbidden & traits)
