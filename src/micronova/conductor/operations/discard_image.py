"""Deleting the image of a server that is deleted or shelved no more."""

import uuid

import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.follow_up_kind import FollowUpKind
from micronova.conductor.operations.made_images import MadeImages
from micronova.db import operations as operation_rows
from micronova.objects import shelved
from micronova.objects.instance import InstanceChanges, InstanceRow
from micronova.objects.operations import DISCARD_IMAGE, DiscardPayload

NAMESPACE = uuid.UUID("5d4b9a0c-0f3e-4d0f-8f43-2f0d3c6f8e17")
"""Of the ids of these operations, which follow from their images: one is recorded once."""


class DiscardImage(FollowUpKind):
    """Deletes the image."""

    name = DISCARD_IMAGE
    action_event = "conductor_discard_image"

    def __init__(self, dependencies: ConductorDependencies) -> None:
        super().__init__(dependencies)
        self._images = MadeImages(dependencies.image_client)

    async def run(self, operations: list[Operation]) -> None:
        """Delete the images."""
        for operation in operations:
            payload = operation.payload_as(DiscardPayload)
            await self._images.delete(payload.image_id)
            self._engine.committed(self.name, "deleted")
            await self.end(operation)


def discard_operation_ids(row: InstanceRow) -> tuple[str, ...]:
    """Return the id of the operation that `record_discard` records for a server, if it has an image."""
    image = shelved.image_of(row)
    return () if image is None else (str(uuid.uuid5(NAMESPACE, image)),)


def record_discard(conn: sa.Connection, operation: Operation, row: InstanceRow, now: int) -> InstanceChanges:
    """Record the operation that deletes the image of an earlier shelve, if there is one; return the server's changes.

    The server, whose row is locked, has a guest of its own or is deleted, so that nothing needs the image any more.
    """
    image = shelved.image_of(row)
    if image is None:
        return {}
    operation_rows.follow_up(
        conn,
        row["uuid"],
        DISCARD_IMAGE,
        id=discard_operation_ids(row)[0],
        epoch=operation.epoch,
        now=now,
        context=operation.context,
        payload=DiscardPayload(image_id=image),
    )
    return {"system_metadata": shelved.without(row["system_metadata"])}
