"""Flavors, their extra specs and who may use those that are not public."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import sqlalchemy as sa

from micronova.db import keyset
from micronova.db.keyset import SortKey
from micronova.db.prepared import Prepared
from micronova.db.tables import flavor_access, flavors
from micronova.db.upsert import insert_if_absent
from micronova.objects.errors import Conflict, Invalid, NotFound
from micronova.objects.flavor import Flavor

_f, _access = flavors.c, flavor_access.c


class FlavorRow(Protocol):
    """A row of `flavors`, as a cursor returns it. Times are microseconds since 1970 (UTC)."""

    flavorid: str
    name: str
    memory_mb: int
    vcpus: int
    root_gb: int
    ephemeral_gb: int
    swap: int
    rxtx_factor: float
    is_public: bool
    disabled: bool
    description: str | None
    extra_specs: dict[str, str]
    created_at: int


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


def _visible(project_id: Any) -> sa.ColumnElement[bool]:
    granted = sa.select(_access.flavorid).where(_access.project_id == project_id)
    return sa.or_(_f.is_public, _f.flavorid.in_(granted))


_BY_ID = sa.select(flavors).where(_f.flavorid == sa.bindparam("id"))
_GET = Prepared(_BY_ID)
_GET_VISIBLE = Prepared(_BY_ID.where(_visible(sa.bindparam("project"))))


def row(conn: sa.Connection, flavorid: str, project_id: str | None = None) -> FlavorRow:
    """Return a flavor's row; with a project, only when that may use it; raise NotFound."""
    if project_id is None:
        found = _GET.records(conn, {"id": flavorid})
    else:
        found = _GET_VISIBLE.records(conn, {"id": flavorid, "project": project_id})
    if not found:
        raise NotFound(f"Flavor {flavorid} could not be found.")
    return cast(FlavorRow, found[0])


def get(conn: sa.Connection, flavorid: str, project_id: str | None = None) -> Flavor:
    """Return a flavor; with a project, only when that may use it; raise NotFound."""
    return of_row(row(conn, flavorid, project_id))


_FIND = sa.select(flavors).where(sa.or_(_f.flavorid == sa.bindparam("named"), _f.name == sa.bindparam("named")))
_FIND_VISIBLE = _FIND.where(_visible(sa.bindparam("project")))


def find(conn: sa.Connection, named: str, project_id: str | None = None) -> Flavor:
    """Return a flavor by id or name, the id first; with a project, only when that may use it; raise NotFound."""
    query = _FIND if project_id is None else _FIND_VISIBLE
    rows = conn.execute(query, {"named": named, **({"project": project_id} if project_id is not None else {})}).all()
    if not rows:
        raise NotFound(f"Flavor {named} could not be found.")
    by_id = [each for each in rows if each.flavorid == named]
    return of_row(cast(FlavorRow, (by_id or rows)[0]))


def of_row(found: FlavorRow) -> Flavor:
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


def insert(conn: sa.Connection, flavor: Flavor, now: int) -> FlavorRow:
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
    if not insert_if_absent(conn, flavors, values):
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
) -> Sequence[FlavorRow]:
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
    column = SORT_KEYS[sort_key]
    nulls_last = sa.case((column.is_(None), 1), else_=0)
    keys = [SortKey(key, descending) for key in (nulls_last, column, _f.flavorid)]
    after = None
    if marker is not None:
        after = keyset.position(conn, keys, _f.flavorid == marker)
        if after is None:
            raise Invalid(f"marker [{marker}] not found")
    return cast(Sequence[FlavorRow], conn.execute(keyset.page(query, keys, after, limit)).all())


def delete(conn: sa.Connection, flavorid: str) -> None:
    """Remove a flavor; servers keep the copy that they were booted with. Raise NotFound."""
    if conn.execute(sa.delete(flavors).where(_f.flavorid == flavorid)).rowcount != 1:
        raise NotFound(f"Flavor {flavorid} could not be found.")
    conn.execute(sa.delete(flavor_access).where(_access.flavorid == flavorid))


def set_description(conn: sa.Connection, flavorid: str, description: str | None) -> FlavorRow:
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
    if not insert_if_absent(conn, flavor_access, {"flavorid": flavorid, "project_id": project_id}):
        raise Conflict(f"Flavor access already exists for flavor {flavorid} and project {project_id}.")
    return access(conn, flavorid)


def revoke(conn: sa.Connection, flavorid: str, project_id: str) -> list[str]:
    """Take a project's access to a flavor; raise NotFound when it has none."""
    where = (_access.flavorid == flavorid, _access.project_id == project_id)
    if conn.execute(sa.delete(flavor_access).where(*where)).rowcount != 1:
        raise NotFound(f"Flavor access not found for {flavorid} / {project_id} combination.")
    return access(conn, flavorid)
