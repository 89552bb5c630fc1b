"""Reports of hosts about their compute nodes: each node becomes a row, a resource provider with traits and inventories,
and a topology."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from micronova.db import placement_names, providers, topologies
from micronova.db.listed import one_of
from micronova.db.locking import numbered
from micronova.db.mediated_devices import MediatedDevices
from micronova.db.nodes import NewNode
from micronova.db.provider_inventories import ReportedInventory
from micronova.db.tables import compute_nodes, inventories, node_topologies, provider_traits, resource_providers
from micronova.db.upsert import PerDialect
from micronova.objects.errors import Conflict
from micronova.objects.host_limits import LONGEST_DESCRIPTIONS, MOST_NODES
from micronova.objects.orders import NodeResources
from micronova.placement.model import capacity, whole
from micronova.placement.standard import COMPUTE_NODE, HOST_TRAIT, OWNER, reported_traits, standard_traits

_n, _i = compute_nodes.c, inventories.c
RATIOS = {"VCPU": 4.0, "PCPU": 1.0, "MEMORY_MB": 1.0, "DISK_GB": 1.0}  # where neither the host nor the caller says
_FIXED = ("uuid", "id", "created_at", "failed_builds", "metrics")  # what a report never changes
_UPDATE = (
    sa.update(compute_nodes)
    .where(_n.uuid == sa.bindparam("key"))
    .values({column.name: sa.bindparam(column.name) for column in _n if column.name not in _FIXED})
)


_child, _seen, _pt = resource_providers.alias().c, compute_nodes.alias().c, provider_traits.c
_RATIO_OF = {"VCPU": "cpu_ratio", "MEMORY_MB": "memory_ratio", "DISK_GB": "disk_ratio"}


def _ratio_of(resource: str) -> sa.ColumnElement[float | None]:
    known = sa.select(_i.allocation_ratio).where(_i.node_uuid == _n.uuid, _i.resource_class == resource)
    return known.scalar_subquery().label(_RATIO_OF[resource])


_KNOWN = (
    sa.select(
        _n.uuid,
        _n.host,
        _n.traits,
        _n.changed_at,
        # What a subquery sees is older than the row, if that was changed while this statement waited for its lock.
        sa.select(_seen.changed_at).where(_seen.uuid == _n.uuid).scalar_subquery().label("seen_at"),
        sa.select(sa.func.aggregate_strings(_pt.trait, ","))
        .where(_pt.provider_uuid == _n.uuid)
        .scalar_subquery()
        .label("has_traits"),
        resource_providers.c.uuid.label("provider"),
        sa.exists().where(_i.node_uuid == _n.uuid, _i.resource_class == "PCPU").label("has_dedicated"),
        sa.exists().where(_child.parent_uuid == _n.uuid).label("has_children"),
        *(_ratio_of(resource) for resource in _RATIO_OF),
    )
    .outerjoin(resource_providers, resource_providers.c.uuid == _n.uuid)
    .where(one_of(_n.uuid, "uuids"))
    # Locked, so that reports of a node come one after the other: each takes away the traits that only the one before
    # it has named.
    .order_by(_n.uuid)
    .with_for_update(of=compute_nodes)
)


def _upsert_inventory(insert: Any) -> sa.Executable:
    statement = insert(inventories)
    new = statement.excluded
    names = ("total", "reserved", "max_unit", "allocation_ratio", "capacity")
    # A ratio that no setting of the host fixes may have been changed by the Placement API since it was read.
    is_current = sa.or_(sa.bindparam("is_fixed", type_=sa.Boolean), _i.allocation_ratio == new.allocation_ratio)
    kept: sa.Executable = statement.on_conflict_do_update(
        index_elements=[_i.node_uuid, _i.resource_class],
        set_={**{name: new[name] for name in names}, "changed_at": new.changed_at},
        where=sa.and_(is_current, sa.or_(*(_i[name] != new[name] for name in names))),
    )
    return kept


def _length(column: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    return sa.func.coalesce(sa.func.length(sa.cast(column, sa.Text)), 0)


_LARGE = LONGEST_DESCRIPTIONS // MOST_NODES  # characters of the description of a node
_DESCRIPTIONS = (
    sa.select(
        _n.host,
        sa.func.sum(
            _length(_n.cpu_info)
            + _length(_n.capabilities)
            + _length(_n.supported)
            + _length(node_topologies.c.topology)
        ),
    )
    .select_from(compute_nodes.outerjoin(node_topologies, node_topologies.c.node_uuid == _n.uuid))
    .where(one_of(_n.host, "hosts"))
    .group_by(_n.host)
)
_p = resource_providers.c
_TAKEN = sa.select(_p.uuid, _p.name).where(sa.or_(one_of(_p.uuid, "uuids"), one_of(_p.name, "names"))).order_by(_p.uuid)
_NAME = re.compile(
    r"[a-zA-Z0-9._-]+"
)  # of a node that is not named as its host: those of other services often have more
_UPSERT_INVENTORY = PerDialect(_upsert_inventory)
_INSERT = PerDialect(lambda insert: insert(compute_nodes).on_conflict_do_nothing())


class Recorded(NamedTuple):
    """What was recorded of reports, and what was not."""

    ratios: Mapping[str, Mapping[str, float]]  # that nodes have by their inventories, by uuid and resource class
    refused: Mapping[str, str]  # new nodes that are not recorded, by uuid, and why
    refused_by: frozenset[str]  # the hosts that reported them


def record(
    conn: sa.Connection,
    reports: Mapping[str, Sequence[NodeResources]],
    now: int,
    *,
    ratios: Mapping[str, float] = RATIOS,
) -> Recorded:
    """Record what the nodes of hosts are and have: four statements, unless there are new ones.

    New nodes whose name or uuid is another's are refused, and the others are recorded: what else their host reports
    counts. `ratios` are the allocation ratios with which inventories begin, if the host does not say.
    Raise Conflict if a node belongs to another host, or if a host has too many nodes or too long descriptions of them.
    """
    pairs = [(host, node) for host, nodes in reports.items() for node in nodes]
    if not pairs:
        return Recorded({}, {}, frozenset())
    found = _lock(conn, [node.node_uuid for _, node in pairs])
    known = {row.uuid: row.host for row in found}
    for host, node in pairs:
        if known.get(node.node_uuid, host) != host:
            raise Conflict(f"Node {node.node_uuid} belongs to host {known[node.node_uuid]}, not to {host}.")
    rows = [_node_row(host, node, now) for host, node in pairs]
    new = [row for row in rows if row["uuid"] not in known]
    refused = _refused(conn, new) if new else {}
    refused_by = frozenset(host for host, node in pairs if node.node_uuid in refused)
    pairs = [(host, node) for host, node in pairs if node.node_uuid not in refused]
    if not pairs:
        return Recorded({}, refused, refused_by)
    rows = [row for row in rows if row["uuid"] not in refused]
    if accepted := [row for row in new if row["uuid"] not in refused]:
        _insert(conn, accepted)
    # Without what is fixed: a parameter that is named like a column would be set, whatever the statement says.
    old = [
        {**{name: value for name, value in row.items() if name not in _FIXED}, "key": row["uuid"]}
        for row in rows
        if row["uuid"] in known
    ]
    if old:
        conn.execute(_UPDATE, sorted(old, key=lambda row: str(row["key"])))
    before = {row.uuid: row for row in found}
    chosen = {node.node_uuid: _ratios(node, before.get(node.node_uuid), ratios) for _, node in pairs}
    reported = {
        node.node_uuid: topologies.with_ratios(has, chosen[node.node_uuid])
        for _, node in pairs
        if (has := node.topology) is not None
    }
    above = {row.uuid for row in found if row.has_children}
    with_mdevs = {
        node.node_uuid: (node.node, has.mdevs)
        for _, node in pairs
        if (has := node.topology) is not None and (has.mdevs or node.node_uuid in above)
    }
    mdevs = MediatedDevices(conn, with_mdevs)
    topologies.report(conn, reported, now)
    _check_descriptions(conn, [(host, node) for host, node in pairs if _size(node) > _LARGE])
    # A version that knows no providers may have made a node: it gets its provider here.
    provided = {row.uuid for row in found if row.provider is not None}
    lacking = {node.node_uuid: (host, node.node) for host, node in pairs if node.node_uuid not in provided}
    providers.ensure_nodes(conn, lacking, now, below=mdevs.missing())
    present = {row.uuid: set((row.has_traits or "").split(",")) for row in found}
    added, removed = _changed_traits({row.uuid: set(row.traits) for row in found}, present, [node for _, node in pairs])
    added_below, removed_below = mdevs.changed_traits()
    _report_traits(conn, [*added, *added_below], [*removed, *removed_below], now)
    providers.follow_services(conn, [node.node_uuid for _, node in pairs])
    had_dedicated = {row.uuid for row in found if row.has_dedicated}
    rows_of_inventories = [
        each
        for _, node in pairs
        for each in _inventory_rows(node, now, chosen[node.node_uuid])
        # A node without dedicated CPUs has no inventory of them. If it had one, that becomes 0: servers may hold some.
        if each["resource_class"] != "PCPU" or each["total"] or node.node_uuid in had_dedicated
    ]
    of_mdevs = mdevs.inventory_rows(now)
    rows_of_inventories += of_mdevs
    in_order = sorted(rows_of_inventories, key=lambda row: (row["node_uuid"], row["resource_class"]))
    conn.execute(_UPSERT_INVENTORY.on(conn), in_order)
    mdevs.remove_unused(of_mdevs)
    of_nodes = {
        node.node_uuid: own
        for _, node in pairs
        if (
            own := {
                name: ratio
                for name, ratio in chosen[node.node_uuid].items()
                if name in _RATIO_OF and name not in node.allocation_ratios
            }
        )
    }
    return Recorded(of_nodes, refused, refused_by)


def _lock(conn: sa.Connection, uuids: Sequence[str]) -> Sequence[Any]:
    """Lock nodes, and return what is known of those that exist, as it is then."""
    found = conn.execute(_KNOWN, {"uuids": uuids}).all()
    if any(row.changed_at != row.seen_at for row in found):
        found = conn.execute(_KNOWN, {"uuids": uuids}).all()
    return found


def _size(node: NodeResources) -> int:
    return len(msgspec.json.encode((node.topology, node.cpu_info, node.capabilities, node.supported)))


def _check_descriptions(conn: sa.Connection, large: Sequence[tuple[str, NodeResources]]) -> None:
    """Raise Conflict if the nodes of a host, of which some are large, have too long descriptions together.

    Every scheduler has them in memory. As many small ones as a host may have are below the limit.
    """
    if not large:
        return
    for host, size in conn.execute(_DESCRIPTIONS, {"hosts": sorted({host for host, _ in large})}):
        if size > LONGEST_DESCRIPTIONS:
            most = f"a host may have {LONGEST_DESCRIPTIONS}"
            raise Conflict(f"The descriptions of the nodes of host {host} have {size} characters: {most}.")


def _changed_traits(
    before: Mapping[str, set[str]], has: Mapping[str, set[str]], nodes: Sequence[NodeResources]
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the traits (node and name) that hosts report and nodes lack, and those reported `before` and no more."""
    added: list[tuple[str, str]] = []
    removed: list[tuple[str, str]] = []
    for node in nodes:
        reported, known = before.get(node.node_uuid, set()), set(_traits(node))
        added += [(node.node_uuid, name) for name in known - has.get(node.node_uuid, set())]
        removed += [(node.node_uuid, name) for name in reported - known]
    return added, removed


def _report_traits(
    conn: sa.Connection, added: Sequence[tuple[str, str]], removed: Sequence[tuple[str, str]], now: int
) -> None:
    """Give providers traits that are reported, and take those that are no more; others keep theirs."""
    for name in sorted({name for _, name in added} - standard_traits()):
        placement_names.create_trait(conn, name, now)
    providers.change_traits(conn, added=added, removed=removed)
    placement_names.delete_unused_traits(conn, {name for _, name in removed if name.startswith(HOST_TRAIT)})


def _traits(node: NodeResources) -> list[str]:
    """Return the traits of a report that this version knows and hosts may report, and those of every compute node."""
    return sorted({*reported_traits(node.traits), COMPUTE_NODE, OWNER})


def _refused(conn: sa.Connection, rows: Sequence[NewNode]) -> dict[str, str]:
    """Return the new nodes, by uuid, that have the uuid or the name of a provider that there is, or no proper name.

    A node that has its host's name may have the name of a provider: its own gets another one.
    """
    refused: dict[str, str] = {}
    reported = {row["uuid"]: f"Host {row['host']} reports a node" for row in rows}
    named: dict[str, list[str]] = {}
    for row in rows:
        uuid, name = row["uuid"], row["hypervisor_hostname"]
        if name == row["host"]:
            continue
        if not _NAME.fullmatch(name):
            refused[uuid] = f"{reported[uuid]} {name[:64]!r}: names have letters, digits and . - _ only."
        named.setdefault(name, []).append(uuid)
    for taken, name in conn.execute(_TAKEN, {"uuids": sorted(reported), "names": sorted(named)}):
        if taken in reported:
            refused[taken] = f"{reported[taken]} {taken}, which is a resource provider of another service."
        for uuid in named.get(name, ()):
            message = f"{reported[uuid]} {name}: another node or resource provider has this name."
            refused.setdefault(uuid, message)
    return refused


def _insert(conn: sa.Connection, rows: Sequence[NewNode]) -> None:
    missing = {row["uuid"]: row for row in rows}
    hosts = sorted({row["host"] for row in rows})
    while missing:
        first = conn.execute(sa.select(sa.func.coalesce(sa.func.max(_n.id), 0))).scalar_one() + 1
        found = conn.execute(sa.select(_n.host, _n.hypervisor_hostname).where(_n.host.in_(hosts)))
        taken = {(row.host, row.hypervisor_hostname) for row in found}
        for host, number in Counter(
            host for host, _ in (*taken, *((row["host"], "") for row in missing.values()))
        ).items():
            if number > MOST_NODES:
                raise Conflict(f"Host {host} has {number} nodes: it may have {MOST_NODES}.")
        for row in missing.values():
            if (row["host"], row["hypervisor_hostname"]) in taken:
                name = row["hypervisor_hostname"]
                raise Conflict(f"Host {row['host']} has a node {name} already, with another uuid.")
        # Ids are unique: of two that register at the same moment, one finds its id taken and tries again.
        conn.execute(_INSERT.on(conn), numbered(missing.values(), first))
        added = sa.select(_n.uuid).where(one_of(_n.uuid, "uuids"))
        for uuid in conn.execute(added, {"uuids": list(missing)}).scalars().all():
            del missing[uuid]


def _node_row(host: str, node: NodeResources, now: int) -> NewNode:
    return {
        "uuid": node.node_uuid,
        "host": host,
        "hypervisor_hostname": node.node,
        "hypervisor_type": node.hypervisor_type,
        "hypervisor_version": node.hypervisor_version,
        "host_ip": node.host_ip,
        "cpu_info": node.cpu_info,
        "supported": [list(each) for each in node.supported],
        "capabilities": node.capabilities,
        "traits": _traits(node),
        "vcpus_used": node.vcpus_used,
        "memory_mb_used": node.memory_mb_used,
        "local_gb_used": node.local_gb_used,
        "disk_available_gb": node.disk_available_gb,
        "running_vms": node.running_vms,
        "current_workload": node.current_workload,
        "failed_builds": 0,
        "created_at": now,
        "changed_at": now,
    }


def _ratios(node: NodeResources, before: Any | None, initial: Mapping[str, float]) -> dict[str, float]:
    """Return a node's allocation ratios: as its host fixes them, or as its inventories have them, or as they begin."""
    found = {name: initial.get(name, 1.0) for name in _RATIO_OF} | node.initial_allocation_ratios
    if before is not None:
        found |= {name: known for name, label in _RATIO_OF.items() if (known := getattr(before, label)) is not None}
    return found | node.allocation_ratios | {"PCPU": 1.0}


def _inventory_rows(node: NodeResources, now: int, ratios: Mapping[str, float]) -> list[ReportedInventory]:
    totals = {"VCPU": node.vcpus, "MEMORY_MB": node.memory_mb, "DISK_GB": node.local_gb}
    if node.pcpus is not None:
        totals["PCPU"] = node.pcpus
    rows = list[ReportedInventory]()
    for resource, total in totals.items():
        reserved = min(node.reserved.get(resource, 0), total)
        ratio = ratios[resource]
        rows.append(
            {
                "node_uuid": node.node_uuid,
                "resource_class": resource,
                "total": total,
                "reserved": reserved,
                "max_unit": whole(total),
                "allocation_ratio": ratio,
                "capacity": capacity(total, reserved, ratio),
                "used": 0,
                "changed_at": now,
                "is_fixed": resource == "PCPU" or resource in node.allocation_ratios,
            }
        )
    return rows
