"""Custom traits and resource classes: the names that a cloud adds to OpenStack's."""

from collections.abc import Collection

import sqlalchemy as sa

from micronova.db.listed import one_of
from micronova.db.tables import (
    allocations,
    inventories,
    node_topologies,
    provider_traits,
    resource_classes,
    topology_claims,
    traits,
)
from micronova.db.upsert import insert_if_absent
from micronova.objects.errors import Conflict, Invalid, NotFound
from micronova.placement.standard import standard_classes, standard_traits

_t, _c = traits.c, resource_classes.c


def list_traits(
    conn: sa.Connection, *, names: Collection[str] | None, prefix: str | None, associated: bool | None
) -> dict[str, int | None]:
    """Return traits and when they were added (None: standard): those with these names, or this prefix, or in use."""
    found: dict[str, int | None] = dict.fromkeys(sorted(standard_traits()))
    found |= {row.name: row.created_at for row in conn.execute(sa.select(traits).order_by(_t.name))}
    if names is not None:
        found = {name: at for name, at in found.items() if name in names}
    if prefix is not None:
        found = {name: at for name, at in found.items() if name.startswith(prefix)}
    if associated is not None:
        used = set(conn.execute(sa.select(provider_traits.c.trait).distinct()).scalars())
        found = {name: at for name, at in found.items() if (name in used) == associated}
    return found


def find_trait(conn: sa.Connection, name: str) -> tuple[bool, int | None]:
    """Return whether there is such a trait, and when it was added."""
    if name in standard_traits():
        return True, None
    row = conn.execute(sa.select(_t.created_at).where(_t.name == name)).first()
    return row is not None, row.created_at if row is not None else None


def create_trait(conn: sa.Connection, name: str, now: int) -> bool:
    """Add a trait; return whether it is new."""
    return insert_if_absent(conn, traits, {"name": name, "created_at": now})


def delete_trait(conn: sa.Connection, name: str) -> None:
    """Remove a trait; raise NotFound, Invalid for a standard one, Conflict for one that a provider has."""
    if name in standard_traits():
        raise Invalid(f"Cannot delete standard trait {name}.")
    if conn.execute(sa.select(_t.name).where(_t.name == name).with_for_update()).first() is None:
        raise NotFound(f"No such trait(s): {name}.")
    if conn.execute(sa.select(provider_traits.c.trait).where(provider_traits.c.trait == name).limit(1)).first():
        raise Conflict(f"The trait {name} is in use by a resource provider.")
    conn.execute(sa.delete(traits).where(_t.name == name))


def delete_unused_traits(conn: sa.Connection, names: Collection[str]) -> None:
    """Remove those of the custom traits that no provider has."""
    if names:
        used = sa.exists().where(provider_traits.c.trait == _t.name)
        conn.execute(sa.delete(traits).where(one_of(_t.name, "names"), ~used), {"names": sorted(names)})


def unknown_traits(conn: sa.Connection, names: Collection[str], *, keep: bool = False) -> list[str]:
    """Return those of the names that no trait has; with `keep`, the others stay until the transaction ends."""
    custom = sorted(set(names) - standard_traits())
    if not custom:
        return []
    query = sa.select(_t.name).where(one_of(_t.name, "names")).order_by(_t.name)
    known = set(conn.execute(query.with_for_update(read=True) if keep else query, {"names": custom}).scalars())
    return [name for name in custom if name not in known]


def list_classes(conn: sa.Connection) -> dict[str, int | None]:
    """Return the resource classes and when they were added (None: standard)."""
    found: dict[str, int | None] = dict.fromkeys(standard_classes())
    rows = conn.execute(sa.select(resource_classes).order_by(_c.created_at, _c.name))
    return found | {row.name: row.created_at for row in rows}


def find_class(conn: sa.Connection, name: str) -> tuple[bool, int | None]:
    """Return whether there is such a resource class, and when it was added."""
    if name in standard_classes():
        return True, None
    row = conn.execute(sa.select(_c.created_at).where(_c.name == name)).first()
    return row is not None, row.created_at if row is not None else None


def create_class(conn: sa.Connection, name: str, now: int) -> bool:
    """Add a resource class; return whether it is new."""
    return insert_if_absent(conn, resource_classes, {"name": name, "created_at": now})


def rename_class(conn: sa.Connection, name: str, new_name: str) -> None:
    """Rename a custom resource class; raise NotFound, Invalid for a standard one, Conflict if one has the new name.

    Raise Conflict, too, if hosts report devices of this class, or ports of servers hold it: both name it, and hosts
    would go on to do so.
    """
    if name in standard_classes():
        raise Invalid(f"Cannot update standard resource class {name}.")
    _lock_class(conn, name)
    if new_name != name and find_class(conn, new_name)[0]:
        raise Conflict(f"Resource class already exists: {new_name}.")
    if new_name != name and _is_named(conn, name):
        raise Conflict(f"Resource class {name} cannot be renamed: devices of hosts or ports of servers have it.")
    # A claim that runs now has locked the inventory: its allocations are there when this has the lock.
    for table in (inventories, allocations):
        conn.execute(sa.update(table).where(table.c.resource_class == name).values(resource_class=new_name))
    conn.execute(sa.update(resource_classes).where(_c.name == name).values(name=new_name))


def _is_named(conn: sa.Connection, name: str) -> bool:
    """Return whether what a host reports, or what a server holds for its ports, names a resource class."""
    texts = (node_topologies.c.topology, topology_claims.c.assignment)
    named = (sa.select(sa.literal(1)).where(text.contains(f'"{name}"', autoescape=True)).limit(1) for text in texts)
    return any(conn.execute(each).first() is not None for each in named)


def delete_class(conn: sa.Connection, name: str) -> None:
    """Remove a resource class; raise NotFound, Invalid for a standard one, Conflict for one with inventories."""
    if name in standard_classes():
        raise Invalid(f"Error in delete resource class: Cannot delete standard resource class {name}.")
    _lock_class(conn, name)
    if conn.execute(sa.select(inventories.c.node_uuid).where(inventories.c.resource_class == name).limit(1)).first():
        raise Conflict(f"Error in delete resource class: Class is in use in inventory: {name}.")
    conn.execute(sa.delete(resource_classes).where(_c.name == name))


def delete_unused_classes(conn: sa.Connection, names: Collection[str]) -> None:
    """Remove those of the custom resource classes that have no inventories, and that no other transaction uses."""
    custom = sorted(set(names) - set(standard_classes()))
    if not custom:
        return
    free = sa.select(_c.name).where(one_of(_c.name, "names")).order_by(_c.name).with_for_update(skip_locked=True)
    found = set(conn.execute(free, {"names": custom}).scalars())
    stock = sa.select(inventories.c.resource_class).where(one_of(inventories.c.resource_class, "names")).distinct()
    if unused := sorted(found - set(conn.execute(stock, {"names": sorted(found)}).scalars())):
        conn.execute(sa.delete(resource_classes).where(one_of(_c.name, "names")), {"names": unused})


def _lock_class(conn: sa.Connection, name: str) -> None:
    if conn.execute(sa.select(_c.name).where(_c.name == name).with_for_update()).first() is None:
        raise NotFound(f"No such resource class {name}.")


def unknown_classes(conn: sa.Connection, names: Collection[str], *, keep: bool = False) -> list[str]:
    """Return those of the names that no resource class has; with `keep`, the others stay until the transaction ends."""
    custom = sorted(set(names) - set(standard_classes()))
    if not custom:
        return []
    query = sa.select(_c.name).where(one_of(_c.name, "names")).order_by(_c.name)
    known = set(conn.execute(query.with_for_update(read=True) if keep else query, {"names": custom}).scalars())
    return [name for name in custom if name not in known]
