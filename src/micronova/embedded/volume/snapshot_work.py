"""The operations on snapshots."""

import sqlalchemy as sa

from micronova.embedded.volume import messages, quotas, snapshot_queries
from micronova.embedded.volume.backend.files import SNAPSHOTS, VOLUMES
from micronova.embedded.volume.messages import Action
from micronova.embedded.volume.model import AVAILABLE, ERROR, ERROR_DELETING, GIB, Operation
from micronova.embedded.volume.operations import Apply, OperationKind, Work


class SnapshotKind(OperationKind):
    """An operation that changes one snapshot."""

    resource = messages.Resource.SNAPSHOT
    directory = SNAPSHOTS


class CreateSnapshot(SnapshotKind):
    """Copies a volume."""

    name = "create_snapshot"
    action = Action.CREATE_SNAPSHOT

    async def run(self, work: Work) -> Apply:
        """Copy the volume's file."""
        operation = work.operation
        snapshot = await self.existing(snapshot_queries.get, operation.resource_id)
        size, source = snapshot.size * GIB, self.files.path(VOLUMES, snapshot.volume_id)
        await self.files.create_copy(source, SNAPSHOTS, snapshot.id, operation.id, size, work.reporter(size))
        return lambda conn, now: snapshot_queries.record(conn, snapshot.id, {"status": AVAILABLE}, now)

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Show the snapshot as failed; it counts until it is deleted."""
        snapshot_queries.record(conn, operation.resource_id, {"status": ERROR}, now)


class DeleteSnapshot(SnapshotKind):
    """Removes the file of a snapshot, then its row."""

    name = "delete_snapshot"
    action = Action.DELETE_SNAPSHOT

    async def run(self, work: Work) -> Apply:
        """Remove the file."""
        snapshot_id = work.operation.resource_id
        await self.files.remove(SNAPSHOTS, snapshot_id)

        def forget(conn: sa.Connection, now: int) -> None:
            snapshot = snapshot_queries.delete(conn, snapshot_id)
            if snapshot is not None:
                freed = quotas.snapshot(snapshot.volume_type_id, snapshot.size)
                quotas.release(conn, snapshot.project_id, freed)

        return forget

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Show that the snapshot is still there."""
        snapshot_queries.record(conn, operation.resource_id, {"status": ERROR_DELETING}, now)
