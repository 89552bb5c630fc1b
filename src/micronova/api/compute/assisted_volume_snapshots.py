"""Snapshots of attached volumes that a host makes for a volume service (`volume_snapshot_create` of Nova's drivers).

Only a service whose volumes are files on a shared file system asks for them. Hosts here do not have such volumes. As in
Nova, a request that is in order is accepted, and what the host could not do is the status of the snapshot at the volume
service: `error`, or `error_deleting`.
"""

import logging
from typing import Annotated, Any, Literal

import msgspec
import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.api.inputs import Body, Query
from micronova.clients.volume.client import VolumeClient
from micronova.db import instances
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects import states
from micronova.objects.errors import Invalid, MicronovaError
from micronova.objects.instance import InstanceRow

log = logging.getLogger(__name__)

Text = Annotated[str, Meta(min_length=1)]


class CreateInfo(Body):
    """What the host needs to know."""

    snapshot_id: Text
    type: Literal["qcow2"]
    new_file: Text
    id: Text | UnsetType = UNSET


class NewSnapshot(Body):
    """The snapshot to make."""

    volume_id: Text
    create_info: CreateInfo


class Create(Body):
    """The body of a create."""

    snapshot: NewSnapshot


class DeleteQuery(Query):
    """What the host needs to know, as JSON."""

    delete_info: str | UnsetType = UNSET


class AssistedSnapshots:
    """The handlers."""

    def __init__(self, database: Database, client: VolumeClient | None) -> None:
        self._database = database
        self._client = client

    async def create(self, request: Request) -> dict[str, Any]:
        """Accept a request to make a snapshot."""
        asked: NewSnapshot = request.body.snapshot
        await self._database.read(_server_with, asked.volume_id)
        await self._failed(asked.create_info.snapshot_id, "error")
        id = asked.create_info.id
        return {"snapshot": {"id": None if isinstance(id, UnsetType) else id, "volumeId": asked.volume_id}}

    async def delete(self, request: Request, id: str) -> None:
        """Accept a request to delete a snapshot."""
        given = request.query.delete_info
        try:
            info: Any = None if isinstance(given, UnsetType) else msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError):
            info = None
        volume = info.get("volume_id") if isinstance(info, dict) else None
        if not isinstance(volume, str):
            raise Invalid("Invalid input for query parameter delete_info: it must be a JSON object with a volume_id.")
        row = await self._database.read(_server_with, volume)
        if info.get("merge_target_file") is not None and row["vm_state"] != states.ACTIVE:
            raise _wrong_state("volume_snapshot_delete", row, "vm_state", row["vm_state"])
        await self._failed(id, "error_deleting")

    async def _failed(self, snapshot: str, status: str) -> None:
        """Tell the volume service that no host can do it; if it does not wait for that, it need not know."""
        if self._client is None:
            return
        try:
            await self._client.update_snapshot_status(snapshot, status)
        except MicronovaError as error:
            log.warning(
                "the volume service was not told that snapshot %s ends with status %s: %s", snapshot[:64], status, error
            )


def _server_with(conn: sa.Connection, volume: str) -> InstanceRow:
    """Return the server that has a volume; raise Invalid if a host could make no snapshot of it."""
    found = instances.with_volume(conn, volume)
    if not found:
        raise Invalid(f"No volume Block Device Mapping with id {volume[:64]}.")
    if len(found) > 1:
        raise Invalid(f"Volume {volume[:64]} has several servers, which is not valid for this operation.")
    row = instances.get_existing(conn, found[0])
    if row["host"] is None:
        raise Invalid(f"Instance {row['uuid']} is not ready: it has no host.")
    if row["task_state"] is not None:
        raise _wrong_state("volume_snapshot", row, "task_state", row["task_state"])
    return row


def _wrong_state(method: str, row: InstanceRow, kind: str, state: str) -> Invalid:
    return Invalid(f"Cannot '{method}' instance {row['uuid']} while it is in {kind} {state}")


def routes(database: Database, client: VolumeClient | None) -> list[Route]:
    """Declare the routes."""
    handlers = AssistedSnapshots(database, client)
    path, rule = "/os-assisted-volume-snapshots", "os_compute_api:os-assisted-volume-snapshots"
    return [
        Route(
            method="POST",
            path=path,
            handler=handlers.create,
            policy=f"{rule}:create",
            body=Create,
            answer={"snapshot": {"id": str | None, "volumeId": str}},
        ),
        Route(
            method="DELETE",
            path=f"{path}/{{id}}",
            handler=handlers.delete,
            policy=f"{rule}:delete",
            query=DeleteQuery,
            strict_query=since(75),
            status=204,
        ),
    ]
