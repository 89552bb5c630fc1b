"""The operations on backups."""

import sqlalchemy as sa

from micronova.embedded.volume import (
    attachment_queries,
    backup_queries,
    messages,
    quotas,
    snapshot_queries,
    volume_queries,
)
from micronova.embedded.volume.backend.files import BACKUPS, VOLUMES
from micronova.embedded.volume.messages import Action
from micronova.embedded.volume.model import (
    AVAILABLE,
    ERROR,
    ERROR_DELETING,
    ERROR_RESTORING,
    GIB,
    Operation,
)
from micronova.embedded.volume.operations import Apply, OperationKind, Work


class BackupKind(OperationKind):
    """An operation that changes one backup."""

    resource = messages.Resource.BACKUP
    directory = BACKUPS


class CreateBackup(BackupKind):
    """Copies a volume or a snapshot to the directory of backups."""

    name = "create_backup"
    action = Action.CREATE_BACKUP

    async def run(self, work: Work) -> Apply:
        """Copy the file."""
        operation = work.operation
        backup = await self.existing(backup_queries.get, operation.resource_id)
        size, source = backup.size * GIB, self.files.path(operation.payload["copy"], operation.source_id or "")
        await self.files.create_copy(source, BACKUPS, backup.id, operation.id, size, work.reporter(size))

        def done(conn: sa.Connection, now: int) -> None:
            self.cancelled(conn, operation, now)
            backup_queries.record(conn, backup.id, {"status": AVAILABLE}, now)

        return done

    def cancelled(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Give the source the status that it had before."""
        source_id = operation.source_id or ""
        if operation.payload["copy"] == VOLUMES:
            attachment_queries.end_work(conn, source_id, now)
        else:
            snapshot_queries.record(conn, source_id, {"status": operation.payload["status"]}, now)

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Show the backup as failed; it counts until it is deleted."""
        self.cancelled(conn, operation, now)
        reason = "The copy failed; the messages say why."
        backup_queries.record(conn, operation.resource_id, {"status": ERROR, "fail_reason": reason}, now)


class DeleteBackup(BackupKind):
    """Removes the file of a backup, then its row."""

    name = "delete_backup"
    action = Action.DELETE_BACKUP

    async def run(self, work: Work) -> Apply:
        """Remove the file."""
        backup_id = work.operation.resource_id
        await self.files.remove(BACKUPS, backup_id)

        def forget(conn: sa.Connection, now: int) -> None:
            backup = backup_queries.delete(conn, backup_id)
            if backup is not None:
                quotas.release(conn, backup.project_id, quotas.backup(backup.size))

        return forget

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Show that the backup is still there."""
        backup_queries.record(conn, operation.resource_id, {"status": ERROR_DELETING}, now)


class ImportBackup(BackupKind):
    """Gives an imported backup the file that its record names."""

    name = "import_backup"
    action = Action.IMPORT_BACKUP

    async def run(self, work: Work) -> Apply:
        """Link the file, unless it is the backup's own."""
        backup_id = work.operation.resource_id
        backup = await self.existing(backup_queries.get, backup_id)
        await self.files.link(BACKUPS, work.operation.source_id or "", backup_id, backup.size * GIB)
        return lambda conn, now: backup_queries.record(conn, backup_id, {"status": AVAILABLE}, now)

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Show that there is no data."""
        reason = "The data of the record was not found; the messages say more."
        backup_queries.record(conn, operation.resource_id, {"status": ERROR, "fail_reason": reason}, now)


class RestoreBackup(BackupKind):
    """Restores a backup to a volume, which may be new."""

    name = "restore_backup"
    action = Action.RESTORE_BACKUP
    resource = messages.Resource.VOLUME
    directory = VOLUMES

    async def run(self, work: Work) -> Apply:
        """Copy the backup; until the copy is complete, a volume that exists is what it was."""
        operation = work.operation
        volume = await self.existing(volume_queries.get, operation.resource_id)
        source, size = self.files.path(BACKUPS, operation.source_id or ""), volume.size * GIB
        await self.files.replace_by_copy(source, VOLUMES, volume.id, operation.id, size, work.reporter(size))

        def done(conn: sa.Connection, now: int) -> None:
            volume_queries.record(conn, volume.id, {"status": AVAILABLE, **operation.payload["values"]}, now)
            volume_queries.set_metadata(conn, volume.id, operation.payload["metadata"])
            self.cancelled(conn, operation, now)

        return done

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Show that the volume was not restored."""
        volume_queries.record(conn, operation.resource_id, {"status": ERROR_RESTORING}, now)
        self.cancelled(conn, operation, now)

    def cancelled(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Let the backup be used again."""
        backup_queries.record(conn, operation.source_id or "", {"status": AVAILABLE}, now)
