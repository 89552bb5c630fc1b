"""Instances: insert, read, compare-and-set, and the move to the deleted ones.

A change of state names the epoch that it belongs to; if the instance is at another epoch, it matches no row and returns
False. Statements of the hot paths are made once, at import.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypedDict, cast

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db import services
from micronova.db.listed import one_of
from micronova.db.query import Query
from micronova.db.tables import (
    block_devices,
    console_tokens,
    deleted_instances,
    instances,
    request_specs,
    server_groups,
    server_passwords,
)
from micronova.objects import power_state, states
from micronova.objects.errors import InstanceNotFound
from micronova.objects.instance import InstanceChanges, InstanceRow
from micronova.objects.scheduling import RequestSpec


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


class StatesRow(Protocol):
    """Host, epoch and states of an instance, as a cursor returns them."""

    uuid: str
    host: str | None
    epoch: int
    vm_state: str
    task_state: str | None
    power_state: int


_INSERT = instances.insert()
_INSERT_SPECS = request_specs.insert()
_INSERT_DEVICES = block_devices.insert()
_BY_UUID = sa.select(instances).where(instances.c.uuid == bindparam("uuid"))
_GET = Query(_BY_UUID)
_LOCK = Query(_BY_UUID.with_for_update())
_GET_OF_PROJECT = Query(_BY_UUID.where(instances.c.project_id == bindparam("project_id")))
_WITH_SERVICE = (
    sa.select(instances, *services.STATE_OF_HOST)
    .select_from(services.with_services(instances))
    .where(instances.c.uuid == bindparam("uuid"))
)
_GET_WITH_SERVICE = Query(_WITH_SERVICE)
_GET_OF_PROJECT_WITH_SERVICE = Query(_WITH_SERVICE.where(instances.c.project_id == bindparam("project_id")))
_GET_DELETED = sa.select(deleted_instances).where(deleted_instances.c.uuid == bindparam("uuid"))
_GET_MANY = sa.select(instances).where(one_of(instances.c.uuid, "uuids"))
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
_SPECS = sa.select(request_specs).where(one_of(request_specs.c.instance_uuid, "uuids"))
_DEVICES = sa.select(block_devices.c.instance_uuid, block_devices.c.device).where(
    one_of(block_devices.c.instance_uuid, "uuids")
)
_DELETE = instances.delete().where(instances.c.uuid == bindparam("b_uuid"))
_UPDATE_SPEC = (
    request_specs.update().where(request_specs.c.instance_uuid == bindparam("b_uuid")).values(spec=bindparam("b_spec"))
)
_DELETE_SPEC = request_specs.delete().where(request_specs.c.instance_uuid == bindparam("b_uuid"))
_DELETE_DEVICES = block_devices.delete().where(block_devices.c.instance_uuid == bindparam("b_uuid"))
_DELETE_TOKENS = console_tokens.delete().where(console_tokens.c.instance_uuid == bindparam("b_uuid"))
_DELETE_PASSWORD = server_passwords.delete().where(server_passwords.c.instance_uuid == bindparam("b_uuid"))


def insert(
    conn: sa.Connection,
    rows: Sequence[InstanceRow],
    specs: Sequence[SpecRow],
    devices: Sequence[DeviceRow],
) -> None:
    """Insert new instances with their request specs and block devices."""
    conn.execute(_INSERT, cast(Sequence[dict[str, Any]], rows))
    conn.execute(_INSERT_SPECS, cast(Sequence[dict[str, Any]], specs))
    if devices:
        conn.execute(_INSERT_DEVICES, cast(Sequence[dict[str, Any]], devices))


def get(conn: sa.Connection, uuid: str, project_id: str | None = None) -> InstanceRow | None:
    """Return an instance, or None; with a project only that project's."""
    if project_id is None:
        return cast(InstanceRow | None, _GET.first(conn, uuid=uuid))
    return cast(InstanceRow | None, _GET_OF_PROJECT.first(conn, uuid=uuid, project_id=project_id))


def get_with_service(conn: sa.Connection, uuid: str, project_id: str | None = None) -> InstanceRow | None:
    """Return the same with the columns `services.STATE_OF_HOST`."""
    if project_id is None:
        return cast(InstanceRow | None, _GET_WITH_SERVICE.first(conn, uuid=uuid))
    return cast(InstanceRow | None, _GET_OF_PROJECT_WITH_SERVICE.first(conn, uuid=uuid, project_id=project_id))


def lock(conn: sa.Connection, uuid: str) -> InstanceRow | None:
    """Return an instance and lock its row until the transaction ends; ARCHITECTURE.md has the order of locks."""
    return cast(InstanceRow | None, _LOCK.first(conn, uuid=uuid))


def lock_existing(conn: sa.Connection, uuid: str) -> InstanceRow:
    """Return an instance and lock its row; raise InstanceNotFound if there is none."""
    row = lock(conn, uuid)
    if row is None:
        raise InstanceNotFound(f"Instance {uuid} could not be found.")
    return row


def lock_many(conn: sa.Connection, uuids: Iterable[str]) -> None:
    """Lock instances in the order of their ids: first in every transaction that changes several."""
    conn.execute(_LOCK_MANY, {"uuids": list(uuids)})


def get_deleted(conn: sa.Connection, uuid: str) -> InstanceRow | None:
    """Return a deleted instance."""
    return cast(InstanceRow | None, conn.execute(_GET_DELETED, {"uuid": uuid}).mappings().first())


def get_many(conn: sa.Connection, uuids: Iterable[str]) -> dict[str, InstanceRow]:
    """Return those of the instances that exist, by uuid."""
    found = conn.execute(_GET_MANY, {"uuids": list(uuids)}).mappings()
    return {row["uuid"]: cast(InstanceRow, row) for row in found}


def states_of(conn: sa.Connection, uuids: Iterable[str]) -> Sequence[StatesRow]:
    """Return host, epoch and states of those of the instances that exist, in the order of their uuids."""
    return cast(Sequence[StatesRow], conn.execute(_STATES, {"uuids": list(uuids)}).all())


def specs(conn: sa.Connection, uuids: Iterable[str]) -> dict[str, SpecRow]:
    """Return the request specs of instances, by uuid."""
    found = conn.execute(_SPECS, {"uuids": list(uuids)}).mappings()
    return {row["instance_uuid"]: cast(SpecRow, row) for row in found}


def may_have_ports(conn: sa.Connection, row: InstanceRow) -> bool:
    """Return whether a server may have ports: it has some, its request asked for some, or its request is gone."""
    if row["network_info"]:
        return True
    spec = specs(conn, [row["uuid"]]).get(row["uuid"])
    return spec is None or spec["networks"] != "none"


def devices(conn: sa.Connection, uuids: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the block devices of instances, by uuid."""
    found: dict[str, list[dict[str, Any]]] = {}
    for uuid, device in conn.execute(_DEVICES, {"uuids": list(uuids)}):
        found.setdefault(uuid, []).append(device)
    return found


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
    return conn.execute(_update(tuple(values), epoch is not None), parameters).rowcount == 1


@functools.cache
def _update(columns: tuple[str, ...], fenced: bool) -> sa.Update:
    statement = instances.update().where(instances.c.uuid == bindparam("b_uuid"))
    if fenced:
        statement = statement.where(instances.c.epoch == bindparam("b_epoch"))
    return statement.values({name: bindparam(name) for name in (*columns, "updated_at")})


def pin_to_zone(conn: sa.Connection, uuid: str, now: int, values: InstanceChanges, *, zone: str | None) -> bool:
    """Change an instance, the availability zone that it is pinned to and the one in its request spec.

    Return False if it is gone.
    """
    if not update(conn, uuid, now, {**values, "pinned_availability_zone": zone}):
        return False
    if (row := specs(conn, [uuid]).get(uuid)) is not None:
        spec = msgspec.structs.replace(msgspec.msgpack.decode(row["spec"], type=RequestSpec), availability_zone=zone)
        conn.execute(_UPDATE_SPEC, {"b_uuid": uuid, "b_spec": msgspec.msgpack.encode(spec)})
    return True


def update_many(conn: sa.Connection, uuids: Iterable[str], now: int, values: InstanceChanges) -> None:
    """Change instances, whose rows are locked, in the same way."""
    conn.execute(_update_of_many(tuple(values)), {"b_uuids": list(uuids), "updated_at": now, **values})


@functools.cache
def _update_of_many(columns: tuple[str, ...]) -> sa.Update:
    statement = instances.update().where(one_of(instances.c.uuid, "b_uuids"))
    return statement.values({name: bindparam(name) for name in (*columns, "updated_at")})


def move_to_deleted(conn: sa.Connection, row: InstanceRow, now: int) -> None:
    """Move an instance, whose row is locked, to the deleted ones."""
    conn.execute(
        deleted_instances.insert(),
        {
            **row,
            "vm_state": states.DELETED,
            "task_state": None,
            "deleted_at": now,
            "terminated_at": row["terminated_at"] or now,
            "updated_at": now,
            "power_state": power_state.NOSTATE,
            "user_data": None,
            "network_info": [],
        },
    )
    for statement in (_DELETE, _DELETE_SPEC, _DELETE_DEVICES, _DELETE_TOKENS, _DELETE_PASSWORD):
        conn.execute(statement, {"b_uuid": row["uuid"]})


def count_in_group(conn: sa.Connection, group: str) -> int:
    """Lock a server group and return how many servers are in it."""
    conn.execute(sa.select(server_groups.c.uuid).where(server_groups.c.uuid == group).with_for_update())
    counted = sa.select(sa.func.count()).select_from(instances).where(instances.c.server_group_id == group)
    return int(conn.execute(counted).scalar_one())
