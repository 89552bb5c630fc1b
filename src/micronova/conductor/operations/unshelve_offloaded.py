"""Unshelving a server that has no host: it is built again from the image that the shelve has made from its disk.

Steps: `schedule` (find the image, choose and claim a host, bind the ports to it) → `dispatched` (the host builds the
guest; if it fails, back to `schedule` for the next host). If no host is left: `unbind` (the ports are unbound), and the
server is SHELVED_OFFLOADED again, with nothing claimed. The image is deleted only when the guest is built; if it is
gone or deactivated, the server stays as it is: who puts the image back can try again. The
order has the properties of the server's own image, which were checked when the server was made. A server whose root
disk is a volume has no such image, and needs none.
"""

import functools

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.build_elsewhere import BuildElsewhere
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.destinations import Destinations, record_explanation
from micronova.conductor.operations.discard_image import discard_operation_ids, record_discard
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.host_kind import SteppedKind
from micronova.conductor.operations.made_images import COMPLETE, MadeImages
from micronova.conductor.operations.operation_kind import Continue, NoMoreWork, StepResult
from micronova.conductor.operations.orders import work_order
from micronova.conductor.operations.placing import NO_HOST, ServerToPlace, host_changes
from micronova.conductor.operations.transitions import Notification, server_of
from micronova.db import allocations, departures, instances
from micronova.objects import power_state, shelved, states
from micronova.objects.block_device import root_volume
from micronova.objects.errors import OperationFailed
from micronova.objects.image import ImageMeta
from micronova.objects.instance import InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.network import VIF, unplugged
from micronova.objects.operations import UnshelvePayload
from micronova.objects.orders import Report, WorkOrder
from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.rpcapi import SchedulerAPI

ACTION = states.ACTIONS["unshelve"]
CONDUCTOR_EVENT = "schedule_instances"
IMAGE_EVENT = "get_image_info"
IMAGE_GONE = "The image of the server's disk is gone: the server cannot be unshelved."


class UnshelveOffloaded(SteppedKind):
    """The operation behind the server action `unshelve` of a server that is SHELVED_OFFLOADED."""

    name = "unshelve_offloaded"
    action_event = "compute_unshelve_instance"

    def __init__(self, dependencies: ConductorDependencies, scheduler: SchedulerAPI, max_attempts: int) -> None:
        super().__init__(dependencies)
        self._destinations = Destinations(dependencies, self, scheduler, max_attempts)
        self._attempts = BuildElsewhere(
            dependencies, self, self._destinations, UnshelvePayload, leave_host=self._leave_host
        )
        self._images = MadeImages(dependencies.image_client)

    def may_fail(self, operation: Operation) -> bool:
        """Return False if the unshelving has failed already, and only the ports are left."""
        return operation.step != "unbind"

    async def run_one(self, operation: Operation) -> None:
        """Continue from the persisted step."""
        loaded = await self._engine.database.read(_load, operation)
        if loaded is None:
            await self.overtaken(operation)
            return
        row, spec, from_volume = loaded
        if operation.step == "schedule":
            await self._schedule(operation, row, spec, from_volume)
        elif operation.step == "unbind":
            await self._unbind(operation, row)
        else:
            await self._check_host(operation, row)

    # --- schedule --------------------------------------------------------------------------------------------

    async def _schedule(self, operation: Operation, row: InstanceRow, spec: RequestSpec, from_volume: bool) -> None:
        payload = operation.payload_as(UnshelvePayload)
        if payload.image is None and not from_volume:
            image = shelved.image_of(row)
            found = None if image is None else await self._images.get(image)
            if found is None:
                payload.image_gone = True
                gone = msgspec.structs.replace(operation, payload=payload.encode())
                await self.fail(gone, OperationFailed(IMAGE_GONE))
                return
            if found.status != COMPLETE:  # its owner has deactivated it, and can reactivate it
                error = OperationFailed(f"The image of the server's disk is {found.status}: it cannot be read.")
                await self.fail(operation, error)
                return
            payload.image = _with_properties_of(found, row)
        server = ServerToPlace(operation, payload, row, spec)
        bound = await self._destinations.choose_and_bind(server)
        if bound is None:
            return
        order = await self.commit_dispatch(operation, "dispatched", self._dispatch, server, bound.vifs)
        if order is None:
            return
        if payload.chosen is None:  # of several attempts, the first begins what the last ends
            self.transitions.notify("unshelve.start", operation, row)
        await self.transitions.send(operation, order)

    def _dispatch(
        self, conn: sa.Connection, server: ServerToPlace[UnshelvePayload], vifs: tuple[VIF, ...] | None
    ) -> WorkOrder | None:
        operation, chosen = server.operation, server.chosen
        waits = unplugged(vifs or ())
        payload = msgspec.structs.replace(
            server.payload, tried=[*server.payload.tried, chosen.host], chosen=chosen, wait_for_plugs=waits
        )
        changes: InstanceChanges = {
            **host_changes(chosen),
            "task_state": states.SPAWNING,
            "epoch": operation.epoch + 1,
        }
        if vifs is not None:
            changes["network_info"] = msgspec.to_builtins(vifs)
        encoded = payload.encode()
        dispatched = self.transitions.dispatch(conn, operation, chosen.host, changes, encoded)
        if dispatched is None:
            return None
        if server.payload.chosen is None:
            self.transitions.end_conductor_event(conn, operation, CONDUCTOR_EVENT)
            if server.payload.image is not None:
                self.transitions.end_conductor_event(conn, operation, IMAGE_EVENT, outer=True)
        record_explanation(conn, server)
        return self.order(conn, dispatched, changed(server.row, changes))

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to build the guest from the image of its disk, or from its volume."""
        payload = operation.payload_as(UnshelvePayload)
        image, devices = payload.image, instances.devices_of(conn, row["uuid"])
        if image is not None:
            # Also a root disk that was made empty is in the image now, with what was installed on it.
            devices = tuple(
                msgspec.structs.replace(device, source_type="image", image_id=image.id)
                if device.boot_index == 0
                else device
                for device in devices
            )
            row = changed(row, {"image_ref": image.id, "image": msgspec.to_builtins(image)})
        return work_order(
            conn,
            operation,
            row,
            kind="build",
            now=self._engine.now(),
            download_url=self._dependencies.download_url,
            wait_for_plugs=tuple(payload.wait_for_plugs),
            block_devices=devices,
        )

    # --- the host's report, and its absence ------------------------------------------------------------------

    async def _check_host(self, operation: Operation, row: InstanceRow) -> None:
        """Send the order again to a host whose lease has expired; continue without one that is down."""
        assert row["host"] is not None
        if await self.transitions.host_is_down(row["host"]):
            await self._attempts.continue_without_host(operation)
            return
        order = await self.commit_dispatch(operation, "dispatched", self.dispatch, operation, row, row["host"])
        if order is not None:
            await self.transitions.send(operation, order)

    def reported(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Set the server to ACTIVE, try another host, or give up."""
        if report.outcome == "done":
            return self._built(conn, operation, row, report)
        return self._attempts.not_built(conn, operation, row, report)

    def postponed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> StepResult:
        """Choose the host again if it lacks something before the guest is built."""
        chosen_again = self._attempts.postponed(conn, operation, row, report)
        return super().postponed(conn, operation, row, report) if chosen_again is None else chosen_again

    def _built(self, conn: sa.Connection, operation: Operation, row: InstanceRow, report: Report) -> NoMoreWork:
        now = self._engine.now()
        changes: InstanceChanges = {
            **record_discard(conn, operation, row, now),
            "vm_state": states.state_after(ACTION, row["vm_state"]),
            "task_state": None,
            "power_state": power_state.RUNNING if report.power_state is None else report.power_state,
            "launched_at": now,
            "config_drive": row["config_drive"] or report.config_drive,
            "fault": None,
        }
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self.transitions.end(conn, operation, "success", host=report.host)
        return NoMoreWork(
            ended="success",
            notifications=[Notification("unshelve.end", changed(row, changes))],
            follow_ups=discard_operation_ids(row),
        )

    # --- failures --------------------------------------------------------------------------------------------

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Let the server be SHELVED_OFFLOADED again."""
        if not await self.commit_failure(operation, error, self._failed):
            await self.overtaken(operation)

    def _failed(self, conn: sa.Connection, operation: Operation, row: InstanceRow, error: Exception) -> Continue:
        # The host of the last attempt may be at work.
        return self._attempts.give_up(conn, operation, row, error, left_behind=row["host"] is not None)

    def _leave_host(
        self,
        conn: sa.Connection,
        operation: Operation,
        row: InstanceRow,
        payload: UnshelvePayload,
        *,
        error: str,
        left_behind: bool,
    ) -> InstanceChanges:
        """Release the claim, take the server from its host, and end the event of the host, or of the conductor."""
        now = self._engine.now()
        if left_behind and row["host"] is not None:
            departures.record(conn, row["host"], row["uuid"], operation.epoch, now)
        event = self.action_event
        if row["host"] is None:
            event = IMAGE_EVENT if payload.image_gone else CONDUCTOR_EVENT
            if not payload.image_gone and payload.chosen is None and not _boots_from_volume(conn, row["uuid"]):
                self.transitions.end_conductor_event(conn, operation, IMAGE_EVENT, outer=True)
        self.transitions.end_event(conn, operation, host=row["host"], error=error, event=event)
        allocations.release(conn, row["uuid"], now=now, group_uuid=row["server_group_id"])
        return {**NO_HOST, "task_state": states.UNSHELVING}

    async def _unbind(self, operation: Operation, row: InstanceRow) -> None:
        await self.transitions.volumes.connect(operation, row, None)
        if self._dependencies.network_client is not None and row["network_info"]:
            await self._dependencies.network_client.unbind(
                row["uuid"], check=functools.partial(self.transitions.check_not_overtaken, operation)
            )
        self.announce(operation, await self._engine.database.write(self._unbound, operation))

    def _unbound(self, conn: sa.Connection, operation: Operation) -> NoMoreWork:
        row = self.transitions.lock_current(conn, operation)
        if row is None:
            return NoMoreWork()
        payload, now = operation.payload_as(UnshelvePayload), self._engine.now()
        fault = fault_of(payload.error, now)
        after = states.state_after(ACTION, row["vm_state"], failed=True)
        changes: InstanceChanges = {"vm_state": after, "task_state": None, "fault": fault}
        instances.update(conn, row["uuid"], now, changes, epoch=operation.epoch)
        self.transitions.end_without_event(conn, operation)
        return NoMoreWork(ended="error")

    async def overtaken(self, operation: Operation) -> None:
        """Cancel, and release the claim of a server that is not on a host; the later request does the rest."""
        if not await self._engine.database.read(self.transitions.continued_elsewhere, operation):
            await self.transitions.cancel(operation, self.transitions.release_claim)


def _with_properties_of(image: ImageMeta, row: InstanceRow) -> ImageMeta:
    """Return the image of a server's disk with properties, kernel and ramdisk of the image that it was made from."""
    made_of = ImageMeta(id="") if row["image"] is None else msgspec.convert(row["image"], ImageMeta)
    return msgspec.structs.replace(
        image,
        properties=made_of.properties,
        kernel=made_of.kernel,
        ramdisk=made_of.ramdisk,
        block_device_mapping="",
    )


def _load(conn: sa.Connection, operation: Operation) -> tuple[InstanceRow, RequestSpec, bool] | None:
    """Return server and request, and whether it boots from a volume; None if a later request has overtaken it."""
    row = server_of(conn, operation)
    spec = instances.request_spec(conn, operation.instance_uuid)
    return None if row is None or spec is None else (row, spec, _boots_from_volume(conn, row["uuid"]))


def _boots_from_volume(conn: sa.Connection, uuid: str) -> bool:
    return root_volume(instances.devices_of(conn, uuid)) is not None
