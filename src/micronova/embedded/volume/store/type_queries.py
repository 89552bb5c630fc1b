"""The queries about volume types."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common import revisions
from micronova.embedded.volume.model import TypeEncryption, VolumeType
from micronova.embedded.volume.store.paging import Listed, Page, list_rows
from micronova.embedded.volume.tables import (
    default_types,
    snapshots,
    type_encryptions,
    volume_type_projects,
    volume_types,
    volumes,
)
from micronova.objects.errors import Conflict, Invalid, NotFound

SORTABLE: Mapping[str, sa.Column[Any]] = {
    name: volume_types.c[name] for name in ("id", "name", "is_public", "created_at", "updated_at")
}

_TYPE = sa.select(volume_types)


def get(conn: sa.Connection, type_id: str) -> VolumeType | None:
    """Return a type by its id, or None."""
    return _one(conn, volume_types.c.id == type_id)


def existing(conn: sa.Connection, type_id: str) -> VolumeType:
    """Return a type by its id; raise NotFound."""
    found = get(conn, type_id)
    if found is None:
        raise NotFound(f"Volume type {type_id[:64]} could not be found.")
    return found


def lock(conn: sa.Connection, type_id: str) -> None:
    """Keep others from changing a type, and from making volumes of it, until the transaction ends."""
    conn.execute(sa.select(volume_types.c.id).where(volume_types.c.id == type_id).with_for_update())


def by_name(conn: sa.Connection, name: str) -> VolumeType | None:
    """Return a type by its name, or None."""
    return _one(conn, volume_types.c.name == name)


def usable(conn: sa.Connection, named: str, project_id: str, is_admin: bool) -> VolumeType | None:
    """Return the type with an id or a name that a project may use, or None."""
    found = get(conn, named) or by_name(conn, named)
    if found is None or found.is_public or is_admin:
        return found
    return found if project_id in projects(conn, found.id) else None


def projects(conn: sa.Connection, type_id: str) -> list[str]:
    """Return the projects that may use a type that is not public."""
    chosen = sa.select(volume_type_projects.c.project_id).where(volume_type_projects.c.volume_type_id == type_id)
    return list(conn.execute(chosen.order_by(volume_type_projects.c.project_id)).scalars())


def visible_to(project_id: str) -> sa.ColumnElement[bool]:
    """Return the condition that a project may use a type."""
    access = volume_type_projects.c
    named = sa.exists().where(access.volume_type_id == volume_types.c.id, access.project_id == project_id)
    return sa.or_(volume_types.c.is_public, named)


def list_types(conn: sa.Connection, page: Page, conditions: Sequence[sa.ColumnElement[bool]]) -> Listed[VolumeType]:
    """Return a page of types."""
    return list_rows(conn, _TYPE, VolumeType, page, conditions)


def insert(conn: sa.Connection, type_: VolumeType) -> None:
    """Write a new type; raise Conflict if there is one of this name."""
    if not insert_if_absent(conn, volume_types, msgspec.structs.asdict(type_)):
        raise Conflict(f"Volume Type {type_.name} already exists.")


def update(conn: sa.Connection, type_: VolumeType, values: Mapping[str, Any], now: int) -> None:
    """Change a type; raise Changed if another request has changed it meanwhile, Conflict for a name that is taken."""
    other = by_name(conn, values["name"]) if "name" in values else None
    if other is not None and other.id != type_.id:
        raise Conflict(f"Volume Type {other.name} already exists.")
    revisions.update(conn, volume_types.c.revision, type_.id, type_.revision, values, now)


def delete(conn: sa.Connection, type_: VolumeType) -> None:
    """Delete a type; raise Invalid if something has it."""
    for table, what in ((volumes, "volumes"), (snapshots, "snapshots")):
        if conn.execute(sa.select(table.c.id).where(table.c.volume_type_id == type_.id).limit(1)).first():
            raise Invalid(f"Volume Type {type_.name} deletion is not allowed: there are {what} of this type.")
    revisions.delete(conn, volume_types.c.revision, type_.id, type_.revision)


def encryption_of(conn: sa.Connection, type_id: str) -> TypeEncryption | None:
    """Return the encryption of a type, or None."""
    row = conn.execute(type_encryptions.select().where(type_encryptions.c.volume_type_id == type_id)).one_or_none()
    return None if row is None else TypeEncryption(**row._mapping)


def insert_encryption(conn: sa.Connection, row: Mapping[str, Any]) -> bool:
    """Write the encryption of a type; return False if it has one."""
    return insert_if_absent(conn, type_encryptions, row)


def update_encryption(conn: sa.Connection, type_id: str, encryption_id: str | None, values: Mapping[str, Any]) -> bool:
    """Change the encryption of a type, with this id unless that is None; return whether there is one."""
    statement = type_encryptions.update().where(*_encryption(type_id, encryption_id)).values(values)
    return conn.execute(statement).rowcount > 0


def delete_encryption(conn: sa.Connection, type_id: str, encryption_id: str | None) -> bool:
    """Delete the encryption of a type, with this id unless that is None; return whether there is one."""
    return conn.execute(type_encryptions.delete().where(*_encryption(type_id, encryption_id))).rowcount > 0


def _encryption(type_id: str, encryption_id: str | None) -> tuple[sa.ColumnElement[bool], ...]:
    mine = type_encryptions.c.volume_type_id == type_id
    return (mine,) if encryption_id is None else (mine, type_encryptions.c.encryption_id == encryption_id)


def has_volumes(conn: sa.Connection, type_id: str) -> bool:
    """Return whether volumes have a type."""
    return conn.execute(sa.select(volumes.c.id).where(volumes.c.volume_type_id == type_id).limit(1)).first() is not None


def add_project(conn: sa.Connection, type_id: str, project_id: str) -> None:
    """Let a project use a type; raise Conflict if it may already."""
    if not insert_if_absent(conn, volume_type_projects, {"volume_type_id": type_id, "project_id": project_id}):
        raise Conflict(f"Volume type access for {type_id} / {project_id[:64]} combination already exists.")


def remove_project(conn: sa.Connection, type_id: str, project_id: str) -> None:
    """Take a type from a project; raise NotFound if it has no access."""
    access = volume_type_projects.c
    done = conn.execute(
        volume_type_projects.delete().where(access.volume_type_id == type_id, access.project_id == project_id)
    )
    if not done.rowcount:
        raise NotFound(f"Volume type access not found for {type_id} / {project_id[:64]} combination.")


def default_of(conn: sa.Connection, project_id: str, name: str) -> VolumeType | None:
    """Return the type of new volumes of a project: its own default, or the one of this name."""
    chosen = sa.select(default_types.c.volume_type_id).where(default_types.c.project_id == project_id)
    own = conn.execute(chosen).scalar_one_or_none()
    return by_name(conn, name) if own is None else get(conn, own)


def defaults(conn: sa.Connection) -> list[tuple[str, str]]:
    """Return the projects with a default type, and the ids of these."""
    chosen = default_types.select().order_by(default_types.c.project_id)
    return [(row.project_id, row.volume_type_id) for row in conn.execute(chosen)]


def set_default(conn: sa.Connection, project_id: str, type_id: str) -> None:
    """Set the default type of a project."""
    row = {"project_id": project_id, "volume_type_id": type_id}
    if not insert_if_absent(conn, default_types, row):
        mine = default_types.c.project_id == project_id
        conn.execute(default_types.update().where(mine).values(volume_type_id=type_id))


def unset_default(conn: sa.Connection, project_id: str) -> None:
    """Let a project have the default type of the cloud."""
    conn.execute(default_types.delete().where(default_types.c.project_id == project_id))


def ensure(conn: sa.Connection, type_: VolumeType) -> None:
    """Create a type unless there is one of this name."""
    insert_if_absent(conn, volume_types, msgspec.structs.asdict(type_))


def names(conn: sa.Connection, project_id: str | None = None) -> Mapping[str, str]:
    """Return the names of all types by id, or of those that a project may use."""
    chosen = sa.select(volume_types.c.id, volume_types.c.name)
    rows = conn.execute(chosen if project_id is None else chosen.where(visible_to(project_id)))
    return {row.id: row.name for row in rows}


def _one(conn: sa.Connection, condition: sa.ColumnElement[bool]) -> VolumeType | None:
    row = conn.execute(_TYPE.where(condition)).one_or_none()
    return None if row is None else VolumeType(**row._mapping)
