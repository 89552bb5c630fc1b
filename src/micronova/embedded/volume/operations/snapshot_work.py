"""The operations on snapshots."""

import sqlalchemy as sa

from micronova.embedded.volume.backend.files import SNAPSHOTS, VOLUMES
from micronova.embedded.volume.model import AVAILABLE
from micronova.embedded.volume.operations import messages
from micronova.embedded.volume.operations.base import Apply, Attempt, Deletion, OperationKind
from micronova.embedded.volume.operations.messages import Action
from micronova.embedded.volume.store import quotas, snapshot_queries


class SnapshotKind(OperationKind):
    """An operation that changes one snapshot."""

    resource = messages.Resource.SNAPSHOT
    directory = SNAPSHOTS
    rows = snapshot_queries.ROWS


class CreateSnapshot(SnapshotKind):
    """Copies a volume."""

    name = "create_snapshot"
    action = Action.CREATE_SNAPSHOT

    async def run(self, attempt: Attempt) -> Apply:
        """Copy the volume's file."""
        operation = attempt.operation
        snapshot = await self.existing(snapshot_queries.get, operation.resource_id)
        source = self.files.path(VOLUMES, snapshot.volume_id)
        size = await self.file_size(snapshot.size, snapshot.encryption_key_id, source)
        await self.files.create_copy(source, SNAPSHOTS, snapshot.id, operation.id, size, attempt.reporter(size))
        return lambda conn, now: self.rows.set_status(conn, snapshot.id, AVAILABLE, now)


class DeleteSnapshot(SnapshotKind, Deletion):
    """Removes the file of a snapshot, then its row."""

    name = "delete_snapshot"
    action = Action.DELETE_SNAPSHOT

    def delete_row(self, conn: sa.Connection, id: str) -> None:
        """Delete the row and release the quota."""
        if snapshot := snapshot_queries.delete(conn, id):
            quotas.release(conn, snapshot.project_id, quotas.of_snapshot(snapshot.volume_type_id, snapshot.size))
