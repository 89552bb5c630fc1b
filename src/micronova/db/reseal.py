"""Seals stored secrets anew, when the key of secrets is changed: those of waiting operations, and of volumes.

Each function seals the next ones after an id.
"""

from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.db import instances
from micronova.db.allocations import lock_instances
from micronova.db.secrets import SecretBox
from micronova.db.tables import block_devices, operations
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import MicronovaError
from micronova.objects.resealed import Resealed
from micronova.objects.volume import SEALED

TOGETHER = 100
"""Secrets that are sealed anew in one transaction."""

_o, _d = operations.c, block_devices.c


def of_operations(conn: sa.Connection, box: SecretBox, after: str) -> Resealed:
    """Seal the secrets of operations."""
    # An operation that ends forgets its secrets: those that have ended, which are many more, are not read.
    sealed = sa.select(_o.id, _o.secrets).where(_o.finished_at.is_(None), _o.secrets.is_not(None), _o.id > after)
    rows = conn.execute(sealed.order_by(_o.id).limit(TOGETHER).with_for_update()).all()
    changed, lost = 0, []
    for row in rows:
        try:
            fresh = box.reseal(row.secrets, row.id)
        except (MicronovaError, ValueError):  # of another key, or damaged
            lost.append(f"operation {row.id}")
            continue
        if fresh is not None:
            conn.execute(operations.update().where(_o.id == row.id).values(secrets=fresh))
            changed += 1
    return Resealed(rows[-1].id if rows else "", len(rows), changed, lost)


def of_devices(conn: sa.Connection, box: SecretBox, after: str) -> Resealed:
    """Seal the secrets of volumes with which servers are connected."""
    secret: Any = _d.device["connection", SEALED].as_string()
    wanted = sa.select(_d.uuid, _d.instance_uuid).where(_d.uuid > after, secret.is_not(None))
    found = conn.execute(wanted.order_by(_d.uuid).limit(TOGETHER)).all()
    changed, lost = 0, []
    for server in lock_instances(conn, {row.instance_uuid for row in found}):
        for device in instances.volumes_of(conn, server):
            try:
                changed += _seal_anew(conn, box, device)
            except (MicronovaError, ValueError):
                lost.append(f"volume {device.volume_id} of server {server}")
    return Resealed(found[-1].uuid if found else "", len(found), changed, lost)


def _seal_anew(conn: sa.Connection, box: SecretBox, device: BlockDevice) -> bool:
    connection = device.connection
    if connection is None or connection.sealed_secret is None or device.volume_id is None:
        return False
    fresh = box.reseal(connection.sealed_secret, device.volume_id)
    if fresh is None:
        return False
    connection = msgspec.structs.replace(connection, sealed_secret=fresh)
    instances.change_device(conn, msgspec.structs.replace(device, connection=connection))
    return True
