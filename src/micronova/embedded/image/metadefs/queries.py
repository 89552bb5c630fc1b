"""The queries about metadata definitions. Every function runs in one transaction."""

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.db import keyset
from micronova.db.keyset import SortKey
from micronova.db.upsert import insert_if_absent
from micronova.embedded.common.chunks import chunks
from micronova.embedded.image.listing import Page
from micronova.embedded.image.metadefs.bodies import MAX_ITEMS
from micronova.embedded.image.metadefs.model import Association, Contents, Item, Kind, Namespace, ResourceType
from micronova.embedded.image.tables import (
    metadef_associations,
    metadef_items,
    metadef_namespaces,
    metadef_resource_types,
)
from micronova.objects.errors import Conflict, Forbidden, NotFound, TooLarge

_ITEM = (metadef_items.c.name, metadef_items.c.definition, metadef_items.c.created_at, metadef_items.c.updated_at)


def no_namespace(name: str) -> NotFound:
    """Return the error for a namespace that does not exist or that the caller may not see."""
    return NotFound(f"There is no metadata definition namespace {name[:80]}.")


# --- namespaces ---


def get(conn: sa.Connection, name: str) -> Namespace | None:
    """Return a namespace by its name."""
    row = conn.execute(sa.select(metadef_namespaces).where(metadef_namespaces.c.namespace == name)).one_or_none()
    return Namespace(**row._mapping) if row is not None else None


def list_namespaces(
    conn: sa.Connection,
    page: Page,
    caller: str,
    is_admin: bool,
    visibility: str | None,
    resource_types: Sequence[str],
) -> tuple[list[Namespace], bool] | None:
    """Return a page of the namespaces that a caller may see, and whether more follow; None without the marker."""
    table = metadef_namespaces
    statement = sa.select(table)
    if not is_admin:
        own = table.c.owner == caller if caller else sa.false()
        statement = statement.where(sa.or_(table.c.visibility == "public", own))
    if visibility is not None:
        statement = statement.where(table.c.visibility == visibility)
    if resource_types:
        associated = sa.exists().where(
            metadef_associations.c.namespace_id == table.c.id, metadef_associations.c.name.in_(resource_types)
        )
        statement = statement.where(associated)
    keys = [SortKey(table.c[page.sort_key], page.descending), SortKey(table.c.id, page.descending)]
    after = None
    if page.marker is not None:
        mark = get(conn, page.marker)
        if mark is None or not mark.is_visible_to(caller, is_admin):
            return None
        after = [getattr(mark, page.sort_key), mark.id]
    rows, more = keyset.fetch(conn, statement, keys, after, page.limit)
    return [Namespace(**row._mapping) for row in rows], more


def create(conn: sa.Connection, namespace: Namespace, contents: Contents) -> None:
    """Insert a namespace with all that is in it; raise Conflict if its name is in use."""
    if not insert_if_absent(conn, metadef_namespaces, msgspec.structs.asdict(namespace)):
        raise Conflict(f"There is a metadata definition namespace {namespace.namespace} already.")
    for association in contents.associations:
        _insert_association(conn, namespace.id, association)
    for kind, items in contents.items.items():
        _insert_items(conn, namespace.id, kind, items)


def replace(conn: sa.Connection, id: str, new: Namespace) -> None:
    """Change a namespace's own attributes; raise NotFound, or Conflict if its new name is in use."""
    table = metadef_namespaces
    _lock(conn, id, new.namespace)
    taken = sa.select(table.c.id).where(table.c.namespace == new.namespace, table.c.id != id)
    if conn.execute(taken).first():
        raise Conflict(f"There is a metadata definition namespace {new.namespace} already.")
    values = {name: value for name, value in msgspec.structs.asdict(new).items() if name not in ("id", "created_at")}
    conn.execute(table.update().where(table.c.id == id).values(values))


def delete(conn: sa.Connection, namespace: Namespace) -> None:
    """Delete a namespace and all that is in it; raise Forbidden if it is protected."""
    _lock_unprotected(conn, namespace)
    conn.execute(metadef_namespaces.delete().where(metadef_namespaces.c.id == namespace.id))


def contents(conn: sa.Connection, id: str) -> Contents:
    """Return all that is in a namespace."""
    table = metadef_items
    found: dict[Kind, list[Item]] = {kind: [] for kind in Kind}
    for row in conn.execute(
        sa.select(table.c.kind, *_ITEM).where(table.c.namespace_id == id).order_by(table.c.created_at, table.c.name)
    ):
        found[Kind(row.kind)].append(_item(row))
    return Contents(items=found, associations=associations(conn, [id]).get(id, []))


# --- objects, properties and tags ---


def items(conn: sa.Connection, id: str, kind: Kind, page: Page) -> list[Item] | None:
    """Return the definitions of one kind in a namespace; None without the marker."""
    table = metadef_items
    statement = sa.select(*_ITEM).where(table.c.namespace_id == id, table.c.kind == kind.value)
    keys = [SortKey(table.c[page.sort_key], page.descending), SortKey(table.c.name, page.descending)]
    after = None
    if page.marker is not None:
        mark = item(conn, id, kind, page.marker)
        if mark is None:
            return None
        after = [getattr(mark, page.sort_key), mark.name]
    rows, _ = keyset.fetch(conn, statement, keys, after, page.limit)
    return [_item(row) for row in rows]


def item(conn: sa.Connection, id: str, kind: Kind, name: str) -> Item | None:
    """Return one definition."""
    row = conn.execute(sa.select(*_ITEM).where(*_is(id, kind, name))).one_or_none()
    return _item(row) if row is not None else None


def add_items(conn: sa.Connection, namespace: Namespace, kind: Kind, new: Sequence[Item]) -> None:
    """Add definitions; raise Conflict if one of them exists, TooLarge if there would be too many."""
    _lock(conn, namespace.id, namespace.namespace)
    _insert_items(conn, namespace.id, kind, new)


def replace_items(conn: sa.Connection, namespace: Namespace, kind: Kind, new: Sequence[Item]) -> None:
    """Put these definitions in the place of all definitions of the kind."""
    _lock(conn, namespace.id, namespace.namespace)
    conn.execute(metadef_items.delete().where(*_is(namespace.id, kind)))
    _insert_items(conn, namespace.id, kind, new)


def change_item(conn: sa.Connection, namespace: Namespace, kind: Kind, name: str, new: Item) -> Item:
    """Change a definition, perhaps its name too, and return it; raise NotFound or Conflict."""
    _lock(conn, namespace.id, namespace.namespace)
    old = item(conn, namespace.id, kind, name)
    if old is None:
        raise no_item(kind, name)
    if new.name != name and item(conn, namespace.id, kind, new.name) is not None:
        raise Conflict(f"The namespace has a {kind.value} {new.name} already.")
    values = {"name": new.name, "definition": new.definition, "updated_at": new.updated_at}
    conn.execute(metadef_items.update().where(*_is(namespace.id, kind, name)).values(values))
    return msgspec.structs.replace(new, created_at=old.created_at)


def delete_item(conn: sa.Connection, namespace: Namespace, kind: Kind, name: str) -> None:
    """Delete a definition; raise NotFound, or Forbidden if the namespace is protected."""
    if item(conn, namespace.id, kind, name) is None:
        raise no_item(kind, name)
    _lock_unprotected(conn, namespace)
    conn.execute(metadef_items.delete().where(*_is(namespace.id, kind, name)))


def delete_items(conn: sa.Connection, namespace: Namespace, kind: Kind) -> None:
    """Delete all definitions of a kind; raise Forbidden if the namespace is protected."""
    _lock_unprotected(conn, namespace)
    conn.execute(metadef_items.delete().where(*_is(namespace.id, kind)))


def no_item(kind: Kind, name: str) -> NotFound:
    """Return the error for a definition that does not exist."""
    return NotFound(f"The namespace has no {kind.value} {name[:80]}.")


# --- resource types ---


def resource_types(conn: sa.Connection) -> list[ResourceType]:
    """Return all resource types that definitions may be for, by name."""
    table = metadef_resource_types
    return [ResourceType(**row._mapping) for row in conn.execute(sa.select(table).order_by(table.c.name))]


def ensure_resource_types(conn: sa.Connection, names: Sequence[str], now: int) -> None:
    """Add the resource types that are missing."""
    for name in names:
        insert_if_absent(conn, metadef_resource_types, {"name": name, "created_at": now, "updated_at": now})


def associations(conn: sa.Connection, ids: Sequence[str]) -> dict[str, list[Association]]:
    """Return the associations of namespaces by the id of the namespace."""
    table = metadef_associations
    found: dict[str, list[Association]] = {}
    for part in chunks(ids):
        for row in conn.execute(sa.select(table).where(table.c.namespace_id.in_(part)).order_by(table.c.name)):
            values = dict(row._mapping)
            found.setdefault(values.pop("namespace_id"), []).append(Association(**values))
    return found


def associate(conn: sa.Connection, namespace: Namespace, association: Association) -> None:
    """Associate a namespace with a resource type, which need not be known; raise Conflict if it is associated."""
    _lock(conn, namespace.id, namespace.namespace)
    _insert_association(conn, namespace.id, association)
    counted = sa.select(sa.func.count()).where(metadef_associations.c.namespace_id == namespace.id)
    if conn.execute(counted).scalar_one() > MAX_ITEMS:
        raise TooLarge(f"A namespace may be associated with {MAX_ITEMS} resource types.")


def dissociate(conn: sa.Connection, namespace: Namespace, name: str) -> None:
    """Remove an association; raise NotFound, or Forbidden if the namespace is protected."""
    table = metadef_associations
    mine = (table.c.namespace_id == namespace.id, table.c.name == name)
    if conn.execute(sa.select(table.c.name).where(*mine)).first() is None:
        raise NotFound(f"The namespace is not associated with the resource type {name[:80]}.")
    _lock_unprotected(conn, namespace)
    conn.execute(table.delete().where(*mine))


# --- parts ---


def _lock(conn: sa.Connection, id: str, name: str) -> bool:
    """Let one transaction at a time change a namespace; return whether it is protected."""
    table = metadef_namespaces
    row = conn.execute(sa.select(table.c.protected).where(table.c.id == id).with_for_update()).one_or_none()
    if row is None:
        raise no_namespace(name)
    return bool(row.protected)


def _lock_unprotected(conn: sa.Connection, namespace: Namespace) -> None:
    """Lock a namespace; raise Forbidden if it is protected."""
    if _lock(conn, namespace.id, namespace.namespace):
        raise Forbidden(
            f"Namespace {namespace.namespace} is protected: set 'protected' to false before deleting anything of it."
        )


def _is(id: str, kind: Kind, name: str | None = None) -> list[sa.ColumnElement[bool]]:
    table = metadef_items
    found = [table.c.namespace_id == id, table.c.kind == kind.value]
    return found if name is None else [*found, table.c.name == name]


def _item(row: Any) -> Item:
    return Item(name=row.name, definition=row.definition, created_at=row.created_at, updated_at=row.updated_at)


def _insert_items(conn: sa.Connection, id: str, kind: Kind, new: Sequence[Item]) -> None:
    for each in new:
        values = {"namespace_id": id, "kind": kind.value, **msgspec.structs.asdict(each)}
        if not insert_if_absent(conn, metadef_items, values):
            raise Conflict(f"The namespace has a {kind.value} {each.name} already.")
    if conn.execute(sa.select(sa.func.count()).where(*_is(id, kind))).scalar_one() > MAX_ITEMS:
        raise TooLarge(f"A namespace may have {MAX_ITEMS} definitions of the kind {kind.value}.")


def _insert_association(conn: sa.Connection, id: str, association: Association) -> None:
    ensure_resource_types(conn, [association.name], association.created_at)
    if not insert_if_absent(conn, metadef_associations, {"namespace_id": id, **msgspec.structs.asdict(association)}):
        raise Conflict(f"The namespace is associated with the resource type {association.name} already.")
