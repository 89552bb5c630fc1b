"""Backups: full copies of volumes in a directory of their own, which outlive the volumes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.embedded.volume import states
from micronova.embedded.volume.api import listing
from micronova.embedded.volume.api.action_routes import NewStatus, action_route
from micronova.embedded.volume.api.listing import Links
from micronova.embedded.volume.api.request_bodies import Body, Flag, Items, Text, Uuid, stripped, truth, uuid
from micronova.embedded.volume.api.volume_sources import Source
from micronova.embedded.volume.api.volumes import VolumeHandlers
from micronova.embedded.volume.backend.files import SNAPSHOTS, VOLUMES
from micronova.embedded.volume.core import Core, retry_or_conflict
from micronova.embedded.volume.encryption import key_of
from micronova.embedded.volume.model import CREATING, Backup, ResourceColumns, Snapshot, Volume
from micronova.embedded.volume.operations.backup_work import CreateBackup, DeleteBackup, RestoreBackup
from micronova.embedded.volume.operations.payloads import CreateBackupPayload, RestoreBackupPayload, RestoredValues
from micronova.embedded.volume.store import backup_queries, operation_queries, quotas, snapshot_queries, volume_queries
from micronova.embedded.volume.tables import backups
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.errors import Invalid

FILTERS = frozenset({"name", "status", "volume_id"})
CONTAINER = "backups"


class NewBackup(Body):
    """The backup to create."""

    versions = {"metadata": since(43), "availability_zone": since(51)}

    volume_id: Uuid
    name: Text | None = None
    description: Text | None = None
    container: Text | None = None
    incremental: Flag = False
    force: Flag = False
    snapshot_id: Uuid | None = None
    metadata: Items | None = None
    availability_zone: Text | None = None


class NewBackupBody(Body):
    """The body of a create."""

    backup: NewBackup


class BackupChanges(Body):
    """The fields of a backup that can change."""

    versions = {"metadata": since(43)}

    name: Text | None | UnsetType = UNSET
    description: Text | None | UnsetType = UNSET
    metadata: Items | UnsetType = UNSET


class BackupChangesBody(Body):
    """The body of an update."""

    backup: BackupChanges


class Restore(Body):
    """Where to restore a backup."""

    volume_id: Uuid | None = None
    name: Text | None = None


class RestoreBody(Body):
    """The body of a restore."""

    restore: Restore | None


class BackupHandlers:
    """The handlers of backups."""

    def __init__(self, core: Core, volumes: VolumeHandlers) -> None:
        self._core = core
        self._volumes = volumes

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_, one = "/backups", "/backups/{backup_id}"
        route, act = partial(Route, checks_policy=True), partial(action_route, of="backup")
        admin = "volume_extension:backup_admin_actions:"
        return [
            Route(method="GET", path=all_, handler=self.index, policy="backup:get_all"),
            Route(method="GET", path=f"{all_}/detail", handler=self.detail, policy="backup:get_all"),
            route(
                method="POST", path=all_, handler=self.create, policy="backup:create", body=NewBackupBody, status=202
            ),
            route(method="GET", path=one, handler=self.show, policy="backup:get"),
            route(
                method="PUT",
                path=one,
                handler=self.update,
                policy="backup:update",
                body=BackupChangesBody,
                versions=since(9),
            ),
            route(method="DELETE", path=one, handler=self.delete, policy="backup:delete", status=202),
            route(
                method="POST",
                path=f"{one}/restore",
                handler=self.restore,
                policy="backup:restore",
                body=RestoreBody,
                status=202,
            ),
            act("os-reset_status", self.reset_status, f"{admin}reset_status", NewStatus),
            act("os-force_delete", self.force_delete, f"{admin}force_delete"),
        ]

    # --- reading ---------------------------------------------------------------------------------------------

    async def index(self, request: Request) -> dict[str, Any]:
        """List backups with their ids and names."""
        return await self._list(request, "backups", brief)

    async def detail(self, request: Request) -> dict[str, Any]:
        """List backups with all fields."""
        return await self._list(request, "backups/detail", _full)

    async def _list(
        self, request: Request, path: str, view: Callable[[Request, Backup], dict[str, Any]]
    ) -> dict[str, Any]:
        query = request.raw_query
        page = listing.read_page(query, backup_queries.SORTABLE, self._core.settings.max_limit)
        own = listing.own_project(request, backups.c.project_id)
        conditions = [*own]
        known = FILTERS | ({"project_id"} if request.context.is_admin else set())
        if request.minor >= 31:
            listing.refuse_unknown(query, known)
        for name, values in query.items():
            if name in known and (name != "project_id" or not own):
                conditions.append(backups.c[name].in_(listing.any_of(values)))
        count = listing.wants_count(request)
        found = await self._core.database.read(backup_queries.list_backups, page, conditions, count)
        return listing.answer(request, "backups", path, found, partial(view, request))

    async def show(self, request: Request, backup_id: str) -> dict[str, Any]:
        """Show a backup."""
        return {"backup": _full(request, await self._core.load_backup(request, backup_id))}

    # --- changing --------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> dict[str, Any]:
        """Begin to back up a volume or one of its snapshots."""
        asked: NewBackup = request.body.backup
        if truth(asked.incremental):
            raise Invalid("Backups here are full ones: leave incremental out.")
        if asked.container not in (None, "", CONTAINER):
            raise Invalid(f"There is one container, '{CONTAINER}': leave it out.")
        if asked.availability_zone not in (None, "", self._core.settings.availability_zone):
            raise Invalid(f"There is one availability zone, '{self._core.settings.availability_zone}'.")
        volume_id, new_id, operation_id = uuid(asked.volume_id), self._core.new_id(), self._core.new_id()

        async def try_once() -> Backup:
            volume = await self._core.load_volume(request, volume_id)
            snapshot: Snapshot | None = None
            if asked.snapshot_id is None:
                entry = states.check_volume(volume, "force_back_up" if truth(asked.force) else "back_up")
            else:
                snapshot = await self._core.load_snapshot(request, uuid(asked.snapshot_id), "volume:get_snapshot")
                if snapshot.volume_id != volume.id:
                    raise Invalid(f"Invalid snapshot: Snapshot {snapshot.id} is not one of volume {volume.id}.")
                entry = states.check_snapshot(snapshot, "back_up")
            now, key, keys = self._core.now(), key_of(snapshot or volume), self._core.keys
            key = None if key is None or keys is None else keys.copy(self._core.new_id(), key)
            made = Backup(
                id=new_id,
                volume_id=volume.id,
                snapshot_id=None if snapshot is None else snapshot.id,
                project_id=volume.project_id,
                user_id=request.context.user_id,
                name=stripped(asked.name),
                description=stripped(asked.description),
                size=volume.size if snapshot is None else snapshot.size,
                status=CREATING,
                host=volume.host,
                fail_reason=None,
                bootable=volume.bootable,
                image_metadata=volume.image_metadata,
                volume_metadata=volume.metadata,
                metadata=asked.metadata or {},
                data_timestamp=now if snapshot is None else snapshot.created_at,
                created_at=now,
                updated_at=None,
                revision=1,
                volume_type_id=volume.volume_type_id,
                encryption_key_id=None if key is None else key.id,
                sealed_key=None if key is None else key.sealed,
            )
            await self._core.record_operation(
                self._record, made, volume, snapshot, entry.during, operation_id, request.context.request_id
            )
            return made

        made = await retry_or_conflict(f"volume {volume_id}", try_once)
        return {"backup": brief(request, made)}

    def _record(
        self,
        conn: sa.Connection,
        backup: Backup,
        volume: Volume,
        snapshot: Snapshot | None,
        source_status: str,
        operation_id: str,
        request_id: str,
    ) -> None:
        source = volume if snapshot is None else snapshot
        new = CreateBackup.record(
            conn,
            self._core,
            id=operation_id,
            resource_id=backup.id,
            source_id=source.id,
            project_id=backup.project_id,
            request_id=request_id,
            payload=CreateBackupPayload(source_directory=VOLUMES if snapshot is None else SNAPSHOTS),
        )
        if not new:
            return
        now = self._core.now()
        if snapshot is None:
            volume_queries.update(conn, volume, {"status": source_status}, now)
        else:
            snapshot_queries.update(conn, snapshot, {"status": source_status}, now)
        backup_queries.insert(conn, backup)
        quotas.charge(conn, backup.project_id, quotas.backup(backup.size), self._core.settings.quotas)

    async def update(self, request: Request, backup_id: str) -> dict[str, Any]:
        """Change name, description and metadata."""
        given: BackupChanges = request.body.backup
        values: ResourceColumns = {}
        if not isinstance(given.name, UnsetType):
            values["name"] = stripped(given.name)
        if not isinstance(given.description, UnsetType):
            values["description"] = stripped(given.description)
        if not isinstance(given.metadata, UnsetType):
            values["metadata"] = given.metadata
        if not values:
            raise Invalid("The body changes nothing: give name, description or metadata.")

        async def try_once() -> Backup:
            backup = await self._core.load_backup(request, backup_id)
            await self._core.database.write(backup_queries.update, backup, values, self._core.now())
            return await self._core.load_backup(request, backup_id)

        changed = await retry_or_conflict(f"backup {backup_id}", try_once)
        return {"backup": brief(request, changed)}

    async def delete(self, request: Request, backup_id: str) -> None:
        """Delete a backup and its file."""
        await self._begin_delete(request, backup_id, force=False)

    async def force_delete(self, request: Request, backup_id: str) -> None:
        """Delete a backup in any status."""
        await self._begin_delete(request, backup_id, force=True)

    async def _begin_delete(self, request: Request, backup_id: str, *, force: bool) -> None:
        operation_id = self._core.new_id()

        async def try_once() -> None:
            backup = await self._core.load_backup(request, backup_id)
            if not force:
                states.check_backup(backup, "delete")
            await self._core.record_operation(
                self._record_delete, backup, force, operation_id, request.context.request_id
            )

        await retry_or_conflict(f"backup {backup_id}", try_once)

    def _record_delete(
        self, conn: sa.Connection, backup: Backup, force: bool, operation_id: str, request_id: str
    ) -> None:
        if force:
            operation_queries.cancel(conn, backup.id, but=operation_id)
        new = DeleteBackup.record(
            conn,
            self._core,
            id=operation_id,
            resource_id=backup.id,
            project_id=backup.project_id,
            request_id=request_id,
        )
        if new:
            deleting = states.BACKUP_ACTIONS["delete"].during
            backup_queries.update(conn, backup, {"status": deleting}, self._core.now())

    async def restore(self, request: Request, backup_id: str) -> dict[str, Any]:
        """Restore the backup to the volume that the request names, or to a new one."""
        asked: Restore = request.body.restore or Restore()
        operation_id = self._core.new_id()
        draft: Volume | None = None
        if asked.volume_id is None:
            backup = await self._core.load_backup(request, backup_id)
            name = stripped(asked.name) or f"restore_backup_{backup_id}"
            source = Source(
                size=backup.size,
                volume_type_id=backup.volume_type_id if backup.encryption_key_id else None,
                bootable=backup.bootable,
                image_metadata=backup.image_metadata,
                key=key_of(backup),
                is_copy=True,
            )
            draft = await self._volumes.draft(request, source, name=name)

        async def try_once() -> Volume:
            backup = await self._core.load_backup(request, backup_id)
            states.check_backup(backup, "restore")
            volume = draft
            if volume is None:
                volume = await self._core.load_volume(request, uuid(asked.volume_id or ""), "volume:get")
                states.check_volume(volume, "restore_backup")
                if (key_of(volume) is None) != (key_of(backup) is None):
                    raise Invalid(
                        f"Volume {volume.id} and the backup are not both encrypted: restore it to a new volume."
                    )
                if volume.size < backup.size:
                    raise Invalid(f"Volume {volume.id} is smaller than the backup, which has {backup.size} GiB.")
            await self._core.record_operation(
                self._record_restore, backup, volume, draft is not None, operation_id, request.context.request_id
            )
            return volume

        volume = await retry_or_conflict(f"backup {backup_id}", try_once)
        return {"restore": {"backup_id": backup_id, "volume_id": volume.id, "volume_name": volume.name}}

    def _record_restore(
        self, conn: sa.Connection, backup: Backup, volume: Volume, is_new: bool, operation_id: str, request_id: str
    ) -> None:
        new = RestoreBackup.record(
            conn,
            self._core,
            id=operation_id,
            resource_id=volume.id,
            source_id=backup.id,
            project_id=volume.project_id,
            request_id=request_id,
            payload=RestoreBackupPayload(
                values=RestoredValues(bootable=backup.bootable, image_metadata=backup.image_metadata),
                metadata=backup.volume_metadata,
            ),
        )
        if not new:
            return
        now, restoring = self._core.now(), states.VOLUME_ACTIONS["restore_backup"].during
        if not is_new:
            volume_queries.update(conn, volume, {"status": restoring}, now)
        backup_queries.update(conn, backup, {"status": states.BACKUP_ACTIONS["restore"].during}, now)
        if is_new:
            self._volumes.insert(conn, volume)
            volume_queries.set_status(conn, volume.id, restoring, now)

    async def reset_status(self, request: Request, backup_id: str) -> None:
        """Set the status, whatever it is."""
        status = request.body.arguments.status.lower()
        if status not in states.BACKUP_STATUSES:
            raise Invalid(f"Must specify a valid status: {' or '.join(states.BACKUP_STATUSES)}, not '{status[:64]}'.")

        async def try_once() -> None:
            backup = await self._core.load_backup(request, backup_id)
            await self._core.database.write(backup_queries.update, backup, {"status": status}, self._core.now())

        await retry_or_conflict(f"backup {backup_id}", try_once)


def brief(request: Request, backup: Backup) -> dict[str, Any]:
    """Return what a list without details has."""
    return {"id": backup.id, "name": backup.name, "links": Links(request).of("backups", backup.id)}


def _full(request: Request, backup: Backup) -> dict[str, Any]:
    shown: dict[str, Any] = {
        **brief(request, backup),
        "status": backup.status,
        "size": backup.size,
        "object_count": 1,
        "availability_zone": None,
        "container": CONTAINER,
        "created_at": iso_micros(backup.created_at),
        "updated_at": iso_micros(backup.updated_at),
        "description": backup.description,
        "fail_reason": backup.fail_reason,
        "volume_id": backup.volume_id,
        "is_incremental": False,
        "has_dependent_backups": False,
        "snapshot_id": backup.snapshot_id,
        "data_timestamp": iso_micros(backup.data_timestamp),
    }
    if request.minor >= 18 and request.allows(backup.target, "backup:backup_project_attribute"):
        shown["os-backup-project-attr:project_id"] = backup.project_id
    if request.minor >= 43:
        shown["metadata"] = backup.metadata
    if request.minor >= 56:
        shown["user_id"] = backup.user_id
    if request.minor >= 64 and backup.encryption_key_id is not None:
        shown["encryption_key_id"] = backup.encryption_key_id
    return shown
