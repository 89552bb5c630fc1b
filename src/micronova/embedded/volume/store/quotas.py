"""Quotas: a limit and a usage row per project and resource.

A request charges the usage rows in its own transaction by conditional updates, so that concurrent requests cannot
exceed a limit together. A delete releases in the transaction that removes the row. No decision counts rows.

Every transaction updates usage rows last, in the order of project and resource. So a transaction that holds a usage row
waits for no other lock.
"""

from collections.abc import Mapping

import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent, insert_or_update
from micronova.embedded.volume.tables import class_limits, limits, usages, volume_types
from micronova.objects.errors import TooLarge

DEFAULT_CLASS = "default"
# -1 is no limit. The numbers are those that Cinder ships with.
QUOTAS: Mapping[str, int] = {
    "volumes": 10,
    "per_volume_gigabytes": -1,
    "snapshots": 10,
    "gigabytes": 1000,
    "backups": 10,
    "backup_gigabytes": 1000,
    "groups": 10,
}
OF_TYPES = ("volumes", "gigabytes", "snapshots")
"""What is also counted by volume type, without a limit unless one is set."""


def of_type(resource: str, type_id: str) -> str:
    """Return the name in rows of a resource that is counted by type; users see the type's name instead of its id."""
    return f"{resource}_{type_id}"


def of_volume(type_id: str, size: int, *, number: int = 1) -> dict[str, int]:
    """Return what a volume uses."""
    return {"volumes": number, "gigabytes": size, **of_volume_type(type_id, size, number)}


def of_volume_type(type_id: str, size: int, number: int = 1) -> dict[str, int]:
    """Return what a volume uses of the quota of its type."""
    return {of_type("volumes", type_id): number, of_type("gigabytes", type_id): size}


def of_snapshot(type_id: str, size: int) -> dict[str, int]:
    """Return what a snapshot uses."""
    return {
        "snapshots": 1,
        "gigabytes": size,
        of_type("snapshots", type_id): 1,
        of_type("gigabytes", type_id): size,
    }


def of_backup(size: int) -> dict[str, int]:
    """Return what a backup uses."""
    return {"backups": 1, "backup_gigabytes": size}


def charge(conn: sa.Connection, project_id: str, wanted: Mapping[str, int], defaults: Mapping[str, int]) -> None:
    """Charge a project's quota or raise TooLarge; `defaults` are the limits of projects without one of their own."""
    for resource, amount in sorted(wanted.items()):
        if not amount:
            continue
        default = defaults.get(resource, -1)
        values = {"project": project_id, "kind": resource, "amount": amount, "default": default}
        if conn.execute(_CHARGE, values).rowcount == 1:
            continue
        insert_if_absent(conn, usages, {"project_id": project_id, "resource": resource, "used": 0})
        if conn.execute(_CHARGE, values).rowcount != 1:
            raise _exceeded(conn, project_id, resource, amount, default)


def release(conn: sa.Connection, project_id: str, freed: Mapping[str, int]) -> None:
    """Release deleted resources from a project's quota."""
    for resource, amount in sorted(freed.items()):
        if amount:
            conn.execute(_RELEASE, {"project": project_id, "kind": resource, "amount": amount})


def move(
    conn: sa.Connection,
    project_id: str,
    charged: Mapping[str, int],
    released: Mapping[str, int],
    defaults: Mapping[str, int],
) -> None:
    """Charge and release a project's quota in one order of the rows; raise as `charge` does."""
    for resource in sorted({*charged, *released}):
        charge(conn, project_id, {resource: charged.get(resource, 0)}, defaults)
        release(conn, project_id, {resource: released.get(resource, 0)})


def check_size(conn: sa.Connection, project_id: str, size: int, defaults: Mapping[str, int]) -> None:
    """Raise TooLarge if a project may have no volume of this size."""
    most = limit_of(conn, project_id, "per_volume_gigabytes", defaults.get("per_volume_gigabytes", -1))
    if 0 <= most < size:
        raise TooLarge(
            f"VolumeSizeExceedsLimit: Requested volume size {size}G is larger than maximum allowed limit {most}G."
        )


def limit_of(conn: sa.Connection, project_id: str, resource: str, default: int) -> int:
    """Return the limit of a project."""
    found = conn.execute(sa.select(_LIMIT), {"project": project_id, "kind": resource, "default": default})
    return int(found.scalar_one())


def limits_of(conn: sa.Connection, project_id: str) -> dict[str, int]:
    """Return the limits that were set for a project."""
    rows = conn.execute(sa.select(limits.c.resource, limits.c.maximum).where(limits.c.project_id == project_id))
    return {row.resource: row.maximum for row in rows}


def class_limits_of(conn: sa.Connection, class_name: str) -> dict[str, int]:
    """Return the limits that were set for a class of projects."""
    chosen = sa.select(class_limits.c.resource, class_limits.c.maximum)
    return {row.resource: row.maximum for row in conn.execute(chosen.where(class_limits.c.class_name == class_name))}


def set_limit(conn: sa.Connection, owner: sa.Column[str], id: str, resource: str, maximum: int) -> None:
    """Set a limit of a project or a class; `owner` is the column of its id."""
    insert_or_update(conn, owner.table, {owner.name: id, "resource": resource}, {"maximum": maximum})


def delete_limits(conn: sa.Connection, project_id: str) -> None:
    """Give a project the default limits."""
    conn.execute(limits.delete().where(limits.c.project_id == project_id))


def usage_of(conn: sa.Connection, project_id: str) -> dict[str, int]:
    """Return the usage of a project by resource."""
    rows = conn.execute(sa.select(usages.c.resource, usages.c.used).where(usages.c.project_id == project_id))
    return {row.resource: row.used for row in rows}


def _exceeded(conn: sa.Connection, project_id: str, resource: str, amount: int, default: int) -> TooLarge:
    most = limit_of(conn, project_id, resource, default)
    used = usage_of(conn, project_id).get(resource, 0)
    kind, _, type_id = (resource, "", "") if resource in QUOTAS else resource.partition("_")
    if type_id:
        type_name = conn.execute(sa.select(volume_types.c.name).where(volume_types.c.id == type_id)).scalar_one()
        resource = f"{kind}_{type_name}"
    if kind.endswith("gigabytes"):
        return TooLarge(
            f"VolumeSizeExceedsAvailableQuota: The quota '{resource}' allows {most}G, of which {used}G are used: "
            f"{amount}G more do not fit."
        )
    return TooLarge(f"VolumeLimitExceeded: The quota '{resource}' allows {most}, of which {used} are used.")


_u = usages.c
_project, _kind = sa.bindparam("project", type_=sa.String), sa.bindparam("kind", type_=sa.String)
_LIMIT = sa.func.coalesce(
    sa.select(limits.c.maximum).where(limits.c.project_id == _project, limits.c.resource == _kind).scalar_subquery(),
    sa.select(class_limits.c.maximum)
    .where(class_limits.c.class_name == DEFAULT_CLASS, class_limits.c.resource == _kind)
    .scalar_subquery(),
    sa.bindparam("default", type_=sa.BigInteger),
)
_amount = sa.bindparam("amount", type_=sa.BigInteger)
_CHARGE = (
    usages.update()
    .where(_u.project_id == _project, _u.resource == _kind, sa.or_(_LIMIT < 0, _u.used + _amount <= _LIMIT))
    .values(used=_u.used + _amount)
)
_RELEASE = usages.update().where(_u.project_id == _project, _u.resource == _kind).values(used=_u.used - _amount)
