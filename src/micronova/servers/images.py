"""Images of servers: snapshots, backups, and those of servers that are shelved.

The operation is recorded before its image is created, with the image's id, so that a conductor deletes the image of a
request that ended early. Conductors leave the operation alone until the image service has answered or
IMAGE_CREATION_TIME is over.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Mapping
from typing import Any, Final

import msgspec
import sqlalchemy as sa

from micronova.clients.image.client import ATTRIBUTES, ImageClient
from micronova.db import instances, quotas
from micronova.db import operations as operation_rows
from micronova.objects import shelved, states
from micronova.objects.block_device import root_volume
from micronova.objects.clock import micros
from micronova.objects.context import RequestContext
from micronova.objects.errors import Conflict, Invalid, MicronovaError, NotSupported, QuotaExceeded, Unavailable
from micronova.objects.ids import new_uuid
from micronova.objects.image import BACKUP, CANNOT_UPLOAD, MAPPING, SNAPSHOT
from micronova.objects.instance import InstanceRow, fault_of
from micronova.objects.operations import IMAGE_CREATION_TIME, ImagePayload, Step
from micronova.servers.actions import ServerActions, check_state
from micronova.servers.dependencies import RequestDependencies
from micronova.servers.image_devices import NEW_FORM, mapping_of
from micronova.servers.quiescing import Quiescing
from micronova.servers.waiting import wait_for_operation

ANSWER_TIME: Final = IMAGE_CREATION_TIME / 2
"""Seconds that the API waits for the image service. Less than IMAGE_CREATION_TIME, so that no image appears after
conductors may take the operation."""
_NOT_INHERITED: Final = frozenset(
    {
        MAPPING,
        NEW_FORM,
        "mappings",
        "cinder_encryption_key_id",
        "cinder_encryption_key_deletion_policy",
        "img_signature",
        "img_signature_hash_method",
        "img_signature_key_type",
        "img_signature_certificate_uuid",
    }
)
_RESERVED: Final = "os_glance"
LONGEST_NAME: Final = 255


class ServerImages:
    """Accepts requests for images of servers."""

    def __init__(
        self,
        dependencies: RequestDependencies,
        actions: ServerActions,
        quiescing: Quiescing,
        *,
        non_inheritable: tuple[str, ...],
    ) -> None:
        self._dependencies = dependencies
        self._database = dependencies.database
        self._clock = dependencies.clock
        self._random = dependencies.random
        self._actions = actions
        self._quiescing = quiescing
        self._conductor = dependencies.conductor
        self._image_client = dependencies.image_client
        self._quota_defaults = dependencies.quota_defaults
        self._not_inherited = _NOT_INHERITED.union(non_inheritable)

    async def check_metadata_quota(self, context: RequestContext, metadata: Mapping[str, str]) -> None:
        """Raise QuotaExceeded if an image may not have this many items of metadata."""
        limits = await self._database.read(quotas.limits_for, context.project_id, self._quota_defaults)
        if quotas.exceeds(limits, "metadata_items", len(metadata)):
            raise QuotaExceeded(f"Image metadata limit exceeded: at most {limits['metadata_items']} items.")

    async def is_volume_backed(self, row: InstanceRow) -> bool:
        """Return whether the root disk of a server is a volume."""
        found = await self._database.read(instances.volumes, [row["uuid"]])
        return root_volume(found.get(row["uuid"], ())) is not None

    async def snapshot(self, context: RequestContext, row: InstanceRow, name: str, metadata: Mapping[str, str]) -> str:
        """Accept a request for an image of a server; return the image's id."""
        document = self._document(context, row, name, SNAPSHOT, metadata)
        return await self._create(context, row, "create_image", document, ImagePayload())

    async def backup(
        self,
        context: RequestContext,
        row: InstanceRow,
        name: str,
        metadata: Mapping[str, str],
        *,
        backup_type: str,
        rotation: int,
    ) -> str:
        """Accept a request for a backup of a server, of which the newest are kept; return the image's id."""
        document = self._document(context, row, name, BACKUP, {**metadata, "backup_type": backup_type})
        check_state(states.ACTIONS["create_backup"], row)
        # Only those of the project that makes this one: anybody can give an image the properties of a backup, and it
        # must not push out others. No backup is made of the server meanwhile, so the list holds until the end.
        older = await self._client().backups(row["uuid"], backup_type, owner=context.project_id, token=context.token)
        payload = ImagePayload(excess=list(older[max(0, rotation - 1) :])[::-1], kept=rotation > 0)
        return await self._create(context, row, "create_backup", document, payload)

    async def of_volumes(
        self, context: RequestContext, row: InstanceRow, name: str, metadata: Mapping[str, str]
    ) -> str:
        """Make snapshots of the volumes of a server, and an image that names them; return the image's id.

        The API does that, with the token of its user. A conductor deletes what there is, if it does not come to an end.
        """
        # No host takes part: whether its driver can copy disks does not matter.
        action = dataclasses.replace(states.ACTIONS["create_image"], capability=None)
        check_state(action, row)
        self._quiescing.check(row)
        image_client, client = self._client(), self._dependencies.require_volume_client()
        document = self._document(context, row, name, SNAPSHOT, metadata)
        for key in ("image_type", "instance_uuid", "user_id"):  # Nova has them in images of local disks alone
            if key not in metadata:
                del document[key]
        document["min_disk"] = 0 if row["image"] is None else row["image"]["min_disk"]  # not that of the flavor's disk
        found = await self._database.read(instances.devices_of, row["uuid"])
        volumes = [device.volume_id for device in found if device.is_volume and device.volume_id]
        left = await client.snapshots_left(context.token)
        if left is not None and left < len(volumes):
            raise QuotaExceeded("Quota exceeded for resources: snapshots")
        id, payload = new_uuid(self._random), ImagePayload(volumes=volumes)
        operations = await self._record(context, row, "create_volume_image", action, id, payload)

        async def make() -> None:
            mapping, snapshots = [], []
            async with self._quiescing.quiesced(context, row) as quiesced:
                for device in found:
                    snapshot = None
                    if device.is_volume and device.volume_id:
                        title = f"snapshot for {name}"[:LONGEST_NAME]
                        snapshot = await client.create_snapshot(device.volume_id, title, context.token, image_id=id)
                        snapshots.append(snapshot)
                    mapping.append(mapping_of(device, snapshot))
                if quiesced:
                    await self._quiescing.wait_for_snapshots(row, client, snapshots, context.token)
            own = {MAPPING: msgspec.json.encode(mapping).decode(), NEW_FORM: "True"}
            if row["root_device_name"]:
                own["root_device_name"] = row["root_device_name"]
            await image_client.create_without_data(
                {**document, **own, "id": id}, context.token, share_with=_shared_with(context, row)
            )

        await self._answered(context, row, id, operations, payload, make())
        overtaken = await self._database.write(_start, id, payload, "done")
        await self._conductor.run_operations(context.for_bus(), operations)
        late = f"The image of instance {row['uuid']} is still being made: look at it later."
        ended = None if overtaken else await wait_for_operation(self._database, self._clock, id, late)
        if overtaken or (ended is not None and ended["result"] != "success"):
            raise _overtaken(action, row)
        return id

    async def of_shelved(self, context: RequestContext, row: InstanceRow) -> None:
        """Accept a request for the image of a server that is shelved: `ServerShelving.shelve`."""
        document = self._document(context, row, f"{row['display_name']}-shelved"[:LONGEST_NAME], SNAPSHOT, {})
        await self._create(context, row, "shelve", document, ImagePayload())

    async def _create(
        self, context: RequestContext, row: InstanceRow, kind: str, document: dict[str, Any], payload: ImagePayload
    ) -> str:
        client, action = self._client(), states.ACTIONS[kind]
        check_state(action, row)
        if not client.takes_uploads:
            raise NotSupported(CANNOT_UPLOAD)
        id = new_uuid(self._random)
        operations = await self._record(context, row, kind, action, id, payload)
        created = client.create({**document, "id": id}, context.token, share_with=_shared_with(context, row))
        await self._answered(context, row, id, operations, payload, created)
        overtaken = await self._database.write(_start, id, payload, "new")
        await self._conductor.run_operations(context.for_bus(), operations)
        if overtaken:
            raise _overtaken(action, row)
        return id

    async def _record(
        self,
        context: RequestContext,
        row: InstanceRow,
        kind: str,
        action: states.Action,
        id: str,
        payload: ImagePayload,
    ) -> tuple[str, ...]:
        """Record an operation with this id, which conductors leave alone for IMAGE_CREATION_TIME."""
        return await self._database.write(
            self._actions.check_and_record,
            context,
            row["uuid"],
            kind,
            action,
            payload,
            operation_id=id,
            deferred_for=IMAGE_CREATION_TIME,
        )

    async def _answered(
        self,
        context: RequestContext,
        row: InstanceRow,
        id: str,
        operations: tuple[str, ...],
        payload: ImagePayload,
        created: Awaitable[None],
    ) -> None:
        """Wait until an image is created; if that fails, let a conductor delete what there is, and raise the error."""
        try:
            async with asyncio.timeout(ANSWER_TIME):
                await created
        except (MicronovaError, TimeoutError) as error:
            reason = error if isinstance(error, MicronovaError) else Unavailable("The image service does not answer.")
            await self._database.write(self._record_failure, row["uuid"], id, payload, reason)
            await self._conductor.run_operations(context.for_bus(), operations)
            raise reason from None
        payload.answered = True

    def _record_failure(
        self, conn: sa.Connection, uuid: str, id: str, payload: ImagePayload, error: MicronovaError
    ) -> None:
        """Give the server its state back; a conductor deletes the image, which may exist, and ends the operation."""
        row = instances.lock(conn, uuid)
        found = operation_rows.get(conn, id, lock=True)
        now = micros(self._clock.now())
        fault = fault_of(error.message, now)
        answered = not isinstance(error, Unavailable)
        payload = msgspec.structs.replace(payload, error=fault["message"], answered=answered)
        if not operation_rows.start_deferred(conn, id, "cleanup", payload) or row is None or found is None:
            return
        instances.update(conn, uuid, now, {"task_state": None, "fault": fault}, epoch=found["epoch"])

    def _client(self) -> ImageClient:
        if self._image_client is None:
            raise NotSupported("There is no image service.")
        return self._image_client

    def _document(
        self, context: RequestContext, row: InstanceRow, name: str, image_type: str, metadata: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the image that is created: what it inherits of the server's image, and what is asked for."""
        attributes = sorted(ATTRIBUTES & metadata.keys())
        if attributes:
            raise Invalid(f"Metadata must not have the names of an image's attributes: {', '.join(attributes)}.")
        image = row["image"]
        known: dict[str, Any] = {} if image is None else image["properties"]
        inherited = {
            key: str(value)
            for key, value in known.items()
            if value is not None and key not in self._not_inherited and not key.startswith(_RESERVED)
        }
        if row["image_ref"]:
            inherited.setdefault("base_image_ref", row["image_ref"])
        document = {
            **shelved.without(row["system_metadata"]),
            **inherited,
            "instance_uuid": row["uuid"],
            "user_id": context.user_id,
            "image_type": image_type,
            **metadata,
            "name": name,
            # The project of the server, if it is another one, becomes a member of the image.
            "visibility": "private" if context.project_id == row["project_id"] else "shared",
            "min_ram": 0 if image is None else image["min_ram"],
            "min_disk": max(0 if image is None else image["min_disk"], row["flavor"]["disk"]),
        }
        if image_type == BACKUP and image is not None:  # the format of a snapshot is known when it is uploaded
            document |= {"disk_format": image["disk_format"], "container_format": image["container_format"]}
        return document


def _shared_with(context: RequestContext, row: InstanceRow) -> str | None:
    """Return the project that gets the image of its server, if another one makes it."""
    return row["project_id"] if row["project_id"] != context.project_id else None


def _overtaken(action: states.Action, row: InstanceRow) -> Conflict:
    return Conflict(f"Cannot '{action.shown_name}' instance {row['uuid']}: another request has changed it meanwhile.")


def _start(conn: sa.Connection, id: str, payload: ImagePayload, step: Step) -> bool:
    """Let conductors take the operation at this step; return whether a later request has ended it, or will."""
    if operation_rows.start_deferred(conn, id, step, payload) and not operation_rows.is_overtaken(conn, id):
        return False
    found = operation_rows.get(conn, id)
    if found is None or found["result"] == "cancelled":
        return True
    row = instances.get(conn, found["instance_uuid"])
    return found["finished_at"] is None and (row is None or row["epoch"] != found["epoch"])
