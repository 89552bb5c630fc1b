"""The operations on backups."""

import sqlalchemy as sa

from micronova.embedded.volume.backend.files import BACKUPS, VOLUMES
from micronova.embedded.volume.encryption import key_after_copy
from micronova.embedded.volume.model import AVAILABLE, ERROR_RESTORING, Operation, ResourceColumns
from micronova.embedded.volume.operations import messages
from micronova.embedded.volume.operations.base import Apply, Attempt, Deletion, OperationKind
from micronova.embedded.volume.operations.messages import Action
from micronova.embedded.volume.operations.payloads import CreateBackupPayload, RestoreBackupPayload
from micronova.embedded.volume.operations.volume_work import VolumeKind
from micronova.embedded.volume.store import attachment_queries, backup_queries, quotas, snapshot_queries, volume_queries


class BackupKind(OperationKind):
    """An operation that changes one backup."""

    resource = messages.Resource.BACKUP
    directory = BACKUPS
    rows = backup_queries.ROWS

    def show_failure(self, conn: sa.Connection, backup_id: str, reason: str, now: int) -> None:
        """Set the status of a backup that failed, and the reason; it counts in the quota until it is deleted."""
        backup_queries.touch(conn, backup_id, {"status": self.failure_status, "fail_reason": reason}, now)


class CreateBackup(BackupKind):
    """Copies a volume or a snapshot to the directory of backups."""

    name = "create_backup"
    action = Action.CREATE_BACKUP

    async def run(self, attempt: Attempt) -> Apply:
        """Copy the file."""
        operation = attempt.operation
        backup = await self.existing(backup_queries.get, operation.resource_id)
        source = self.files.path(CreateBackupPayload.of(operation).source_directory, operation.source_id or "")
        size = await self.file_size(backup.size, backup.encryption_key_id, source)
        await self.files.create_copy(source, BACKUPS, backup.id, operation.id, size, attempt.reporter(size))

        def done(conn: sa.Connection, now: int) -> None:
            self.give_back(conn, operation, now)
            self.rows.set_status(conn, backup.id, AVAILABLE, now)

        return done

    def give_back(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """End the work on the source.

        A volume gets the status that follows from its attachments, a snapshot is available again.
        """
        of_volume = CreateBackupPayload.of(operation).source_directory == VOLUMES
        end = attachment_queries.end_operation_on_volume if of_volume else snapshot_queries.end_operation
        end(conn, operation.source_id or "", now)

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """End the work on the source first: transactions lock volumes and snapshots before backups."""
        self.give_back(conn, operation, now)
        self.show_failure(conn, operation.resource_id, "The copy failed; the messages say why.", now)


class DeleteBackup(BackupKind, Deletion):
    """Removes the file of a backup, then its row."""

    name = "delete_backup"
    action = Action.DELETE_BACKUP

    def delete_row(self, conn: sa.Connection, id: str) -> None:
        """Delete the row and release the quota."""
        if backup := backup_queries.delete(conn, id):
            quotas.release(conn, backup.project_id, quotas.of_backup(backup.size))


class ImportBackup(BackupKind):
    """Gives an imported backup the file that its record names."""

    name = "import_backup"
    action = Action.IMPORT_BACKUP

    async def run(self, attempt: Attempt) -> Apply:
        """Link the file, unless it is the backup's own."""
        backup_id = attempt.operation.resource_id
        backup = await self.existing(backup_queries.get, backup_id)
        source_id = attempt.operation.source_id or ""
        original = backup_id if await self.files.exists(BACKUPS, backup_id) else source_id
        size = await self.file_size(backup.size, backup.encryption_key_id, self.files.path(BACKUPS, original))
        await self.files.link(BACKUPS, source_id, backup_id, size)
        return lambda conn, now: self.rows.set_status(conn, backup_id, AVAILABLE, now)

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Show that there is no data."""
        self.show_failure(
            conn, operation.resource_id, "The data of the record was not found; the messages say more.", now
        )


class RestoreBackup(VolumeKind):
    """Restores a backup to a volume, which may be new."""

    name = "restore_backup"
    action = Action.RESTORE_BACKUP
    failure_status = ERROR_RESTORING

    async def run(self, attempt: Attempt) -> Apply:
        """Copy the backup; until the copy is complete, a volume that exists is what it was."""
        operation = attempt.operation
        payload = RestoreBackupPayload.of(operation)
        volume = await self.volume(operation)
        backup = await self.existing(backup_queries.get, operation.source_id or "")
        source = self.files.path(BACKUPS, backup.id)
        size = await self.file_size(volume.size, backup.encryption_key_id, source)
        values: ResourceColumns = {
            "status": AVAILABLE,
            "bootable": payload.values.bootable,
            "image_metadata": payload.values.image_metadata,
            **key_after_copy(self.core, volume, backup),
        }
        await self.export_manager.end_connections(volume.id)
        await self.files.replace_by_copy(source, VOLUMES, volume.id, operation.id, size, attempt.reporter(size))

        def done(conn: sa.Connection, now: int) -> None:
            volume_queries.touch(conn, volume.id, values, now)
            volume_queries.set_metadata(conn, volume.id, payload.metadata)
            self.give_back(conn, operation, now)

        return done

    def give_back(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Let the backup be used again."""
        backup_queries.end_operation(conn, operation.source_id or "", now)
