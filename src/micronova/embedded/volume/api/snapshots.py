"""Snapshots: create, list, show, change, delete, and their actions."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.embedded.volume import states
from micronova.embedded.volume.api import listing
from micronova.embedded.volume.api.action_routes import NewStatus, action_route
from micronova.embedded.volume.api.listing import QUERY_RULES
from micronova.embedded.volume.api.request_bodies import (
    Body,
    Flag,
    Items,
    NameChanges,
    NewNames,
    Text,
    Uuid,
    truth,
    uuid,
)
from micronova.embedded.volume.core import Core, retry_or_conflict
from micronova.embedded.volume.model import AVAILABLE, CREATING, ResourceColumns, Snapshot, Volume
from micronova.embedded.volume.operations.snapshot_work import CreateSnapshot, DeleteSnapshot
from micronova.embedded.volume.store import operation_queries, quotas, snapshot_queries, volume_queries
from micronova.embedded.volume.tables import snapshots
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Invalid, NotFound

FILTERS = frozenset({"name", "status", "volume_id", "metadata", "availability_zone"})
FILTERS_SINCE = {"consumes_quota": 65}


class NewSnapshot(NewNames, kw_only=True):
    """The snapshot to create."""

    volume_id: Uuid | None
    force: Flag | None | UnsetType = UNSET
    metadata: Items | None = None


class NewSnapshotBody(Body):
    """The body of a create."""

    snapshot: NewSnapshot


class SnapshotChanges(NameChanges):
    """The fields of a snapshot that can change."""


class SnapshotChangesBody(Body):
    """The body of an update."""

    snapshot: SnapshotChanges


class ReportedStatus(Body):
    """The arguments of os-update_snapshot_status: how far a snapshot is, as compute reports it."""

    status: Text
    progress: Annotated[str, Meta(title="a percentage from 0% to 100%", pattern=r"^(100|[0-9]{1,2})%\Z")] | None = None


class SnapshotHandlers:
    """The handlers of snapshots."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_, one = "/snapshots", "/snapshots/{snapshot_id}"
        route, act = partial(Route, checks_policy=True), partial(action_route, of="snapshot")
        admin = "volume_extension:snapshot_admin_actions:"
        report = "snapshot_extension:snapshot_actions:update_snapshot_status"
        return [
            Route(method="GET", path=all_, handler=self.index, policy="volume:get_all_snapshots"),
            Route(method="GET", path=f"{all_}/detail", handler=self.detail, policy="volume:get_all_snapshots"),
            route(
                method="POST",
                path=all_,
                handler=self.create,
                policy="volume:create_snapshot",
                body=NewSnapshotBody,
                status=202,
            ),
            route(method="GET", path=one, handler=self.show, policy="volume:get_snapshot"),
            route(
                method="PUT", path=one, handler=self.update, policy="volume:update_snapshot", body=SnapshotChangesBody
            ),
            route(method="DELETE", path=one, handler=self.delete, policy="volume:delete_snapshot", status=202),
            act("os-update_snapshot_status", self.update_status, report, ReportedStatus),
            act("os-reset_status", self.reset_status, f"{admin}reset_status", NewStatus),
            act("os-force_delete", self.force_delete, f"{admin}force_delete"),
        ]

    # --- reading ---------------------------------------------------------------------------------------------

    async def index(self, request: Request) -> dict[str, Any]:
        """List snapshots."""
        return await self._list(request, "snapshots", _brief)

    async def detail(self, request: Request) -> dict[str, Any]:
        """List snapshots with all fields."""
        return await self._list(request, "snapshots/detail", partial(_full, request))

    async def _list(self, request: Request, path: str, view: Callable[[Snapshot], dict[str, Any]]) -> dict[str, Any]:
        page = listing.read_page(request.raw_query, snapshot_queries.SORTABLE, self._core.settings.max_limit)
        found = await self._core.database.read(
            snapshot_queries.list_snapshots, page, self._conditions(request), listing.wants_count(request)
        )
        return listing.answer(request, "snapshots", path, found, view)

    def _conditions(self, request: Request) -> list[sa.ColumnElement[bool]]:
        query, minor = request.raw_query, request.minor
        own = listing.own_project(request, snapshots.c.project_id, services=True)
        conditions = [*own]
        known = FILTERS | {name for name, first in FILTERS_SINCE.items() if minor >= first}
        admin = {"project_id"} if request.context.is_admin else set()
        if minor >= 31:  # before, filters that are not known are ignored
            listing.refuse_unknown(query, known | admin | {"name~"})
        for name, values in query.items():
            if name in ("name", "status", "volume_id"):
                conditions.append(snapshots.c[name].in_(listing.any_of(values)))
            elif name == "metadata" and minor >= 22:
                wanted = listing.dictionary(name, values[-1]).items()
                conditions += [snapshot_queries.has_metadata(key, value) for key, value in wanted]
            elif (name == "availability_zone" and values[-1] != self._core.settings.availability_zone) or (
                name == "consumes_quota" and name in known and not QUERY_RULES.boolean(name, values[-1])
            ):
                conditions.append(sa.false())
            elif name == "project_id" and name in admin and not own:
                conditions.append(snapshots.c.project_id.in_(values))
            elif name == "name~" and minor >= 34:
                conditions.append(snapshots.c.name.contains(values[-1], autoescape=True))
        return conditions

    async def show(self, request: Request, snapshot_id: str) -> dict[str, Any]:
        """Show a snapshot."""
        return {"snapshot": _full(request, await self._core.load_snapshot(request, snapshot_id))}

    # --- changing --------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> dict[str, Any]:
        """Create a snapshot of a volume."""
        asked: NewSnapshot = request.body.snapshot
        force = not isinstance(asked.force, UnsetType) and truth(asked.force or False)
        if request.minor >= 66:
            if not force and not isinstance(asked.force, UnsetType):
                raise Invalid("Invalid input for field/attribute force: since 3.66 it may only be true.")
            force = True
        if asked.volume_id is None:
            raise NotFound("Volume None could not be found.")
        volume_id = uuid(asked.volume_id)
        snapshot_id, operation_id = self._core.new_id(), self._core.new_id()

        async def try_once() -> Snapshot:
            volume = await self._core.load_volume(request, volume_id)
            states.check_volume(volume, "force_snapshot" if force else "snapshot")
            snapshot = Snapshot(
                id=snapshot_id,
                volume_id=volume.id,
                project_id=volume.project_id,
                user_id=request.context.user_id,
                name=asked.given_name(),
                description=asked.given_description(),
                size=volume.size,
                status=CREATING,
                told_progress=None,
                host=volume.host,
                volume_type_id=volume.volume_type_id,
                bootable=volume.bootable,
                image_metadata=volume.image_metadata,
                created_at=self._core.now(),
                updated_at=None,
                revision=1,
                metadata=asked.metadata or {},
                encryption_key_id=volume.encryption_key_id,
                sealed_key=volume.sealed_key,
            )
            await self._core.record_operation(self._record, volume, snapshot, operation_id, request.context.request_id)
            return snapshot

        return {"snapshot": _plain(request, await retry_or_conflict(f"volume {volume_id}", try_once))}

    def _record(
        self, conn: sa.Connection, volume: Volume, snapshot: Snapshot, operation_id: str, request_id: str
    ) -> None:
        new = CreateSnapshot.record(
            conn,
            self._core,
            id=operation_id,
            resource_id=snapshot.id,
            source_id=volume.id,
            project_id=snapshot.project_id,
            request_id=request_id,
        )
        if not new:
            return
        # Raises Changed if another request deletes the volume.
        volume_queries.update(conn, volume, {"status": volume.status}, self._core.now())
        snapshot_queries.insert(conn, snapshot)
        wanted = quotas.snapshot(snapshot.volume_type_id, snapshot.size)
        quotas.charge(conn, snapshot.project_id, wanted, self._core.settings.quotas)

    async def update(self, request: Request, snapshot_id: str) -> dict[str, Any]:
        """Change name and description."""
        given: SnapshotChanges = request.body.snapshot
        values = given.changed_names()
        if request.minor >= 53 and not values:
            raise Invalid("The body changes nothing: give name or description.")

        async def try_once() -> Snapshot:
            snapshot = await self._core.load_snapshot(request, snapshot_id)
            await self._core.database.write(snapshot_queries.update, snapshot, values, self._core.now())
            return await self._core.load_snapshot(request, snapshot_id)

        return {"snapshot": _plain(request, await retry_or_conflict(f"snapshot {snapshot_id}", try_once))}

    async def delete(self, request: Request, snapshot_id: str) -> None:
        """Delete a snapshot and its file."""
        await self._begin_delete(request, snapshot_id, force=False)

    async def force_delete(self, request: Request, snapshot_id: str) -> None:
        """Delete a snapshot in any status."""
        await self._begin_delete(request, snapshot_id, force=True)

    async def _begin_delete(self, request: Request, snapshot_id: str, *, force: bool) -> None:
        operation_id = self._core.new_id()

        async def try_once() -> None:
            snapshot = await self._core.load_snapshot(request, snapshot_id)
            if not force:
                states.check_snapshot(snapshot, "delete")
            await self._core.record_operation(
                self._record_delete, snapshot, force, operation_id, request.context.request_id
            )

        await retry_or_conflict(f"snapshot {snapshot_id}", try_once)

    def _record_delete(
        self, conn: sa.Connection, snapshot: Snapshot, force: bool, operation_id: str, request_id: str
    ) -> None:
        if force:
            operation_queries.cancel(conn, snapshot.id, but=operation_id)
        if self.record_delete_operation(conn, snapshot, operation_id, request_id):
            self.record_deleting(conn, snapshot)

    def record_delete_operation(
        self, conn: sa.Connection, snapshot: Snapshot, operation_id: str, request_id: str
    ) -> bool:
        """Write the operation that deletes a snapshot; return False if it is there already."""
        return DeleteSnapshot.record(
            conn,
            self._core,
            id=operation_id,
            resource_id=snapshot.id,
            source_id=snapshot.volume_id,
            project_id=snapshot.project_id,
            request_id=request_id,
        )

    def record_deleting(self, conn: sa.Connection, snapshot: Snapshot) -> None:
        """Write the status of a snapshot that is deleted; raise Changed."""
        deleting = states.SNAPSHOT_ACTIONS["delete"].during
        snapshot_queries.update(conn, snapshot, {"status": deleting}, self._core.now())

    async def reset_status(self, request: Request, snapshot_id: str) -> None:
        """Set the status, whatever it is."""
        status = request.body.arguments.status.lower()
        if status not in states.SNAPSHOT_STATUSES:
            raise Invalid(f"Must specify a valid status: {', '.join(states.SNAPSHOT_STATUSES)}, not '{status[:64]}'.")

        async def try_once() -> None:
            snapshot = await self._core.load_snapshot(request, snapshot_id)
            await self._core.database.write(snapshot_queries.update, snapshot, {"status": status}, self._core.now())

        await retry_or_conflict(f"snapshot {snapshot_id}", try_once)

    async def update_status(self, request: Request, snapshot_id: str) -> None:
        """Record what compute reports of a snapshot that it makes or deletes."""
        reported: ReportedStatus = request.body.arguments

        async def try_once() -> None:
            snapshot = await self._core.load_snapshot(request, snapshot_id)
            if reported.status not in states.REPORTED_STATUSES.get(snapshot.status, ()):
                raise Invalid(
                    f"Provided snapshot status {reported.status[:64]} not allowed for snapshot with status "
                    f"{snapshot.status}."
                )
            values: ResourceColumns = {
                "status": reported.status,
                "told_progress": reported.progress or snapshot.told_progress,
            }
            await self._core.database.write(snapshot_queries.update, snapshot, values, self._core.now())

        await retry_or_conflict(f"snapshot {snapshot_id}", try_once)


def _brief(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "id": snapshot.id,
        "created_at": iso_micros(snapshot.created_at),
        "updated_at": iso_micros(snapshot.updated_at),
        "name": snapshot.name,
        "description": snapshot.description,
        "volume_id": snapshot.volume_id,
        "status": snapshot.status,
        "size": snapshot.size,
        "metadata": snapshot.metadata,
    }


def _full(request: Request, snapshot: Snapshot) -> dict[str, Any]:
    shown = _plain(request, snapshot)
    if request.allows(snapshot.target, "volume_extension:extended_snapshot_attributes"):
        progress = snapshot.told_progress or f"{100 if snapshot.status == AVAILABLE else snapshot.progress}%"
        shown["os-extended-snapshot-attributes:project_id"] = snapshot.project_id
        shown["os-extended-snapshot-attributes:progress"] = progress
    return shown


def _plain(request: Request, snapshot: Snapshot) -> dict[str, Any]:
    """Return the fields that the answers to a create and a change have."""
    shown = _brief(snapshot)
    if request.minor >= 14:
        shown["group_snapshot_id"] = None
    if request.minor >= 41:
        shown["user_id"] = snapshot.user_id
    if request.minor >= 65:
        shown["consumes_quota"] = True
    return shown
