"""The resource providers that devices with mediated devices are, below the compute nodes of their hosts.

A host reports such devices with its topology. Each is a provider with one inventory, of the class that the host says,
and with a trait for the type of its mediated devices. Further traits and aggregates belong to whoever sets them. A
device that its host no longer reports has nothing to give any more; its provider is removed when no consumer holds
any of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.db import placement_names, providers
from micronova.db.listed import one_of
from micronova.db.provider_inventories import ReportedInventory
from micronova.db.tables import allocations, inventories, node_topologies, resource_providers
from micronova.objects.mediated_devices import provider_uuid, trait_of
from micronova.objects.topology import LONGEST_MDEV_PARENT, MdevParent, usable_topology
from micronova.placement.model import whole
from micronova.placement.standard import standard_traits

_i, _p = inventories.c, resource_providers.c
_BELOW = sa.select(_p.uuid, _p.name, _p.parent_uuid).where(one_of(_p.parent_uuid, "uuids"))
_TOPOLOGIES = sa.select(node_topologies.c.node_uuid, node_topologies.c.topology).where(
    one_of(node_topologies.c.node_uuid, "uuids")
)
_INVENTORIES = sa.select(_i.node_uuid, _i.resource_class).where(one_of(_i.node_uuid, "uuids"))
_HELD = sa.select(allocations.c.node_uuid, allocations.c.resource_class).where(
    one_of(allocations.c.node_uuid, "uuids")
)  # fmt: skip
_DELETE_INVENTORY = inventories.delete().where(
    _i.node_uuid == sa.bindparam("b_uuid"), _i.resource_class == sa.bindparam("b_class")
)

LONGEST_NODE = 190  # characters of a node's name in the names of providers

Reported = Mapping[str, tuple[str, Sequence[MdevParent]]]
"""What nodes have: by their uuid, the name of the node and its devices."""


class MediatedDevices:
    """The devices of some nodes: those of a report, beside those of the report before it."""

    def __init__(self, conn: sa.Connection, nodes: Reported) -> None:
        """Read what the nodes had reported before; their new topologies are recorded afterwards."""
        self._conn = conn
        self._nodes = nodes
        self._devices = {
            provider_uuid(node, parent.name): (node, parent)
            for node, (_, parents) in nodes.items()
            for parent in parents
        }
        self._before: dict[str, MdevParent] = {}
        if nodes:
            for row in conn.execute(_TOPOLOGIES, {"uuids": sorted(nodes)}):
                for parent in usable_topology(row.topology).mdevs:
                    self._before[provider_uuid(row.node_uuid, parent.name)] = parent
        self._below: Sequence[Any] = ()

    def missing(self) -> dict[str, tuple[str, str]]:
        """Return the providers that are reported and that do not exist: by uuid, the node and the name."""
        self._below = self._conn.execute(_BELOW, {"uuids": sorted(self._nodes)}).all() if self._nodes else ()
        known = {row.uuid for row in self._below}
        return {
            uuid: (node, f"{self._nodes[node][0][:LONGEST_NODE]}_{parent.name}")
            for uuid, (node, parent) in self._devices.items()
            if uuid not in known
        }

    def changed_traits(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Return the traits (provider and name) that come and go with the types of mediated devices.

        Only a type that is new counts: a trait that a client has removed since the last report is not set again.
        """
        types = {uuid: parent.mdev_type for uuid, (_, parent) in self._devices.items()}
        before = {uuid: parent.mdev_type for uuid, parent in self._before.items()}
        changed = {uuid: name for uuid, name in types.items() if before.get(uuid) != name}
        return (
            [(uuid, trait_of(name)) for uuid, name in changed.items()],
            [(uuid, trait_of(before[uuid])) for uuid in changed if uuid in before],
        )

    def inventory_rows(self, now: int) -> list[ReportedInventory]:
        """Return the rows of the inventories, and make their resource classes, if they are new.

        An inventory that is no longer reported has a row with a total of 0.
        """
        if not self._nodes:
            return []
        new = {
            parent.resource_class
            for uuid, (_, parent) in self._devices.items()
            if uuid not in self._before or self._before[uuid].resource_class != parent.resource_class
        }
        for name in placement_names.unknown_classes(self._conn, new):
            placement_names.create_class(self._conn, name, now)
        ours = sorted(self._devices.keys() | self._gone())
        amounts = {(row.node_uuid, row.resource_class): 0 for row in self._conn.execute(_INVENTORIES, {"uuids": ours})}
        amounts |= {(uuid, parent.resource_class): parent.total for uuid, (_, parent) in self._devices.items()}
        return [
            {
                "node_uuid": uuid,
                "resource_class": name,
                "total": total,
                "reserved": 0,
                "max_unit": whole(total),
                "allocation_ratio": 1.0,
                "capacity": total,
                "used": 0,
                "changed_at": now,
                "is_fixed": True,
            }
            for (uuid, name), total in amounts.items()
        ]

    def remove_unused(self, rows: Sequence[ReportedInventory]) -> None:
        """Remove inventories that are no longer reported, and providers without any; what consumers hold stays.

        The rows of the inventories have been written, so claims wait for this transaction, and find nothing to take.
        Traits and resource classes that only the last report has named go, too, if nothing has them.
        """
        of_devices = {(uuid, parent.resource_class) for uuid, (_, parent) in self._devices.items()}
        empty = {(row["node_uuid"], row["resource_class"]) for row in rows} - of_devices
        gone = self._gone()
        if empty or gone:
            wanted = {"uuids": sorted(gone | {uuid for uuid, _ in empty})}
            held = {(row.node_uuid, row.resource_class) for row in self._conn.execute(_HELD, wanted)}
            if unused := sorted(empty - held):
                self._conn.execute(_DELETE_INVENTORY, [{"b_uuid": uuid, "b_class": name} for uuid, name in unused])
            providers.remove_unused(self._conn, gone - {uuid for uuid, _ in held})
        before = self._before.values()
        now = [parent for _, parent in self._devices.values()]
        types = {each.mdev_type for each in before} - {each.mdev_type for each in now}
        placement_names.delete_unused_traits(self._conn, {trait_of(name) for name in types} - standard_traits())
        classes = {each.resource_class for each in before} - {each.resource_class for each in now}
        placement_names.delete_unused_classes(self._conn, classes)

    def _gone(self) -> set[str]:
        """Return the providers of devices that are no longer reported."""
        return {
            row.uuid
            for row in self._below
            if row.uuid not in self._devices and (row.uuid in self._before or _is_device(row))
        }


def _is_device(row: Any) -> bool:
    """Return whether a provider below a node was made for a device: its name ends as its uuid demands.

    It is called for few: providers that other services have made, and those of former devices with consumers.
    """
    if row.uuid[14:15] != "5":  # the version of uuids that follow from names
        return False
    name = row.name.removesuffix(f" ({row.uuid})")
    first = max(0, len(name) - LONGEST_MDEV_PARENT - 1)
    return any(
        provider_uuid(row.parent_uuid, name[end + 1 :]) == row.uuid
        for end in range(first, len(name))
        if name[end] == "_"
    )
