"""From rows to work orders: everything that a host needs to know, in one message."""

from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations import Operation
from micronova.conductor.secrets import Secrets
from micronova.db import instances
from micronova.db.specs import instance_spec, vifs
from micronova.objects.block_device import BlockDevice
from micronova.objects.orders import WorkOrder


def work_order(
    conn: sa.Connection,
    operation: Operation,
    row: Any,
    *,
    kind: str,
    now: int,
    secrets: Secrets | None = None,
    image_ticket: str | None = None,
    wait_for_plugs: tuple[str, ...] = (),
    parameters: dict[str, str] | None = None,
) -> WorkOrder:
    """Return the order for the server's host; the operation's epoch is the one that the host works at."""
    devices = instances.devices(conn, [row["uuid"]]).get(row["uuid"], ())
    secrets = secrets or Secrets()
    return WorkOrder(
        operation_id=operation.id,
        kind=kind,
        epoch=operation.epoch,
        host=row["host"],
        instance=instance_spec(row, operation.epoch),
        deadline=operation.deadline / 1e6,
        attempt=operation.attempts,
        issued_at=now / 1e6,
        request_id=operation.context.request_id,
        traceparent=operation.context.traceparent,
        network_info=vifs(row),
        block_devices=tuple(msgspec.convert(device, BlockDevice) for device in devices),
        image_ticket=image_ticket,
        admin_password=secrets.admin_password,
        injected_files=secrets.injected_files,
        wait_for_plugs=wait_for_plugs,
        parameters=parameters or {},
    )
