"""The queries about volume types."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent, insert_or_update
from micronova.embedded.common import revisions
from micronova.embedded.volume.model import TypeEncryption, TypeEncryptionColumns, VolumeType, VolumeTypeColumns
from micronova.embedded.volume.store.paging import Listed, Page, list_rows
from micronova.embedded.volume.store.resource_queries import read_one
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


def get(conn: sa.Connection, type_id: str) -> VolumeType | None:
    """Return a type by its id, or None."""
    return read_one(conn, volume_types.select().where(volume_types.c.id == type_id), VolumeType)


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
    return read_one(conn, volume_types.select().where(volume_types.c.name == name), VolumeType)


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
    return list_rows(conn, volume_types.select(), VolumeType, page, conditions)


def insert(conn: sa.Connection, type_: VolumeType) -> None:
    """Write a new type; raise Conflict if there is one of this name."""
    if not insert_if_absent(conn, volume_types, msgspec.structs.asdict(type_)):
        raise Conflict(f"Volume Type {type_.name} already exists.")


def update(conn: sa.Connection, type_: VolumeType, values: VolumeTypeColumns, now: int) -> None:
    """Change a type; raise Changed if another request has changed it meanwhile, Conflict for a name that is taken."""
    other = by_name(conn, values["name"]) if "name" in values else None
    if other is not None and other.id != type_.id:
        raise Conflict(f"Volume Type {other.name} already exists.")
    revisions.update(conn, volume_types.c.revision, type_.id, type_.revision, values, now)


def delete(conn: sa.Connection, type_: VolumeType) -> None:
    """Delete a type; raise Invalid if something has it."""
    for table, what in ((volumes, "volumes"), (snapshots, "snapshots")):
        if _is_type_of_any(conn, type_.id, table):
            raise Invalid(f"Volume Type {type_.name} deletion is not allowed: there are {what} of this type.")
    revisions.delete(conn, volume_types.c.revision, type_.id, type_.revision)


def encryption_of(conn: sa.Connection, type_id: str) -> TypeEncryption | None:
    """Return the encryption of a type, or None."""
    return read_one(conn, type_encryptions.select().where(type_encryptions.c.volume_type_id == type_id), TypeEncryption)


def insert_encryption(conn: sa.Connection, made: TypeEncryption) -> bool:
    """Write the encryption of a type; return False if it has one."""
    return insert_if_absent(conn, type_encryptions, msgspec.structs.asdict(made))


def update_encryption(
    conn: sa.Connection, type_id: str, encryption_id: str | None, values: TypeEncryptionColumns
) -> bool:
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
    return _is_type_of_any(conn, type_id, volumes)


def _is_type_of_any(conn: sa.Connection, type_id: str, table: sa.Table) -> bool:
    return conn.execute(sa.select(table.c.id).where(table.c.volume_type_id == type_id).limit(1)).first() is not None


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


def defaults(conn: sa.Connection) -> dict[str, str]:
    """Return the ids of default types, by project."""
    chosen = default_types.select().order_by(default_types.c.project_id)
    return {row.project_id: row.volume_type_id for row in conn.execute(chosen)}


def set_default(conn: sa.Connection, project_id: str, type_id: str) -> None:
    """Set the default type of a project."""
    insert_or_update(conn, default_types, {"project_id": project_id}, {"volume_type_id": type_id})


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
