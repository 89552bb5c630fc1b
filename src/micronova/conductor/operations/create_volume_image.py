"""Making an image of a server whose root disk is a volume: snapshots of its volumes, and an image that names them.

The API makes both, because only it has the token of the user whose they are. It records the operation before the first
snapshot. `new`: the API is at work, or has died, if a conductor gets the operation in this step; `done`: it has
finished, and the operation succeeds. A failure leads to `cleanup` (image and snapshots are deleted): error.

Snapshots name the image in their metadata, and the image has the operation's id, so that conductors find what the API
may have made. An operation that a later request overtakes leaves nothing: the caller of the API gets an error.
"""

import sqlalchemy as sa

from micronova.clients.volume.client import VolumeClient
from micronova.conductor.operations.create_image import CreateImage
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.operation_kind import NoMoreWork
from micronova.conductor.operations.transitions import server_of
from micronova.db import instances
from micronova.objects.errors import Conflict, Invalid, NotFound, OperationFailed, Unavailable
from micronova.objects.instance import InstanceChanges
from micronova.objects.operations import ImagePayload


class CreateVolumeImage(CreateImage):
    """The operation behind createImage of a server that boots from a volume. No host takes part in it."""

    def __init__(self, dependencies: ConductorDependencies) -> None:
        super().__init__(dependencies, "create_volume_image")

    def may_fail(self, operation: Operation) -> bool:
        """Return False if the image is complete, or only it is left to delete."""
        return operation.step == "new"

    async def run(self, operations: list[Operation]) -> None:
        """Continue from the persisted step."""
        for operation in operations:
            if operation.step == "cleanup":
                await self._clean_up(operation)
            elif await self._engine.database.read(server_of, operation) is None:
                await self._overtaken(operation)
            elif operation.step == "done":
                self.announce(operation, await self._engine.database.write(self._end, operation))
            else:
                await self.fail(operation, OperationFailed("The request was interrupted before the image was made."))

    def _end(self, conn: sa.Connection, operation: Operation) -> NoMoreWork:
        row = self.transitions.lock_current(conn, operation)
        if row is None or not self.transitions.end(conn, operation, "success"):
            return NoMoreWork()  # the next run finds that it is overtaken
        changes: InstanceChanges = {"task_state": None}
        instances.update(conn, row["uuid"], self._engine.now(), changes, epoch=operation.epoch)
        return NoMoreWork(ended="success")

    async def leaves_image(self, operation: Operation) -> bool:
        """Return False: the caller gets an error."""
        return False

    async def _delete_own(self, operation: Operation) -> bool:
        """Delete image and snapshots; return False if the API may still make some, and look for them later."""
        if not await super()._delete_own(operation):
            return False
        client = self.transitions.volumes.client()
        for volume_id in operation.payload_as(ImagePayload).volumes:
            for snapshot_id in await client.snapshots_for(volume_id, operation.id):
                await _delete_snapshot(client, snapshot_id)
        return True


async def _delete_snapshot(client: VolumeClient, snapshot_id: str) -> None:
    """Delete a snapshot; raise Unavailable while it is being made, because it can be deleted later."""
    try:
        await client.delete_snapshot(snapshot_id)
    except NotFound:
        pass
    except (Invalid, Conflict):
        raise Unavailable(f"Snapshot {snapshot_id} cannot be deleted now.") from None
