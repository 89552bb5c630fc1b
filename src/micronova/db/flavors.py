"""Flavors, their extra specs and who may use those that are not public."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.db.tables import flavor_access, flavors
from micronova.db.upsert import PerDialect
from micronova.objects.errors import Conflict, Invalid, NotFound
from micronova.objects.flavor import Flavor

_f, _access = flavors.c, flavor_access.c
Row = sa.Row[Any]

SORT_KEYS = {
    "created_at": _f.created_at,
    "description": _f.description,
    "disabled": _f.disabled,
    "ephemeral_gb": _f.ephemeral_gb,
    "flavorid": _f.flavorid,
    "id": _f.created_at,  # other implementations number flavors in the order of their making
    "is_public": _f.is_public,
    "memory_mb": _f.memory_mb,
    "name": _f.name,
    "root_gb": _f.root_gb,
    "rxtx_factor": _f.rxtx_factor,
    "swap": _f.swap,
    "updated_at": _f.created_at,
    "vcpu_weight": sa.literal(0),
    "vcpus": _f.vcpus,
}

_INSERT = PerDialect(lambda insert: insert(flavors).on_conflict_do_nothing())
_GRANT = PerDialect(lambda insert: insert(flavor_access).on_conflict_do_nothing())


def _visible(project_id: Any) -> sa.ColumnElement[bool]:
    granted = sa.select(_access.flavorid).where(_access.project_id == project_id)
    return sa.or_(_f.is_public, _f.flavorid.in_(granted))


_GET = sa.select(flavors).where(_f.flavorid == sa.bindparam("id"))
_GET_VISIBLE = _GET.where(_visible(sa.bindparam("project")))


def row(conn: sa.Connection, flavorid: str, project_id: str | None = None) -> Row:
    """Return a flavor's row; with a project, only when that may use it; raise NotFound."""
    if project_id is None:
        found = conn.execute(_GET, {"id": flavorid}).first()
    else:
        found = conn.execute(_GET_VISIBLE, {"id": flavorid, "project": project_id}).first()
    if found is None:
        raise NotFound(f"Flavor {flavorid} could not be found.")
    return found


def get(conn: sa.Connection, flavorid: str, project_id: str | None = None) -> Flavor:
    """Return a flavor; with a project, only when that may use it; raise NotFound."""
    return of_row(row(conn, flavorid, project_id))


def of_row(found: Row) -> Flavor:
    """Return the flavor that a row describes."""
    return Flavor(
        id=found.flavorid,
        name=found.name,
        ram=found.memory_mb,
        vcpus=found.vcpus,
        disk=found.root_gb,
        ephemeral=found.ephemeral_gb,
        swap=found.swap,
        rxtx_factor=found.rxtx_factor,
        is_public=found.is_public,
        disabled=found.disabled,
        description=found.description,
        extra_specs=found.extra_specs,
    )


def insert(conn: sa.Connection, flavor: Flavor, now: int) -> Row:
    """Add a flavor; raise Conflict when its id or name is taken."""
    values = {
        "flavorid": flavor.id,
        "name": flavor.name,
        "memory_mb": flavor.ram,
        "vcpus": flavor.vcpus,
        "root_gb": flavor.disk,
        "ephemeral_gb": flavor.ephemeral,
        "swap": flavor.swap,
        "rxtx_factor": flavor.rxtx_factor,
        "is_public": flavor.is_public,
        "disabled": flavor.disabled,
        "description": flavor.description,
        "extra_specs": dict(flavor.extra_specs),
        "created_at": now,
    }
    if conn.execute(_INSERT.on(conn), values).rowcount != 1:
        if conn.execute(sa.select(_f.flavorid).where(_f.flavorid == flavor.id)).first():
            raise Conflict(f"Flavor with ID {flavor.id} already exists.")
        raise Conflict(f"Flavor with name {flavor.name} already exists.")
    return row(conn, flavor.id)


def list_(
    conn: sa.Connection,
    *,
    project_id: str | None = None,
    is_public: bool | None = True,
    min_ram: int | None = None,
    min_disk: int | None = None,
    name: str | None = None,
    sort_key: str = "flavorid",
    descending: bool = False,
    marker: str | None = None,
    limit: int | None = None,
) -> Sequence[Row]:
    """Return flavors after the marker; Invalid on a bad one.

    `is_public` chooses among them: True means what a project may use (private ones that it was given as well),
    False the private ones, None all.
    """
    query = sa.select(flavors)
    if is_public:
        query = query.where(_visible(project_id))
    elif is_public is not None:
        query = query.where(_f.is_public.is_(False))
    if min_ram is not None:
        query = query.where(_f.memory_mb >= min_ram)
    if min_disk is not None:
        query = query.where(_f.root_gb >= min_disk)
    if name is not None:
        query = query.where(_f.name == name)
    key = SORT_KEYS[sort_key]
    if marker is not None:
        nulls_last = sa.case((key.is_(None), 1), else_=0)
        last = conn.execute(sa.select(nulls_last, key, _f.flavorid).where(_f.flavorid == marker)).first()
        if last is None:
            raise Invalid(f"marker [{marker}] not found")
        query = query.where(_after(sort_key, (last[0], last[1], last[2]), descending))
    direction = sa.desc if descending else sa.asc
    nulls = sa.case((key.is_(None), 1), else_=0)
    query = query.order_by(direction(nulls), direction(key), direction(_f.flavorid))
    return conn.execute(query if limit is None else query.limit(limit)).all()


def _after(sort_key: str, last: tuple[Any, ...], descending: bool) -> sa.ColumnElement[bool]:
    """The condition of keyset paging: (is null, key, flavorid) beyond that of the marker."""
    key = SORT_KEYS[sort_key]
    is_null = sa.case((key.is_(None), 1), else_=0)
    columns = [(is_null, last[0]), (_f.flavorid, last[2])]
    if last[1] is not None:
        columns.insert(1, (key, last[1]))
    beyond: list[sa.ColumnElement[bool]] = []
    for index, (column, value) in enumerate(columns):
        equal = [earlier == known for earlier, known in columns[:index]]
        beyond.append(sa.and_(*equal, column < value if descending else column > value))
    return sa.or_(*beyond)


def delete(conn: sa.Connection, flavorid: str) -> None:
    """Remove a flavor; servers keep the copy that they were booted with. Raise NotFound."""
    if conn.execute(sa.delete(flavors).where(_f.flavorid == flavorid)).rowcount != 1:
        raise NotFound(f"Flavor {flavorid} could not be found.")
    conn.execute(sa.delete(flavor_access).where(_access.flavorid == flavorid))


def set_description(conn: sa.Connection, flavorid: str, description: str | None) -> Row:
    """Change the one thing of a flavor that may change."""
    conn.execute(sa.update(flavors).where(_f.flavorid == flavorid).values(description=description))
    return row(conn, flavorid)


def _locked_specs(conn: sa.Connection, flavorid: str) -> dict[str, str]:
    query = sa.select(_f.extra_specs).where(_f.flavorid == flavorid).with_for_update()
    found = conn.execute(query).first()
    if found is None:
        raise NotFound(f"Flavor {flavorid} could not be found.")
    specs: dict[str, str] = dict(found.extra_specs)
    return specs


def set_extra_specs(conn: sa.Connection, flavorid: str, specs: Mapping[str, str]) -> None:
    """Add extra specs to a flavor, or change them."""
    merged = {**_locked_specs(conn, flavorid), **specs}
    conn.execute(sa.update(flavors).where(_f.flavorid == flavorid).values(extra_specs=merged))


def remove_extra_spec(conn: sa.Connection, flavorid: str, key: str) -> None:
    """Take an extra spec off a flavor; raise NotFound."""
    specs = _locked_specs(conn, flavorid)
    if key not in specs:
        raise NotFound(f"Flavor {flavorid} has no extra specs with key {key}.")
    del specs[key]
    conn.execute(sa.update(flavors).where(_f.flavorid == flavorid).values(extra_specs=specs))


def access(conn: sa.Connection, flavorid: str) -> list[str]:
    """Return the projects that may use a flavor that is not public."""
    query = sa.select(_access.project_id).where(_access.flavorid == flavorid).order_by(_access.project_id)
    return list(conn.execute(query).scalars())


def grant(conn: sa.Connection, flavorid: str, project_id: str) -> list[str]:
    """Let a project use a flavor; raise Conflict when it may already."""
    if conn.execute(_GRANT.on(conn), {"flavorid": flavorid, "project_id": project_id}).rowcount != 1:
        raise Conflict(f"Flavor access already exists for flavor {flavorid} and project {project_id}.")
    return access(conn, flavorid)


def revoke(conn: sa.Connection, flavorid: str, project_id: str) -> list[str]:
    """Take a project's access to a flavor; raise NotFound when it has none."""
    where = (_access.flavorid == flavorid, _access.project_id == project_id)
    if conn.execute(sa.delete(flavor_access).where(*where)).rowcount != 1:
        raise NotFound(f"Flavor access not found for {flavorid} / {project_id} combination.")
    return access(conn, flavorid)
