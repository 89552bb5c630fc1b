"""Makes work orders from rows: one message has everything that a host needs."""

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.engine import Operation
from micronova.db import instances
from micronova.db.secrets import Secrets
from micronova.db.specs import instance_spec, vifs
from micronova.objects.block_device import BlockDevice
from micronova.objects.instance import InstanceRow
from micronova.objects.orders import WorkOrder


def work_order(
    conn: sa.Connection,
    operation: Operation,
    row: InstanceRow,
    *,
    kind: str,
    now: int,
    secrets: Secrets | None = None,
    image_ticket: str | None = None,
    wait_for_plugs: tuple[str, ...] = (),
    parameters: dict[str, str] | None = None,
) -> WorkOrder:
    """Return the order for the server's host, at the operation's epoch."""
    assert row["host"] is not None  # only servers that have a host get orders
    devices = instances.devices(conn, [row["uuid"]]).get(row["uuid"], ())
    secrets = secrets or Secrets()
    return WorkOrder(
        operation_id=operation.id,
        kind=kind,
        epoch=operation.epoch,
        host=row["host"],
        instance=instance_spec(row),
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
