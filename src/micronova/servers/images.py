"""Images of servers: snapshots, backups, and those of servers that are shelved.

The operation is recorded before its image is created, with the image's id, so that a conductor deletes the image of a
request that ended early. Conductors leave the operation alone until the image service has answered or
IMAGE_CREATION_TIME is over.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import sqlalchemy as sa

from micronova.clients.image.client import ATTRIBUTES, ImageClient
from micronova.db import instances, quotas
from micronova.db import operations as operation_rows
from micronova.objects import shelved, states
from micronova.objects.clock import micros
from micronova.objects.context import RequestContext
from micronova.objects.errors import Conflict, Invalid, MicronovaError, NotSupported, QuotaExceeded, Unavailable
from micronova.objects.ids import new_uuid
from micronova.objects.image import BACKUP, CANNOT_UPLOAD, SNAPSHOT
from micronova.objects.instance import InstanceRow, fault_of
from micronova.objects.operations import IMAGE_CREATION_TIME, ImagePayload
from micronova.servers.actions import ServerActions, check_state
from micronova.servers.dependencies import RequestDependencies

ANSWER_TIME: Final = IMAGE_CREATION_TIME / 2
"""Seconds that the API waits for the image service. Less than IMAGE_CREATION_TIME, so that no image appears after
conductors may take the operation."""
_NOT_INHERITED: Final = frozenset(
    {
        "block_device_mapping",
        "bdm_v2",
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
        self, dependencies: RequestDependencies, actions: ServerActions, *, non_inheritable: tuple[str, ...]
    ) -> None:
        self._database = dependencies.database
        self._clock = dependencies.clock
        self._random = dependencies.random
        self._actions = actions
        self._conductor = dependencies.conductor
        self._image_client = dependencies.image_client
        self._quota_defaults = dependencies.quota_defaults
        self._not_inherited = _NOT_INHERITED.union(non_inheritable)

    async def check_metadata_quota(self, context: RequestContext, metadata: Mapping[str, str]) -> None:
        """Raise QuotaExceeded if an image may not have so many items of metadata."""
        limits = await self._database.read(quotas.limits_for, context.project_id, self._quota_defaults)
        most = limits["metadata_items"]
        if 0 <= most < len(metadata):
            raise QuotaExceeded(f"Image metadata limit exceeded: at most {most} items.")

    async def is_volume_backed(self, row: InstanceRow) -> bool:
        """Return whether the root disk of a server is a volume."""
        found = await self._database.read(instances.devices, [row["uuid"]])
        return any(
            device.boot_index == 0 and device.destination_type == "volume" for device in found.get(row["uuid"], ())
        )

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
        operations = await self._database.write(
            self._actions.check_and_record,
            context,
            row["uuid"],
            kind,
            action,
            payload,
            operation_id=id,
            deferred_for=IMAGE_CREATION_TIME,
        )
        owner = row["project_id"]
        try:
            async with asyncio.timeout(ANSWER_TIME):
                await client.create(
                    {**document, "id": id}, context.token, share_with=owner if owner != context.project_id else None
                )
        except (MicronovaError, TimeoutError) as error:
            reason = error if isinstance(error, MicronovaError) else Unavailable("The image service does not answer.")
            await self._database.write(self._record_failure, row["uuid"], id, payload, reason)
            await self._conductor.run_operations(context.for_bus(), operations)
            raise reason from None
        payload.answered = True
        overtaken = await self._database.write(_start, id, payload)
        await self._conductor.run_operations(context.for_bus(), operations)
        if overtaken:
            raise Conflict(
                f"Cannot '{action.shown_name}' instance {row['uuid']}: another request has changed it meanwhile."
            )
        return id

    def _record_failure(
        self, conn: sa.Connection, uuid: str, id: str, payload: ImagePayload, error: MicronovaError
    ) -> None:
        """Give the server its state back; a conductor deletes the image, which may exist, and ends the operation."""
        row = instances.lock(conn, uuid)
        found = operation_rows.get(conn, id, lock=True)
        now = micros(self._clock.now())
        fault = fault_of(error.message, now)
        payload.error = fault["message"]
        payload.answered = not isinstance(error, Unavailable)
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


def _start(conn: sa.Connection, id: str, payload: ImagePayload) -> bool:
    """Let conductors take the operation; return whether a later request has ended it, or will."""
    if operation_rows.start_deferred(conn, id, "new", payload) and operation_rows.has_current_epoch(conn, id):
        return False
    found = operation_rows.get(conn, id)
    if found is None or found["result"] == "cancelled":
        return True
    row = instances.get(conn, found["instance_uuid"])
    return found["finished_at"] is None and (row is None or row["epoch"] != found["epoch"])
