"""Inventories of resource providers, as the Placement API reads and writes them.

`used` belongs to the claims: writing an inventory leaves it alone. An inventory of which something is used cannot be
removed; its capacity may become less than what is used, and then nothing more is taken.
"""

from collections.abc import Collection, Mapping
from typing import Any, Protocol, TypedDict, cast

import sqlalchemy as sa

from micronova.db import placement_names, providers, topologies
from micronova.db.providers import ProviderRow
from micronova.db.tables import inventories
from micronova.objects.errors import Conflict, Invalid, NotFound
from micronova.placement.model import capacity

_i = inventories.c
FIELDS = ("total", "reserved", "min_unit", "max_unit", "step_size", "allocation_ratio")


class InventoryRow(Protocol):
    """A row of `inventories`."""

    node_uuid: str
    resource_class: str
    total: int
    reserved: int
    min_unit: int
    max_unit: int
    step_size: int
    allocation_ratio: float
    capacity: int
    used: int
    changed_at: int


class Inventory(TypedDict):
    """What clients say of an inventory: FIELDS."""

    total: int
    reserved: int
    min_unit: int
    max_unit: int
    step_size: int
    allocation_ratio: float


class _Columns(Inventory):
    """The columns of `inventories`, without what belongs to the claims."""

    node_uuid: str
    resource_class: str
    capacity: int
    changed_at: int


class ReportedInventory(TypedDict):
    """An inventory as the report of a host writes it: `is_fixed` if clients may not change its allocation ratio."""

    node_uuid: str
    resource_class: str
    total: int
    reserved: int
    max_unit: int
    allocation_ratio: float
    capacity: int
    used: int
    changed_at: int
    is_fixed: bool


def list_(conn: sa.Connection, uuid: str) -> list[InventoryRow]:
    """Return the inventories of a provider."""
    query = sa.select(inventories).where(_i.node_uuid == uuid).order_by(_i.resource_class)
    return [cast(InventoryRow, row) for row in conn.execute(query)]


def find(conn: sa.Connection, uuid: str, name: str) -> InventoryRow | None:
    """Return a provider's inventory of a resource class, or None."""
    query = sa.select(inventories).where(_i.node_uuid == uuid, _i.resource_class == name)
    return cast("InventoryRow | None", conn.execute(query).first())


def add(conn: sa.Connection, uuid: str, name: str, values: Inventory, generation: int | None, now: int) -> None:
    """Give a provider an inventory; raise NotFound for an unknown class, Conflict if it has one."""
    wrong = f"Unable to create inventory for resource provider {uuid}:"
    providers.touch(conn, uuid, now)
    providers.advance(conn, uuid, generation, now, f"{wrong} {providers.GENERATION_CONFLICT}")
    _check_classes(conn, [name])
    if find(conn, uuid, name) is not None:
        raise Conflict(f"Update conflict: {wrong} it has an inventory of {name}; update that one.")
    conn.execute(inventories.insert(), _columns(uuid, name, values, now))


def change(conn: sa.Connection, uuid: str, name: str, values: Inventory, generation: int | None, now: int) -> None:
    """Change an inventory; raise Invalid if the provider has none."""
    providers.touch(conn, uuid, now)
    topologies.follow_ratios(conn, uuid, {name: values["allocation_ratio"]}, now)
    providers.advance(conn, uuid, generation, now, f"Update conflict: {providers.GENERATION_CONFLICT}")
    _check_classes(conn, [name])
    row = _columns(uuid, name, values, now)
    if (
        conn.execute(sa.update(inventories).where(_i.node_uuid == uuid, _i.resource_class == name).values(row)).rowcount
        != 1
    ):
        raise Invalid(
            f"Unable to update inventory for resource provider {uuid}: No inventory record with resource class {name}."
        )


def replace_all(
    conn: sa.Connection,
    uuid: str,
    wanted: Mapping[str, Inventory],
    generation: int | None,
    now: int,
    *,
    is_reshape: bool = False,
) -> None:
    """Give a provider exactly these inventories; raise Conflict if one that is in use is missing among them.

    A reshape has locked what comes after topologies, so that these follow with the next report of the host.
    """
    providers.touch(conn, uuid, now)
    if not is_reshape:
        topologies.follow_ratios(conn, uuid, {name: each["allocation_ratio"] for name, each in wanted.items()}, now)
    providers.advance(conn, uuid, generation, now)
    _check_classes(conn, wanted)
    known = {row.resource_class: row for row in providers.lock_inventories(conn, [uuid])}
    remove_unused(conn, uuid, [row for name, row in known.items() if name not in wanted])
    for name, values in sorted(wanted.items()):
        row = _columns(uuid, name, values, now)
        if name not in known:
            conn.execute(inventories.insert(), row)
        elif {each: getattr(known[name], each) for each in FIELDS} != values:
            conn.execute(sa.update(inventories).where(_i.node_uuid == uuid, _i.resource_class == name).values(row))


def add_missing(conn: sa.Connection, uuid: str, wanted: Mapping[str, Inventory], now: int) -> None:
    """Give a provider those of the inventories that it has not, and change the others."""
    _check_classes(conn, wanted)
    known = {row.resource_class: row for row in providers.lock_inventories(conn, [uuid])}
    for name, values in sorted(wanted.items()):
        row = _columns(uuid, name, values, now)
        if name not in known:
            conn.execute(inventories.insert(), row)
        else:
            conn.execute(sa.update(inventories).where(_i.node_uuid == uuid, _i.resource_class == name).values(row))
    if wanted:
        providers.advance(conn, uuid, None, now)


def remove(conn: sa.Connection, uuid: str, name: str | None, now: int) -> ProviderRow:
    """Remove one inventory of a provider, or all of them; raise NotFound or Conflict. Return the provider."""
    found = providers.get(conn, uuid)
    providers.touch(conn, uuid, now)
    providers.advance(conn, uuid, None, now)
    rows = [row for row in providers.lock_inventories(conn, [uuid]) if name is None or row.resource_class == name]
    if name is not None and not rows:
        raise NotFound(f"No inventory of class {name} found for delete.")
    remove_unused(conn, uuid, rows)
    return found


def remove_unused(conn: sa.Connection, uuid: str, rows: list[Any]) -> None:
    """Remove inventories that are locked; raise Conflict if something of them is used."""
    used = [row.resource_class for row in rows if row.used]
    if used:
        order = {name: number for number, name in enumerate(placement_names.list_classes(conn))}
        names = ", ".join(sorted(used, key=lambda name: (order.get(name, len(order)), name)))
        raise Conflict(
            f"Inventory for '{names}' on resource provider '{uuid}' in use.", placement_code="placement.inventory.inuse"
        )
    for row in rows:
        conn.execute(sa.delete(inventories).where(_i.node_uuid == uuid, _i.resource_class == row.resource_class))


def _check_classes(conn: sa.Connection, names: Collection[str]) -> None:
    if unknown := placement_names.unknown_classes(conn, names, keep=True):
        raise UnknownClass(f"No such resource class {', '.join(unknown)}.")


class UnknownClass(Invalid):
    """A resource class that is not there (400)."""


def _columns(uuid: str, name: str, values: Inventory, now: int) -> _Columns:
    return {
        **values,
        "node_uuid": uuid,
        "resource_class": name,
        "capacity": capacity(values["total"], values["reserved"], float(values["allocation_ratio"])),
        "changed_at": now,
    }
