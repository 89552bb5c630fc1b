"""Instances: insert, read, compare-and-set, and the move to the deleted ones.

A change of state names the epoch that it belongs to; if the instance is at another epoch, it matches no row and returns
False. Statements of the hot paths are made once, at import.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypedDict, cast

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db import instance_changes, services
from micronova.db.listed import one_of
from micronova.db.prepared import Prepared
from micronova.db.tables import (
    block_devices,
    console_tokens,
    deleted_instances,
    instances,
    request_specs,
    server_passwords,
)
from micronova.objects import power_state, shelved, states
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import InstanceNotFound
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.instance import InstanceChanges, InstanceRow, InstanceWithService, VIFData
from micronova.objects.scheduling import GROUP_HINT, RequestSpec


class SpecRow(TypedDict):
    """A row of `request_specs`."""

    instance_uuid: str
    spec: bytes  # RequestSpec in MessagePack
    networks: Any  # PlannedPorts as plain data


class DeviceRow(TypedDict):
    """A row of `block_devices`."""

    uuid: str
    instance_uuid: str
    device: dict[str, Any]  # BlockDevice as plain data
    volume_id: str | None


class StatesRow(Protocol):
    """Host, epoch and states of an instance, as a cursor returns them."""

    uuid: str
    host: str | None
    epoch: int
    vm_state: str
    task_state: str | None
    power_state: int


class InterfacesRow(TypedDict):
    """The interfaces of an instance, and what says whether they may be changed."""

    uuid: str
    vm_state: str
    network_info: list[VIFData]
    security_groups: list[str]
    updated_at: int


_INSERT = Prepared(instances.insert())
_INSERT_SPECS = Prepared(request_specs.insert())
_INSERT_DEVICES = Prepared(block_devices.insert())
_GET_WITH_VOLUME = Prepared(
    sa.select(block_devices.c.instance_uuid).where(block_devices.c.volume_id == bindparam("volume_id"))
)
_INSERT_DELETED = Prepared(deleted_instances.insert())
_BY_UUID = sa.select(instances).where(instances.c.uuid == bindparam("uuid"))
_GET = Prepared(_BY_UUID)
_LOCK = Prepared(_BY_UUID.with_for_update())
_GET_OF_PROJECT = Prepared(_BY_UUID.where(instances.c.project_id == bindparam("project_id")))
_WITH_SERVICE = (
    sa.select(instances, *services.STATE_OF_HOST)
    .select_from(services.with_services(instances))
    .where(instances.c.uuid == bindparam("uuid"))
)
_GET_WITH_SERVICE = Prepared(_WITH_SERVICE)
_GET_OF_PROJECT_WITH_SERVICE = Prepared(_WITH_SERVICE.where(instances.c.project_id == bindparam("project_id")))
_GET_DELETED = sa.select(deleted_instances).where(deleted_instances.c.uuid == bindparam("uuid"))
_DELETED_BEFORE = sa.select(deleted_instances.c.uuid, deleted_instances.c.epoch).where(
    one_of(deleted_instances.c.uuid, "uuids"), deleted_instances.c.deleted_at < bindparam("before")
)
_AT_REST_AFTER = (
    sa.select(*(instances.c[name] for name in InterfacesRow.__annotations__))
    .where(instances.c.uuid > bindparam("after"), instances.c.task_state.is_(None), instances.c.host.is_not(None))
    .order_by(instances.c.uuid)
    .limit(bindparam("most"))
)
_GET_MANY_DELETED = sa.select(deleted_instances).where(one_of(deleted_instances.c.uuid, "uuids"))
_GET_MANY = Prepared(sa.select(instances).where(one_of(instances.c.uuid, "uuids")))
_LOCK_MANY = (
    sa.select(instances.c.uuid).where(one_of(instances.c.uuid, "uuids")).order_by(instances.c.uuid).with_for_update()
)
_STATES = (
    sa.select(
        instances.c.uuid,
        instances.c.host,
        instances.c.epoch,
        instances.c.vm_state,
        instances.c.task_state,
        instances.c.power_state,
    )
    .where(one_of(instances.c.uuid, "uuids"))
    .order_by(instances.c.uuid)
)
# The state is a literal, so that the database uses the index of rescued servers.
_RESCUED_BEFORE = (
    sa.select(instances.c.uuid)
    .where(sa.text("instances.vm_state = 'rescued'"), instances.c.launched_at < bindparam("before"))
    .where(instances.c.task_state.is_(None))
    .order_by(instances.c.launched_at)
    .limit(bindparam("most"))
)
_SHELVED_BEFORE = (
    sa.select(instances.c.uuid)
    .where(
        sa.text("instances.vm_state = 'shelved'"),
        instances.c.task_state.is_(None),
        instances.c.system_metadata[shelved.SHELVED_AT].as_string() < bindparam("before"),
        instances.c.uuid > bindparam("after"),
    )
    .order_by(instances.c.uuid)
    .limit(bindparam("most"))
)
_SOFT_DELETED_BEFORE = (
    sa.select(instances.c.uuid)
    .where(
        instances.c.deleted_at < bindparam("before"),
        sa.or_(
            sa.and_(instances.c.vm_state == states.SOFT_DELETED, instances.c.task_state.is_(None)),
            instances.c.task_state == states.SOFT_DELETING,
        ),
    )
    .order_by(instances.c.deleted_at)
    .limit(bindparam("most"))
)
_SPECS = Prepared(sa.select(request_specs).where(one_of(request_specs.c.instance_uuid, "uuids")))
_DEVICES = Prepared(
    sa.select(block_devices.c.instance_uuid, block_devices.c.device).where(
        one_of(block_devices.c.instance_uuid, "uuids")
    )
)
_VOLUMES = Prepared(
    sa.select(block_devices.c.instance_uuid, block_devices.c.device).where(
        one_of(block_devices.c.instance_uuid, "uuids"), block_devices.c.volume_id.is_not(None)
    )
)
_DELETE = Prepared(instances.delete().where(instances.c.uuid == bindparam("b_uuid")))
_UPDATE_SPEC = (
    request_specs.update().where(request_specs.c.instance_uuid == bindparam("b_uuid")).values(spec=bindparam("b_spec"))
)
_UPDATE_DEVICE = (
    block_devices.update()
    .where(block_devices.c.uuid == bindparam("b_uuid"))
    .values(device=bindparam("b_device"), volume_id=bindparam("b_volume"))
)
_LEAVE_GROUP = (
    instances.update()
    .where(instances.c.uuid == bindparam("b_uuid"))
    .values(server_group_id=None, hints=bindparam("b_hints"))
)
_DELETE_SPEC = Prepared(request_specs.delete().where(request_specs.c.instance_uuid == bindparam("b_uuid")))
_DELETE_DEVICE = block_devices.delete().where(block_devices.c.uuid == bindparam("b_uuid"))
_DELETE_DEVICES = Prepared(block_devices.delete().where(block_devices.c.instance_uuid == bindparam("b_uuid")))
_DELETE_TOKENS = Prepared(console_tokens.delete().where(console_tokens.c.instance_uuid == bindparam("b_uuid")))
_DELETE_PASSWORD = Prepared(server_passwords.delete().where(server_passwords.c.instance_uuid == bindparam("b_uuid")))


def insert(
    conn: sa.Connection,
    rows: Sequence[InstanceRow],
    specs: Sequence[SpecRow],
    devices: Sequence[DeviceRow],
) -> None:
    """Insert new instances with their request specs and block devices."""
    _INSERT.run_each(conn, rows)
    _INSERT_SPECS.run_each(conn, specs)
    _INSERT_DEVICES.run_each(conn, devices)
    instance_changes.note_rows(conn, rows)


def get(conn: sa.Connection, uuid: str, project_id: str | None = None) -> InstanceRow | None:
    """Return an instance, or None; with a project only that project's."""
    if project_id is None:
        return cast(InstanceRow | None, _GET.first(conn, {"uuid": uuid}))
    return cast(InstanceRow | None, _GET_OF_PROJECT.first(conn, {"uuid": uuid, "project_id": project_id}))


def get_with_service(conn: sa.Connection, uuid: str, project_id: str | None = None) -> InstanceWithService | None:
    """Return an instance with the columns `services.STATE_OF_HOST`, or None; with a project only that project's."""
    if project_id is None:
        return cast(InstanceWithService | None, _GET_WITH_SERVICE.first(conn, {"uuid": uuid}))
    found = _GET_OF_PROJECT_WITH_SERVICE.first(conn, {"uuid": uuid, "project_id": project_id})
    return cast(InstanceWithService | None, found)


def lock(conn: sa.Connection, uuid: str) -> InstanceRow | None:
    """Return an instance and lock its row until the transaction ends; ARCHITECTURE.md has the order of locks."""
    return cast(InstanceRow | None, _LOCK.first(conn, {"uuid": uuid}))


def get_existing(conn: sa.Connection, uuid: str) -> InstanceRow:
    """Return an instance; raise InstanceNotFound if there is none."""
    return _existing(get(conn, uuid), uuid)


def lock_existing(conn: sa.Connection, uuid: str) -> InstanceRow:
    """Return an instance and lock its row; raise InstanceNotFound if there is none."""
    return _existing(lock(conn, uuid), uuid)


def _existing(row: InstanceRow | None, uuid: str) -> InstanceRow:
    if row is None:
        raise InstanceNotFound(f"Instance {uuid} could not be found.")
    return row


def lock_many(conn: sa.Connection, uuids: Iterable[str]) -> None:
    """Lock instances in the order of their ids: first in every transaction that changes several."""
    conn.execute(_LOCK_MANY, {"uuids": list(uuids)})


def get_deleted(conn: sa.Connection, uuid: str) -> InstanceRow | None:
    """Return a deleted instance."""
    return cast(InstanceRow | None, conn.execute(_GET_DELETED, {"uuid": uuid}).mappings().first())


def deleted_before(conn: sa.Connection, uuids: Iterable[str], before: int) -> dict[str, int]:
    """Return those of the instances that were deleted before, with their last epochs."""
    found = conn.execute(_DELETED_BEFORE, {"uuids": list(uuids), "before": before})
    return {row.uuid: row.epoch for row in found}


def at_rest_after(conn: sa.Connection, after: str, most: int) -> list[InterfacesRow]:
    """Return the next instances, in the order of their ids, that have a host and on which nothing is being done."""
    found = conn.execute(_AT_REST_AFTER, {"after": after, "most": most}).mappings()
    return cast(list[InterfacesRow], list(found))


def get_many_deleted(conn: sa.Connection, uuids: Iterable[str]) -> dict[str, InstanceRow]:
    """Return those of the instances that are deleted, by uuid."""
    found = conn.execute(_GET_MANY_DELETED, {"uuids": list(uuids)}).mappings()
    return {row["uuid"]: cast(InstanceRow, row) for row in found}


def get_many(conn: sa.Connection, uuids: Iterable[str]) -> dict[str, InstanceRow]:
    """Return those of the instances that exist, by uuid."""
    return {row["uuid"]: cast(InstanceRow, row) for row in _GET_MANY.all(conn, {"uuids": uuids})}


def states_of(conn: sa.Connection, uuids: Iterable[str]) -> Sequence[StatesRow]:
    """Return host, epoch and states of those of the instances that exist, in the order of their uuids."""
    return cast(Sequence[StatesRow], conn.execute(_STATES, {"uuids": list(uuids)}).all())


def rescued_before(conn: sa.Connection, before: int, most: int) -> list[str]:
    """Return the ids of servers whose rescue began before this time, the oldest first."""
    return list(conn.execute(_RESCUED_BEFORE, {"before": before, "most": most}).scalars())


def shelved_before(conn: sa.Connection, before: int, most: int, *, after: str) -> list[str]:
    """Return servers that were shelved before this time (microseconds) and are still on their hosts, in order.

    Their ids come after the id `after`.
    """
    values = {"before": shelved.instant(before), "most": most, "after": after}
    return list(conn.execute(_SHELVED_BEFORE, values).scalars())


def specs(conn: sa.Connection, uuids: Iterable[str]) -> dict[str, SpecRow]:
    """Return the request specs of instances, by uuid."""
    found = _SPECS.all(conn, {"uuids": list(uuids)})
    return {row["instance_uuid"]: cast(SpecRow, row) for row in found}


def request_of(row: SpecRow) -> RequestSpec:
    """Return the request spec of a row."""
    return msgspec.msgpack.decode(row["spec"], type=RequestSpec)


def request_spec(conn: sa.Connection, uuid: str) -> RequestSpec | None:
    """Return the request spec of an instance, if there is one."""
    row = specs(conn, [uuid]).get(uuid)
    return None if row is None else request_of(row)


def _change_spec(conn: sa.Connection, uuid: str, **fields: Any) -> None:
    """Change fields of an instance's request spec, if there is one."""
    if (known := request_spec(conn, uuid)) is not None:
        spec = msgspec.structs.replace(known, **fields)
        conn.execute(_UPDATE_SPEC, {"b_uuid": uuid, "b_spec": msgspec.msgpack.encode(spec)})


def leave_group(conn: sa.Connection, hints: Mapping[str, Mapping[str, Any]]) -> None:
    """Take instances, whose rows are locked, out of their server group; `hints` are theirs, by uuid.

    Neither their hints nor their request specs name the group any more.
    """
    if not hints:
        return
    conn.execute(_LEAVE_GROUP, [{"b_uuid": uuid, "b_hints": _without_group(theirs)} for uuid, theirs in hints.items()])
    changed = []
    for uuid, row in specs(conn, hints).items():
        spec = request_of(row)
        spec = msgspec.structs.replace(spec, server_group=None, hints=_without_group(spec.hints))
        changed.append({"b_uuid": uuid, "b_spec": msgspec.msgpack.encode(spec)})
    if changed:
        conn.execute(_UPDATE_SPEC, changed)


def _without_group(hints: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values for name, values in hints.items() if name != GROUP_HINT}


def may_have_ports(conn: sa.Connection, row: InstanceRow) -> bool:
    """Return whether a server may have ports: it has some, its request asked for some, or its request is gone."""
    if row["network_info"]:
        return True
    spec = specs(conn, [row["uuid"]]).get(row["uuid"])
    return spec is None or spec["networks"] != "none"


def devices(conn: sa.Connection, uuids: Iterable[str]) -> dict[str, tuple[BlockDevice, ...]]:
    """Return the block devices of instances, by uuid."""
    return _devices(conn, _DEVICES, uuids)


def volumes(conn: sa.Connection, uuids: Iterable[str]) -> dict[str, tuple[BlockDevice, ...]]:
    """Return the block devices of instances that are volumes, by uuid."""
    return _devices(conn, _VOLUMES, uuids)


def devices_of(conn: sa.Connection, uuid: str) -> tuple[BlockDevice, ...]:
    """Return the block devices of one instance."""
    return devices(conn, [uuid]).get(uuid, ())


def volumes_of(conn: sa.Connection, uuid: str) -> tuple[BlockDevice, ...]:
    """Return the block devices of one instance that are volumes."""
    return volumes(conn, [uuid]).get(uuid, ())


def has_ports_or_volumes(conn: sa.Connection, row: InstanceRow) -> bool:
    """Return whether a server has ports or volumes, which have to follow it from host to host."""
    return bool(row["network_info"]) or bool(volumes_of(conn, row["uuid"]))


def _devices(conn: sa.Connection, query: Prepared, uuids: Iterable[str]) -> dict[str, tuple[BlockDevice, ...]]:
    found: dict[str, list[BlockDevice]] = {}
    for row in query.all(conn, {"uuids": list(uuids)}):
        found.setdefault(row["instance_uuid"], []).append(msgspec.convert(row["device"], BlockDevice))
    return {uuid: tuple(each) for uuid, each in found.items()}


def update(
    conn: sa.Connection,
    uuid: str,
    now: int,
    values: InstanceChanges,
    *,
    epoch: int | None = None,
) -> bool:
    """Change an instance; return False if it is at another epoch than this."""
    parameters = {"b_uuid": uuid, "updated_at": now, **values}
    if epoch is not None:
        parameters["b_epoch"] = epoch
    before = instance_changes.before(conn, [uuid])
    changed = _update(tuple(values), epoch is not None).run(conn, parameters) == 1
    if changed and before is not None:
        instance_changes.note(conn, before)
    return changed


@functools.cache
def _update(columns: tuple[str, ...], fenced: bool) -> Prepared:
    statement = instances.update().where(instances.c.uuid == bindparam("b_uuid"))
    if fenced:
        statement = statement.where(instances.c.epoch == bindparam("b_epoch"))
    return Prepared(statement.values({name: bindparam(name) for name in (*columns, "updated_at")}))


def pin_to_zone(conn: sa.Connection, uuid: str, now: int, values: InstanceChanges, *, zone: str | None) -> bool:
    """Change an instance, the availability zone that it is pinned to and the one in its request spec.

    Return False if it is gone.
    """
    if not update(conn, uuid, now, {**values, "pinned_availability_zone": zone}):
        return False
    _change_spec(conn, uuid, availability_zone=zone)
    return True


def change_image(conn: sa.Connection, uuid: str, image: ImageMeta | None) -> None:
    """Change the image in an instance's request spec and in its root disk; its row has another copy."""
    _change_spec(conn, uuid, image=image)
    for device in devices_of(conn, uuid):
        if device.boot_index == 0 and device.source_type == "image":
            change_device(conn, msgspec.structs.replace(device, image_id=None if image is None else image.id))


def set_flavor(conn: sa.Connection, uuid: str, flavor: Flavor) -> None:
    """Change the flavor in an instance's request spec, which the scheduler uses for later moves."""
    _change_spec(conn, uuid, flavor=flavor)


def device_row(instance_uuid: str, device: BlockDevice) -> DeviceRow:
    """Return the row of a block device of an instance."""
    return {
        "uuid": device.uuid,
        "instance_uuid": instance_uuid,
        "device": msgspec.to_builtins(device),
        "volume_id": device.volume_id,
    }


def replace_devices(conn: sa.Connection, uuid: str, wanted: Sequence[BlockDevice]) -> None:
    """Replace the block devices of an instance."""
    _DELETE_DEVICES.run(conn, {"b_uuid": uuid})
    if wanted:
        _INSERT_DEVICES.run_each(conn, [device_row(uuid, each) for each in wanted])


def add_device(conn: sa.Connection, uuid: str, device: BlockDevice) -> None:
    """Add a block device to an instance, whose row is locked."""
    _INSERT_DEVICES.run(conn, device_row(uuid, device))


def remove_device(conn: sa.Connection, uuid: str) -> None:
    """Remove a block device, by its own uuid, of an instance, whose row is locked."""
    conn.execute(_DELETE_DEVICE, {"b_uuid": uuid})


def count_with_volume(conn: sa.Connection, volume_id: str) -> int:
    """Return how many instances have a volume, or are about to."""
    found = sa.select(sa.func.count()).select_from(block_devices).where(block_devices.c.volume_id == volume_id)
    return int(conn.execute(found).scalar_one())


def with_volume(conn: sa.Connection, volume_id: str) -> list[str]:
    """Return the uuids of the instances that have a volume, or are about to."""
    return [row["instance_uuid"] for row in _GET_WITH_VOLUME.all(conn, {"volume_id": volume_id})]


def change_device(conn: sa.Connection, device: BlockDevice) -> None:
    """Replace a block device of an instance, whose row is locked."""
    values = {"b_uuid": device.uuid, "b_device": msgspec.to_builtins(device), "b_volume": device.volume_id}
    conn.execute(_UPDATE_DEVICE, values)


def update_many(conn: sa.Connection, uuids: Iterable[str], now: int, values: InstanceChanges) -> None:
    """Change instances, whose rows are locked, in the same way."""
    names = list(uuids)
    before = instance_changes.before(conn, names)
    conn.execute(_update_of_many(tuple(values)), {"b_uuids": names, "updated_at": now, **values})
    if before is not None:
        instance_changes.note(conn, before)


@functools.cache
def _update_of_many(columns: tuple[str, ...]) -> sa.Update:
    statement = instances.update().where(one_of(instances.c.uuid, "b_uuids"))
    return statement.values({name: bindparam(name) for name in (*columns, "updated_at")})


def move_to_deleted(conn: sa.Connection, row: InstanceRow, now: int) -> None:
    """Move an instance, whose row is locked, to the deleted ones."""
    gone = {
        **row,
        "vm_state": states.DELETED,
        "task_state": None,
        "deleted_at": now,
        "terminated_at": row["terminated_at"] or now,
        "updated_at": now,
        "power_state": power_state.NOSTATE,
        "user_data": None,
        "network_info": [],
    }
    _INSERT_DELETED.run(conn, gone)
    known = instance_changes.StatesBefore(row["vm_state"], row["task_state"], row["display_name"])
    instance_changes.note_rows(conn, [cast(InstanceRow, gone)], known)
    for statement in (_DELETE, _DELETE_SPEC, _DELETE_DEVICES, _DELETE_TOKENS, _DELETE_PASSWORD):
        statement.run(conn, {"b_uuid": row["uuid"]})


def soft_deleted_before(conn: sa.Connection, before: int, most: int) -> list[str]:
    """Return the ids of servers whose soft delete was accepted before this time, the oldest first."""
    return list(conn.execute(_SOFT_DELETED_BEFORE, {"before": before, "most": most}).scalars())


def count_in_group(conn: sa.Connection, group: str) -> int:
    """Return how many servers are in a server group."""
    counted = sa.select(sa.func.count()).select_from(instances).where(instances.c.server_group_id == group)
    return int(conn.execute(counted).scalar_one())
