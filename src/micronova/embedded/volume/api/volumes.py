"""Volumes: create, list, show, change, delete, and the summary."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import sqlalchemy as sa
from msgspec import UNSET, UnsetType, field

from micronova.embedded.common.query import last
from micronova.embedded.volume import states
from micronova.embedded.volume.api import listing
from micronova.embedded.volume.api.listing import QUERY_RULES
from micronova.embedded.volume.api.request_bodies import (
    Body,
    Flag,
    Items,
    NameChanges,
    NewNames,
    Size,
    Text,
    Uuid,
    gibibytes,
    relaxed,
    uuid,
)
from micronova.embedded.volume.api.snapshots import SnapshotHandlers
from micronova.embedded.volume.api.volume_sources import Source, Sources, lock_source
from micronova.embedded.volume.api.volume_view import VolumeView
from micronova.embedded.volume.backend.keys import SealedKey
from micronova.embedded.volume.core import Core, retry_or_conflict
from micronova.embedded.volume.encryption import check_same_encryption, check_type_unchanged, load_cipher
from micronova.embedded.volume.model import CREATING, ResourceColumns, Volume, VolumeType
from micronova.embedded.volume.operations.volume_work import CreateVolume, DeleteVolume
from micronova.embedded.volume.store import operation_queries, quotas, snapshot_queries, type_queries, volume_queries
from micronova.embedded.volume.tables import volumes
from micronova.http.paging import check_filter
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.errors import Invalid, NotFound

FILTERS = frozenset(
    {"name", "status", "metadata", "bootable", "migration_status", "availability_zone", "group_id", "size"}
)
"""The filters of lists that everybody may use. Administrators may filter by more; see `_ADMIN_FILTERS`."""
FILTERS_SINCE = {"created_at": 60, "updated_at": 60, "consumes_quota": 65, "glance_metadata": 4}
_ADMIN_FILTERS = {"project_id": volumes.c.project_id, "host": volumes.c.host}
_QUOTE = '"'  # ends a key in a JSON path; SQLite has no way to escape it
_COMPARISONS = {
    "gt": operator.gt, "gte": operator.ge, "eq": operator.eq, "neq": operator.ne, "lt": operator.lt, "lte": operator.le
}  # fmt: skip


class NewVolume(NewNames):
    """The volume to create."""

    versions = {"group_id": since(13), "backup_id": since(47)}

    size: Size | None = None
    volume_type: Text | None = None
    metadata: Items | None = None
    availability_zone: Text | None = None
    multiattach: Flag | None = None
    consistencygroup_id: Uuid | None = None
    group_id: Text | None = None
    snapshot_id: Uuid | None = None
    source_volid: Uuid | None = None
    image_ref: Text | None = field(default=None, name="imageRef")
    image_id: Text | None = None
    backup_id: Uuid | None = None


class NewVolumeBody(Body):
    """The body of a create."""

    volume: NewVolume
    hints: dict[str, Any] | None = field(default=None, name="OS-SCH-HNT:scheduler_hints")


class VolumeChanges(NameChanges):
    """The fields of a volume that can change."""

    metadata: Items | UnsetType = UNSET


class VolumeChangesBody(Body):
    """The body of an update."""

    volume: VolumeChanges


class VolumeHandlers:
    """The handlers of volumes."""

    def __init__(self, core: Core, sources: Sources, snapshots: SnapshotHandlers) -> None:
        self._core = core
        self._sources = sources
        self._snapshots = snapshots

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_, one = "/volumes", "/volumes/{volume_id}"
        route = partial(Route, checks_policy=True)
        return [
            Route(method="GET", path=all_, handler=self.index, policy="volume:get_all"),
            Route(method="GET", path=f"{all_}/detail", handler=self.detail, policy="volume:get_all"),
            Route(
                method="GET", path=f"{all_}/summary", handler=self.summary, policy="volume:get_all", versions=since(12)
            ),
            Route(
                method="POST",
                path=all_,
                handler=self.create,
                policy="volume:create",
                body=dict[str, Any],
                status=202,
            ),
            route(method="GET", path=one, handler=self.show, policy="volume:get"),
            route(method="PUT", path=one, handler=self.update, policy="volume:update", body=VolumeChangesBody),
            route(method="DELETE", path=one, handler=self.delete, policy="volume:delete", status=202),
        ]

    # --- reading ---------------------------------------------------------------------------------------------

    async def index(self, request: Request) -> dict[str, Any]:
        """List volumes with their ids and names."""
        return await self._list(request, "volumes", VolumeView(request).brief)

    async def detail(self, request: Request) -> dict[str, Any]:
        """List volumes with all fields."""
        return await self._list(request, "volumes/detail", VolumeView(request).full)

    async def _list(self, request: Request, path: str, view: Callable[[Volume], dict[str, Any]]) -> dict[str, Any]:
        page = listing.read_page(request.raw_query, volume_queries.SORTABLE, self._core.settings.max_limit)
        found = await self._core.database.read(
            volume_queries.list_volumes, page, self._conditions(request), listing.wants_count(request)
        )
        return listing.answer(request, "volumes", path, found, view)

    async def summary(self, request: Request) -> dict[str, Any]:
        """Show how many volumes there are and how large they are together."""
        listing.check_length(request.raw_query)
        found = await self._core.database.read(volume_queries.summary, self._conditions(request))
        shown: dict[str, Any] = {"total_count": found.number, "total_size": found.size}
        if request.minor >= 36:
            shown["metadata"] = found.metadata
        return {"volume-summary": shown}

    async def show(self, request: Request, volume_id: str) -> dict[str, Any]:
        """Show a volume."""
        return {"volume": VolumeView(request).full(await self._core.load_volume(request, volume_id))}

    def _conditions(self, request: Request) -> list[sa.ColumnElement[bool]]:
        """Return what the volumes of a list have in common; raise Invalid."""
        query, minor = request.raw_query, request.minor
        # Compute looks for the volume of a server, whatever its project is.
        own = listing.own_project(request, volumes.c.project_id, services=True)
        conditions = [*own]
        known = FILTERS | {name for name, first in FILTERS_SINCE.items() if minor >= first}
        admin = _ADMIN_FILTERS if request.context.is_admin else {}
        if minor >= 31:  # before, filters that are not known are ignored
            listing.refuse_unknown(query, known | admin.keys() | {"name~", "status~"})
        for name, values in query.items():
            if name in known:
                conditions += self._condition(name, values)
            elif name in admin and (name != "project_id" or not own):
                conditions.append(admin[name].in_(listing.any_of(values)))
            elif minor >= 34 and name.endswith("~") and name[:-1] in ("name", "status"):
                conditions.append(volumes.c[name[:-1]].contains(values[-1], autoescape=True))
        return conditions

    def _condition(self, name: str, values: list[str]) -> list[sa.ColumnElement[bool]]:
        match name:
            case "name" | "status" | "availability_zone":
                return [volumes.c[name].in_(listing.any_of(values))]
            case "bootable" | "size":
                return [QUERY_RULES.matches(volumes.c[name], name, values)]
            case "metadata":
                return [
                    volume_queries.has_metadata(key, value)
                    for key, value in listing.dictionary(name, values[-1]).items()
                ]
            case "glance_metadata":
                wanted = listing.dictionary(name, values[-1]).items()
                if any(_QUOTE in key for key, _ in wanted):
                    return [sa.false()]
                return [volumes.c.image_metadata[key].as_string() == value for key, value in wanted]
            case "created_at" | "updated_at":
                parts = values[-1].split(",")
                check_filter(name, parts)
                return [self._time(name, part) for part in parts]
            case "consumes_quota":
                return [] if QUERY_RULES.boolean(name, values[-1]) else [sa.false()]
            case _:  # no volume is in a group or is being migrated
                return [sa.false()]

    def _time(self, name: str, text: str) -> sa.ColumnElement[bool]:
        comparison, colon, time = text.partition(":")
        if not colon or comparison not in _COMPARISONS:
            raise Invalid(f"Invalid value for '{name}': write OPERATOR:TIME with one of {', '.join(_COMPARISONS)}.")
        condition: sa.ColumnElement[bool] = _COMPARISONS[comparison](volumes.c[name], QUERY_RULES.time(name, time))
        return condition

    # --- changing --------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> dict[str, Any]:
        """Create a volume."""
        body = relaxed(request.body, NewVolumeBody, request.minor, 53)
        asked = body.volume
        if asked.multiattach is not None and asked.multiattach not in (False, "false", "False"):
            raise Invalid("multiattach parameter has been removed: use a volume type with multiattach='<is> True'.")
        if asked.consistencygroup_id or asked.group_id:
            raise Invalid("There are no groups of volumes here: leave group_id and consistencygroup_id out.")
        if body.hints:
            raise Invalid("There is one back end, so scheduler hints are not honoured: leave them out.")
        zone = self._core.settings.availability_zone
        if asked.availability_zone not in (None, "", zone):
            raise Invalid(f"Availability zone '{asked.availability_zone}' is invalid: there is only '{zone}'.")

        async def try_once() -> Volume:
            source = await self._sources.find(
                request,
                None if asked.size is None else gibibytes(asked.size),
                image=asked.image_ref or asked.image_id,
                volume_id=uuid(asked.source_volid) if asked.source_volid else None,
                snapshot_id=uuid(asked.snapshot_id) if asked.snapshot_id else None,
                backup_id=uuid(asked.backup_id) if asked.backup_id else None,
            )
            volume = await self.draft(
                request,
                source,
                name=asked.given_name(),
                description=asked.given_description(),
                type_named=asked.volume_type or None,
                metadata=asked.metadata or {},
            )
            await self._core.record_operation(
                self._record, volume, source, self._core.new_id(), request.context.request_id
            )
            return volume

        return {"volume": VolumeView(request).plain(await retry_or_conflict("the source of the volume", try_once))}

    async def draft(
        self,
        request: Request,
        source: Source,
        *,
        name: str | None,
        description: str | None = None,
        type_named: str | None = None,
        metadata: dict[str, str] | None = None,
    ) -> Volume:
        """Return a new volume of the caller's project, which is not written yet; raise NotFound or Forbidden."""
        volume_type = await self._type(request, type_named or source.volume_type_id)
        if volume_type.multiattach:
            request.authorize(rule="volume:multiattach")
        key = await self._key(volume_type, source)
        return Volume(
            id=self._core.new_id(),
            project_id=request.context.project_id,
            user_id=request.context.user_id,
            name=name,
            description=description,
            size=source.size,
            status=CREATING,
            availability_zone=self._core.settings.availability_zone,
            host=self._core.host,
            volume_type_id=volume_type.id,
            snapshot_id=source.snapshot_id,
            source_volid=source.source_volid,
            bootable=source.bootable,
            multiattach=volume_type.multiattach,
            readonly=None,
            image_metadata=source.image_metadata,
            created_at=self._core.now(),
            updated_at=None,
            revision=1,
            type_name=volume_type.name,
            metadata=metadata or {},
            encryption_key_id=None if key is None else key.id,
            sealed_key=None if key is None else key.sealed,
        )

    async def _key(self, volume_type: VolumeType, source: Source) -> SealedKey | None:
        """Return the key of a new volume: a new one, or that of what is copied; raise Invalid if they do not fit."""
        cipher, keys = await load_cipher(self._core, volume_type), self._core.keys
        if source.same_encryption:
            await check_same_encryption(self._core, volume_type, source.volume_type_id, "source")
        if source.is_copy and (source.key is None) != (cipher is None):
            raise Invalid(
                f"Invalid volume_type provided: {volume_type.name}; what is copied is "
                f"{'not ' if source.key is None else ''}encrypted, and so must the new volume be."
            )
        if cipher is None or keys is None:
            return None
        id = self._core.new_id()
        return keys.make(id, cipher.key_bits) if source.key is None else keys.copy(id, source.key)

    def _record(self, conn: sa.Connection, volume: Volume, source: Source, operation_id: str, request_id: str) -> None:
        new = CreateVolume.record(
            conn,
            self._core,
            id=operation_id,
            resource_id=volume.id,
            project_id=volume.project_id,
            request_id=request_id,
            source_id=source.source_id,
            payload=source.payload,
        )
        if not new:
            return
        lock_source(conn, source)
        self.insert(conn, volume)

    def insert(self, conn: sa.Connection, volume: Volume) -> None:
        """Write a new volume and charge it to the quota, in the transaction that records its operation."""
        volume_queries.insert(conn, volume)
        check_type_unchanged(conn, volume.volume_type_id, encrypted=volume.encryption_key_id is not None)
        defaults = self._core.settings.quotas
        quotas.check_size(conn, volume.project_id, volume.size, defaults)
        quotas.charge(conn, volume.project_id, quotas.volume(volume.volume_type_id, volume.size), defaults)

    async def _type(self, request: Request, named: str | None) -> VolumeType:
        project, is_admin = request.context.project_id, request.context.is_admin
        default = self._core.settings.default_volume_type
        if named is None:
            found = await self._core.database.read(type_queries.default_of, project, default)
        else:
            found = await self._core.database.read(type_queries.usable, named, project, is_admin)
        if found is None:
            raise NotFound(f"Volume type {(named or default)[:64]} could not be found.")
        return found

    async def update(self, request: Request, volume_id: str) -> dict[str, Any]:
        """Change name, description and metadata."""
        given: VolumeChanges = request.body.volume
        values = given.changed_names()
        if request.minor >= 53 and not values and isinstance(given.metadata, UnsetType):
            raise Invalid("The body changes nothing: give name, description or metadata.")

        async def try_once() -> Volume:
            volume = await self._core.load_volume(request, volume_id)
            await self._core.database.write(self._change, volume, values, given.metadata, self._core.now())
            return await self._core.load_volume(request, volume_id)

        return {"volume": VolumeView(request).plain(await retry_or_conflict(f"volume {volume_id}", try_once))}

    @staticmethod
    def _change(
        conn: sa.Connection,
        volume: Volume,
        values: ResourceColumns,
        metadata: dict[str, str] | UnsetType,
        now: int,
    ) -> None:
        volume_queries.update(conn, volume, values, now)
        if not isinstance(metadata, UnsetType):
            volume_queries.set_metadata(conn, volume.id, metadata)

    async def delete(self, request: Request, volume_id: str) -> None:
        """Delete a volume and its file; with `cascade` its snapshots before, with `force` in any status."""
        cascade = _flag(request, "cascade")
        force = request.minor >= 23 and _flag(request, "force")
        rule = "volume:force_delete" if force else "volume:delete"
        await self.begin_delete(request, volume_id, rule, cascade=cascade, force=force)

    async def begin_delete(
        self, request: Request, volume_id: str, rule: str | None = None, *, cascade: bool, force: bool
    ) -> None:
        """Check that a volume may be deleted, and record the operation that deletes it."""
        operation_id = self._core.new_id()

        async def try_once() -> None:
            volume = await self._core.load_volume(request, volume_id, rule)
            if not force:
                states.check_volume(volume, "delete")
            await self._core.record_operation(
                self._record_delete, volume, cascade, force, operation_id, request.context.request_id
            )

        await retry_or_conflict(f"volume {volume_id}", try_once)

    def _record_delete(
        self, conn: sa.Connection, volume: Volume, cascade: bool, force: bool, operation_id: str, request_id: str
    ) -> None:
        if volume.attachments:
            raise Invalid(f"Invalid volume: Volume {volume.id} is attached: detach it before deleting it.")
        snapshots = snapshot_queries.of_volume(conn, volume.id)
        if snapshots and not cascade:
            raise Invalid(
                f"Invalid volume: Volume {volume.id} still has {len(snapshots)} dependent snapshots: delete them "
                "first, or ask for cascade."
            )
        if force:
            operation_queries.cancel(conn, volume.id, but=operation_id)
        if operation_queries.get(conn, operation_id) is not None:
            return  # the answer to the first commit was lost
        # Those of the snapshots first: that of the volume waits for them, because they name it as their source.
        for snapshot in snapshots:
            states.check_snapshot(snapshot, "delete")
            self._snapshots.record_delete_operation(conn, snapshot, self._core.new_id(), request_id)
        DeleteVolume.record(
            conn,
            self._core,
            id=operation_id,
            resource_id=volume.id,
            project_id=volume.project_id,
            request_id=request_id,
        )
        volume_queries.update(conn, volume, {"status": states.VOLUME_ACTIONS["delete"].during}, self._core.now())
        for snapshot in sorted(snapshots, key=lambda each: each.id):
            self._snapshots.record_deleting(conn, snapshot)


def _flag(request: Request, name: str) -> bool:
    text = last(request.raw_query, name)
    return text is not None and QUERY_RULES.boolean(name, text)
