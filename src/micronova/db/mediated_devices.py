"""The resource providers that devices with mediated devices are, below the compute nodes of their hosts.

A host reports such devices with its topology. Each is a provider with one inventory, of the class that the host says,
and with a trait for the type of its mediated devices. Further traits and aggregates belong to whoever sets them. A
device that its host no longer reports has nothing to give any more; its provider goes when nobody holds anything of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.db import placement_names, providers
from micronova.db.listed import one_of
from micronova.db.tables import allocations, inventories, node_topologies, resource_providers
from micronova.objects.mediated_devices import provider_uuid, trait_of
from micronova.objects.topology import MdevParent, decode_topology

_i, _p = inventories.c, resource_providers.c
_BELOW = sa.select(_p.uuid, _p.name, _p.parent_uuid).where(one_of(_p.parent_uuid, "uuids"))
_TOPOLOGIES = sa.select(node_topologies.c.node_uuid, node_topologies.c.topology).where(
    one_of(node_topologies.c.node_uuid, "uuids")
)
_STOCK = sa.select(_i.node_uuid, _i.resource_class).where(one_of(_i.node_uuid, "uuids"))
_HELD = sa.select(allocations.c.node_uuid, allocations.c.resource_class).where(
    one_of(allocations.c.node_uuid, "uuids")
)  # fmt: skip
_DELETE_STOCK = inventories.delete().where(
    _i.node_uuid == sa.bindparam("b_uuid"), _i.resource_class == sa.bindparam("b_class")
)

LONGEST_NODE = 190  # characters of a node's name in the names of providers

Reported = Mapping[str, tuple[str, Sequence[MdevParent]]]
"""What nodes have: by their uuid, the name of the node and its devices."""


def types_before(conn: sa.Connection, nodes: Sequence[str]) -> dict[str, str]:
    """Return the types of mediated devices that the last reports of nodes have named, by provider."""
    found = {}
    for row in conn.execute(_TOPOLOGIES, {"uuids": list(nodes)}):
        for parent in decode_topology(row.topology).mdevs:
            found[provider_uuid(row.node_uuid, parent.name)] = parent.mdev_type
    return found


def missing(conn: sa.Connection, nodes: Reported) -> dict[str, tuple[str, str]]:
    """Return the providers that nodes report and that do not exist: by uuid, the node and the name."""
    known = set(conn.execute(_BELOW, {"uuids": sorted(nodes)}).scalars())
    return {
        uuid: (node, f"{nodes[node][0][:LONGEST_NODE]}_{parent.name}")
        for uuid, (node, parent) in _by_provider(nodes).items()
        if uuid not in known
    }


def changed_traits(nodes: Reported, before: Mapping[str, str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the traits (provider and name) that come and go with the types of mediated devices.

    `before` are the types of the last report: a trait that somebody took away since stays away.
    """
    types = {uuid: parent.mdev_type for uuid, (_, parent) in _by_provider(nodes).items()}
    changed = {uuid: name for uuid, name in types.items() if before.get(uuid) != name}
    return (
        [(uuid, trait_of(name)) for uuid, name in changed.items()],
        [(uuid, trait_of(before[uuid])) for uuid in changed if uuid in before],
    )


def inventory_rows(conn: sa.Connection, nodes: Reported, now: int) -> list[dict[str, Any]]:
    """Return the rows of the inventories, and make their resource classes.

    An inventory that is no longer reported has a row with a total of 0.
    """
    devices = _by_provider(nodes)
    for name in sorted({parent.resource_class for _, parent in devices.values()}):
        if not placement_names.find_class(conn, name)[0]:
            placement_names.create_class(conn, name, now)
    below = conn.execute(_BELOW, {"uuids": sorted(nodes)})
    ours = devices.keys() | {row.uuid for row in below if _is_device(row)}
    amounts = {(row.node_uuid, row.resource_class): 0 for row in conn.execute(_STOCK, {"uuids": sorted(ours)})}
    amounts |= {(uuid, parent.resource_class): parent.total for uuid, (_, parent) in devices.items()}
    return [
        {
            "node_uuid": uuid,
            "resource_class": name,
            "total": total,
            "reserved": 0,
            "allocation_ratio": 1.0,
            "capacity": total,
            "used": 0,
            "changed_at": now,
        }
        for (uuid, name), total in amounts.items()
    ]


def remove_unused(conn: sa.Connection, nodes: Reported, rows: Sequence[Mapping[str, Any]]) -> None:
    """Remove inventories that are no longer reported and providers that have none, if nobody holds anything of them.

    The rows of the inventories have been written, so claims wait for this transaction, and find nothing to take.
    """
    devices = _by_provider(nodes)
    of_devices = {(uuid, parent.resource_class) for uuid, (_, parent) in devices.items()}
    empty = {(row["node_uuid"], row["resource_class"]) for row in rows} - of_devices
    below = conn.execute(_BELOW, {"uuids": sorted(nodes)})
    gone = {row.uuid for row in below if row.uuid not in devices and _is_device(row)}
    if not empty and not gone:
        return
    wanted = {"uuids": sorted(gone | {uuid for uuid, _ in empty})}
    held = {(row.node_uuid, row.resource_class) for row in conn.execute(_HELD, wanted)}
    if unused := sorted(empty - held):
        conn.execute(_DELETE_STOCK, [{"b_uuid": uuid, "b_class": name} for uuid, name in unused])
    providers.remove_unused(conn, gone - {uuid for uuid, _ in held})


def _by_provider(nodes: Reported) -> dict[str, tuple[str, MdevParent]]:
    """Return what nodes report by provider: the node, and the device."""
    return {
        provider_uuid(node, parent.name): (node, parent) for node, (_, parents) in nodes.items() for parent in parents
    }


def _is_device(row: Any) -> bool:
    """Return whether a provider below a node was made for a device: its name ends as its uuid demands."""
    name = row.name.removesuffix(f" ({row.uuid})")
    return any(
        provider_uuid(row.parent_uuid, name[end + 1 :]) == row.uuid for end, each in enumerate(name) if each == "_"
    )
