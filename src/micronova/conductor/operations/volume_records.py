"""Recording what the volume service has to be told of the volumes of a server; `settle_volumes.py` tells it."""

import uuid
from collections.abc import Iterable
from typing import Final

import sqlalchemy as sa

from micronova.conductor.operations.engine import Operation
from micronova.db import instances
from micronova.db import operations as operation_rows
from micronova.objects.block_device import BlockDevice
from micronova.objects.instance import InstanceRow
from micronova.objects.operations import SETTLE_VOLUMES, ReleasedVolume, SettlePayload

NAMESPACE: Final = uuid.UUID("0b7c52f6-4a77-4c0e-9c3a-1b6d5f4e2a90")
"""Of the ids of these operations, which follow from the operations that they come from."""


def record_settle(
    conn: sa.Connection, operation: Operation, row: InstanceRow, now: int, payload: SettlePayload
) -> tuple[str, ...]:
    """Record the operation that tells the volume service of a change; return its id, if there is something to tell."""
    if not (payload.complete or payload.release or payload.keep or payload.all_attachments or payload.unrecorded):
        return ()
    parts = [
        *payload.complete,
        *payload.keep,
        *payload.unrecorded,
        *(f"{each.volume_id} {each.attachment_id}" for each in payload.release),
    ]
    id = str(uuid.uuid5(NAMESPACE, " ".join((operation.id, str(operation.epoch), *parts))))
    context = operation.context
    operation_rows.follow_up(
        conn, row["uuid"], SETTLE_VOLUMES, id=id, epoch=operation.epoch, now=now, context=context, payload=payload
    )
    return (id,)


def record_release_of_all(conn: sa.Connection, operation: Operation, row: InstanceRow, now: int) -> tuple[str, ...]:
    """Record the operation that gives back all volumes of a server that is removed; return its id, if it has any."""
    devices = instances.devices_of(conn, row["uuid"])
    release = list(released(devices))
    unrecorded = [
        device.uuid
        for device in devices
        if device.is_volume and device.volume_id is None and device.delete_on_termination
    ]
    payload = SettlePayload(release=release, all_attachments=bool(release), unrecorded=unrecorded)
    return record_settle(conn, operation, row, now, payload)


def released(devices: Iterable[BlockDevice]) -> Iterable[ReleasedVolume]:
    """Yield the volumes of a server that is removed; those that go with it are deleted."""
    for device in devices:
        if device.is_volume and device.volume_id:
            yield ReleasedVolume(
                volume_id=device.volume_id,
                attachment_id=device.attachment_id,
                delete=device.delete_on_termination,
            )
