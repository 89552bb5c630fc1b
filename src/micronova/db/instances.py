"""Instances: insert, read, compare-and-set, and the move into history.

Every change of an instance says at which epoch it believes the instance to be; a change whose epoch is behind
matches no row and returns False. Statements of the hot paths are made once, at import.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam

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

Row = Mapping[Any, Any]

_INSERT = instances.insert()
_INSERT_SPECS = request_specs.insert()
_INSERT_DEVICES = block_devices.insert()
_BY_UUID = sa.select(instances).where(instances.c.uuid == bindparam("uuid"))
_GET = Query(_BY_UUID)
_LOCK = Query(_BY_UUID.with_for_update())
_GET_OF_PROJECT = Query(_BY_UUID.where(instances.c.project_id == bindparam("project_id")))
_GET_DELETED = sa.select(deleted_instances).where(deleted_instances.c.uuid == bindparam("uuid"))
_GET_MANY = sa.select(instances).where(instances.c.uuid.in_(bindparam("uuids", expanding=True)))
_SPEC = sa.select(request_specs).where(request_specs.c.instance_uuid == bindparam("uuid"))
_SPECS = sa.select(request_specs).where(request_specs.c.instance_uuid.in_(bindparam("uuids", expanding=True)))
_DEVICES = sa.select(block_devices.c.instance_uuid, block_devices.c.device).where(
    block_devices.c.instance_uuid.in_(bindparam("uuids", expanding=True))
)
_DELETE = instances.delete().where(instances.c.uuid == bindparam("b_uuid"))
_DELETE_SPEC = request_specs.delete().where(request_specs.c.instance_uuid == bindparam("b_uuid"))
_DELETE_DEVICES = block_devices.delete().where(block_devices.c.instance_uuid == bindparam("b_uuid"))
_DELETE_TOKENS = console_tokens.delete().where(console_tokens.c.instance_uuid == bindparam("b_uuid"))
_DELETE_PASSWORD = server_passwords.delete().where(server_passwords.c.instance_uuid == bindparam("b_uuid"))


def insert(
    conn: sa.Connection,
    rows: Sequence[dict[str, Any]],
    specs: Sequence[dict[str, Any]],
    devices: Sequence[dict[str, Any]],
) -> None:
    """Insert new instances with what they were asked to be."""
    conn.execute(_INSERT, rows)
    conn.execute(_INSERT_SPECS, specs)
    if devices:
        conn.execute(_INSERT_DEVICES, devices)


def get(conn: sa.Connection, uuid: str, project_id: str | None = None) -> Row | None:
    """Return an instance, or None; with a project only that project's."""
    if project_id is None:
        return _GET.first(conn, uuid=uuid)
    return _GET_OF_PROJECT.first(conn, uuid=uuid, project_id=project_id)


def lock(conn: sa.Connection, uuid: str) -> Row | None:
    """Return an instance that nobody else changes until this transaction ends.

    The order in which transactions lock: instance, operation, group, inventory, quota.
    """
    return _LOCK.first(conn, uuid=uuid)


def get_deleted(conn: sa.Connection, uuid: str) -> Row | None:
    """Return what is left of a deleted instance."""
    return conn.execute(_GET_DELETED, {"uuid": uuid}).mappings().first()


def get_many(conn: sa.Connection, uuids: Iterable[str]) -> dict[str, Row]:
    """Return those of the instances that exist, by uuid."""
    found = conn.execute(_GET_MANY, {"uuids": list(uuids)}).mappings()
    return {row["uuid"]: row for row in found}


def specs(conn: sa.Connection, uuids: Iterable[str]) -> dict[str, Row]:
    """Return the request specs of instances, by uuid."""
    found = conn.execute(_SPECS, {"uuids": list(uuids)}).mappings()
    return {row["instance_uuid"]: row for row in found}


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
    values: dict[str, Any],
    *,
    epoch: int | None = None,
) -> bool:
    """Change an instance if it still is at this epoch; say whether it was."""
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


def to_history(conn: sa.Connection, uuid: str, now: int) -> Row | None:
    """Delete an instance for real and keep what the API still shows of it; return it as it was last."""
    row = get(conn, uuid)
    if row is None:
        return None
    conn.execute(
        deleted_instances.insert(),
        {
            **row,
            "vm_state": "deleted",
            "task_state": None,
            "deleted_at": now,
            "terminated_at": row["terminated_at"] or now,
            "updated_at": now,
            "power_state": 0,
            "user_data": None,
            "network_info": [],
        },
    )
    for statement in (_DELETE, _DELETE_SPEC, _DELETE_DEVICES, _DELETE_TOKENS, _DELETE_PASSWORD):
        conn.execute(statement, {"b_uuid": uuid})
    return row


def count_in_group(conn: sa.Connection, group: str) -> int:
    """Lock a server group and return how many servers are in it."""
    conn.execute(sa.select(server_groups.c.uuid).where(server_groups.c.uuid == group).with_for_update())
    counted = sa.select(sa.func.count()).select_from(instances).where(instances.c.server_group_id == group)
    return int(conn.execute(counted).scalar_one())
