"""Makes work orders from rows: one message has everything that a host needs."""

from collections.abc import Callable
from typing import Final

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.engine import Operation
from micronova.db import instances, nodes, topologies
from micronova.db.secrets import SecretBox, Secrets
from micronova.db.specs import instance_spec, vifs
from micronova.objects import states
from micronova.objects.block_device import BlockDevice, attached_volumes, root_volume
from micronova.objects.clock import seconds
from micronova.objects.errors import OperationFailed
from micronova.objects.image import ImageMeta
from micronova.objects.instance import InstanceRow
from micronova.objects.orders import InstanceSpec, MoveOrder, WorkOrder
from micronova.objects.topology import Assignment
from micronova.objects.topology_request import is_concerned
from micronova.objects.volume import AttachedVolume
from micronova.placement import extra_specs

LARGEST_ORDER: Final = 4 << 20
"""Bytes. What one request or image can bring is far less; the interfaces of a server can bring more."""


def work_order(
    conn: sa.Connection,
    operation: Operation,
    row: InstanceRow,
    *,
    now: int,
    kind: str | None = None,
    secrets: Secrets | None = None,
    download_url: Callable[[str], str | None] | None = None,
    rescue_image: ImageMeta | None = None,
    wait_for_plugs: tuple[str, ...] = (),
    parameters: dict[str, str] | None = None,
    host: str | None = None,
    move: MoveOrder | None = None,
    block_devices: tuple[BlockDevice, ...] | None = None,
    holder: str | None = None,
) -> WorkOrder:
    """Return the order for the server's host, or for another one, at the operation's epoch.

    `kind` is that of the order, if it is not the operation's. `download_url` returns where an image can be downloaded,
    if the host needs the server's image or the rescue image. `holder` holds the server's resources on that host, if the
    server itself does not. Raise OperationFailed if the order is too large.
    """
    host = host or row["host"]
    assert host is not None  # only servers that have a host get orders
    secrets = secrets or Secrets()
    known = instance_spec(row)
    image = rescue_image or known.image

    devices = instances.devices_of(conn, row["uuid"]) if block_devices is None else block_devices
    # The image of a server that boots from a volume is in the volume.
    needs_image = rescue_image is not None or root_volume(devices) is None

    def url(of: ImageMeta | None) -> str | None:
        return None if of is None or download_url is None or not needs_image else download_url(of.id)

    order = WorkOrder(
        operation_id=operation.id,
        kind=kind or operation.kind,
        epoch=operation.epoch,
        host=host,
        instance=_with_assignment(conn, known, host, holder),
        issued_at=seconds(now),
        request_id=operation.context.request_id,
        traceparent=operation.context.traceparent,
        network_info=vifs(row),
        block_devices=tuple(msgspec.structs.replace(device, connection=None) for device in devices),
        volumes=attached_volumes(devices),
        image_url=url(image),
        kernel_url=None if image is None else url(image.kernel),
        ramdisk_url=None if image is None else url(image.ramdisk),
        rescue_image=rescue_image,
        admin_password=secrets.admin_password,
        injected_files=secrets.injected_files,
        wait_for_plugs=wait_for_plugs,
        parameters=parameters or {},
        move=move,
    )
    if (size := size_of(order)) > LARGEST_ORDER:
        raise OperationFailed(
            f"The server has too much data for an order to its host: {size} bytes; at most {LARGEST_ORDER} are "
            "allowed. Remove interfaces, metadata or properties of the image."
        )
    return order


def with_secrets(order: WorkOrder, box: SecretBox) -> WorkOrder:
    """Return an order on its way to the host, with the secrets of its volumes, which rows have sealed."""
    if not any(volume.connection.sealed_secret for volume in order.volumes):
        return order
    return msgspec.structs.replace(order, volumes=tuple(_with_secret(volume, box) for volume in order.volumes))


def _with_secret(volume: AttachedVolume, box: SecretBox) -> AttachedVolume:
    sealed = volume.connection.sealed_secret
    if sealed is None:
        return volume
    connection = msgspec.structs.replace(volume.connection, sealed_secret=None)
    secret = box.open_text(sealed, volume.volume_id)
    return msgspec.structs.replace(volume, connection=connection, secret=secret)


def _with_assignment(conn: sa.Connection, instance: InstanceSpec, host: str, holder: str | None) -> InstanceSpec:
    """Return the instance with the CPUs and devices that are claimed for it on the host.

    Raise OperationFailed if they are of another host: there they may be another guest's.
    """
    of_tree = extra_specs.resource_request(instance.flavor, instance.image) is not None
    if not of_tree and not is_concerned(instance.flavor, instance.image):
        return instance
    consumer = holder or instance.uuid
    found = topologies.assignments_of(conn, [consumer]).get(consumer)
    if found is None:
        return instance
    node, assignment = found
    if (claimed := nodes.host_of(conn, node)) not in (host, None):
        raise OperationFailed(
            "The server's CPUs and devices are claimed on another host than the one that has to use them.",
            details=f"They are claimed on host {claimed}, and not on host {host}.",
        )
    own = msgspec.structs.replace(assignment, ports=())  # other providers than the host serve them
    return instance if own == Assignment() else msgspec.structs.replace(instance, assignment=own)


def size_of(order: WorkOrder) -> int:
    """Return how many bytes of a message an order takes."""
    return len(msgspec.msgpack.encode(order))


def switch_off_order(conn: sa.Connection, operation: Operation, row: InstanceRow, *, now: int) -> WorkOrder:
    """Return the order to switch off a guest whose volumes are taken from its host.

    A guest that does not run cannot shut itself down: it is switched off as that of a soft delete.
    """
    kind = "stop" if row["vm_state"] == states.ACTIVE else "soft_delete"
    return work_order(conn, operation, row, now=now, kind=kind)


def minimal_order(
    operation: Operation,
    row: InstanceRow,
    *,
    now: int,
    kind: str | None = None,
    host: str | None = None,
    move: MoveOrder | None = None,
) -> WorkOrder:
    """Return an order without anything that a user can enlarge, so that every server can be deleted or switched off.

    It is for the server's host, unless another one is named.
    """
    host = host or row["host"]
    assert host is not None
    known = instance_spec(row)
    return WorkOrder(
        operation_id=operation.id,
        kind=kind or operation.kind,
        epoch=operation.epoch,
        host=host,
        instance=InstanceSpec(
            uuid=known.uuid,
            project_id=known.project_id,
            user_id=known.user_id,
            name=known.name,
            hostname=known.hostname,
            flavor=known.flavor,
            node=known.node,
        ),
        issued_at=seconds(now),
        request_id=operation.context.request_id,
        traceparent=operation.context.traceparent,
        move=move,
    )
