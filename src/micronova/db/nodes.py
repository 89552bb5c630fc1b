"""Compute nodes: what each hypervisor is and has. Their inventories are what claims are taken from."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec
import sqlalchemy as sa

from micronova.db import placement_names, providers, topologies
from micronova.db.listed import one_of
from micronova.db.locking import numbered
from micronova.db.mediated_devices import MediatedDevices
from micronova.db.prepared import Prepared
from micronova.db.tables import compute_nodes, instances, inventories, node_topologies, resource_providers, services
from micronova.db.upsert import PerDialect
from micronova.objects.errors import Conflict, NotFound
from micronova.objects.host_limits import LONGEST_DESCRIPTIONS, MOST_NODES
from micronova.objects.orders import ASKS_BEFORE_DESTRUCTION, NodeResources, capability_key
from micronova.objects.service_names import COMPUTE
from micronova.objects.topology import NodeTopology
from micronova.placement.model import capacity, whole
from micronova.placement.standard import COMPUTE_NODE, HOST_TRAIT, reported_traits, standard_traits

_n, _i = compute_nodes.c, inventories.c
_DEDICATED = "PCPU"  # shown together with the CPUs that instances share
RATIOS = {"VCPU": 4.0, "PCPU": 1.0, "MEMORY_MB": 1.0, "DISK_GB": 1.0}  # where neither the host nor the caller says


class NodeRow(Protocol):
    """A row of `compute_nodes` with the numbers of its inventories and guests. Times are microseconds."""

    uuid: str
    id: int
    host: str
    hypervisor_hostname: str
    hypervisor_type: str
    hypervisor_version: int
    host_ip: str
    cpu_info: dict[str, Any]  # as the driver describes it
    supported: list[list[str]]
    capabilities: dict[str, str]
    traits: list[str]
    vcpus_used: int
    memory_mb_used: int
    local_gb_used: int
    disk_available_gb: int | None
    running_vms: int
    current_workload: int
    failed_builds: int
    metrics: dict[str, float] | None
    created_at: int
    changed_at: int
    vcpus_total: int
    vcpus_reserved: int
    vcpus_claimed: int
    memory_mb_total: int
    memory_mb_reserved: int
    memory_mb_claimed: int
    local_gb_total: int
    local_gb_reserved: int
    local_gb_claimed: int
    guests: int


_FIXED = ("uuid", "id", "created_at", "failed_builds", "metrics")  # what a report never changes
_UPDATE = (
    sa.update(compute_nodes)
    .where(_n.uuid == sa.bindparam("key"))
    .values({column.name: sa.bindparam(column.name) for column in _n if column.name not in _FIXED})
)


_child = resource_providers.alias().c
_KNOWN = (
    sa.select(
        _n.uuid,
        _n.host,
        _n.traits,
        resource_providers.c.uuid.label("provider"),
        sa.exists().where(_i.node_uuid == _n.uuid, _i.resource_class == _DEDICATED).label("has_dedicated"),
        sa.exists().where(_child.parent_uuid == _n.uuid).label("has_children"),
    )
    .outerjoin(resource_providers, resource_providers.c.uuid == _n.uuid)
    .where(one_of(_n.uuid, "uuids"))
    # Locked: what a report takes away is what the one before it has left.
    .order_by(_n.uuid)
    .with_for_update(of=compute_nodes)
)


def _upsert_inventory(insert: Any) -> sa.Executable:
    statement = insert(inventories)
    new = statement.excluded
    names = ("total", "reserved", "max_unit", "allocation_ratio", "capacity")
    kept: sa.Executable = statement.on_conflict_do_update(
        index_elements=[_i.node_uuid, _i.resource_class],
        set_={**{name: new[name] for name in names}, "changed_at": new.changed_at},
        where=sa.or_(*(_i[name] != new[name] for name in names)),
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
_UPSERT_INVENTORY = PerDialect(_upsert_inventory)
_INSERT = PerDialect(lambda insert: insert(compute_nodes).on_conflict_do_nothing())
_CAPABILITIES = Prepared(sa.select(_n.capabilities).where(_n.uuid == sa.bindparam("node")))


def upsert(
    conn: sa.Connection,
    host: str,
    nodes: Sequence[NodeResources],
    now: int,
    *,
    ratios: Mapping[str, float] = RATIOS,
) -> None:
    """Record what a host's nodes are and have; raise Conflict when a node is another host's."""
    upsert_all(conn, {host: nodes}, now, ratios=ratios)


def upsert_all(
    conn: sa.Connection,
    reports: Mapping[str, Sequence[NodeResources]],
    now: int,
    *,
    ratios: Mapping[str, float] = RATIOS,
) -> None:
    """Record what the nodes of many hosts are and have: four statements, unless there are new ones."""
    pairs = [(host, node) for host, nodes in reports.items() for node in nodes]
    if not pairs:
        return
    found = conn.execute(_KNOWN, {"uuids": [node.node_uuid for _, node in pairs]}).all()
    known = {row.uuid: row.host for row in found}
    for host, node in pairs:
        if known.get(node.node_uuid, host) != host:
            raise Conflict(f"Node {node.node_uuid} belongs to host {known[node.node_uuid]}, not to {host}.")
    rows = [_node_row(host, node, now) for host, node in pairs]
    new = [row for row in rows if row["uuid"] not in known]
    if new:
        _check_providers(conn, new)
        _insert(conn, new)
    # Without what is fixed: a parameter that is named like a column would be set, whatever the statement says.
    old = [
        {**{name: value for name, value in row.items() if name not in _FIXED}, "key": row["uuid"]}
        for row in rows
        if row["uuid"] in known
    ]
    if old:
        conn.execute(_UPDATE, sorted(old, key=lambda row: str(row["key"])))
    reported = {node.node_uuid: _topology(node, has, ratios) for _, node in pairs if (has := node.topology) is not None}
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
    added, removed = _changed_traits({row.uuid: set(row.traits) for row in found}, [node for _, node in pairs])
    added_below, removed_below = mdevs.changed_traits()
    _report_traits(conn, [*added, *added_below], [*removed, *removed_below], now)
    providers.follow_services(conn, [node.node_uuid for _, node in pairs])
    had_dedicated = {row.uuid for row in found if row.has_dedicated}
    stock = [
        each
        for _, node in pairs
        for each in _inventory_rows(node, now, ratios)
        # A class that a provider has none of has no inventory; one that it had, and servers may hold, becomes 0.
        if each["resource_class"] != _DEDICATED or each["total"] or node.node_uuid in had_dedicated
    ]
    of_mdevs = mdevs.inventory_rows(now)
    stock += of_mdevs
    conn.execute(_UPSERT_INVENTORY.on(conn), sorted(stock, key=lambda row: (row["node_uuid"], row["resource_class"])))
    mdevs.remove_unused(of_mdevs)


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
    before: Mapping[str, set[str]], nodes: Sequence[NodeResources]
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the traits (node and name) that hosts report now, and those that they have reported before and no more."""
    added: list[tuple[str, str]] = []
    removed: list[tuple[str, str]] = []
    for node in nodes:
        reported, known = before.get(node.node_uuid, set()), set(_traits(node))
        added += [(node.node_uuid, name) for name in known - reported]
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
    """Return the traits of a report that this version knows and hosts may report, and that of every compute node."""
    return reported_traits({*node.traits, COMPUTE_NODE})


def _check_providers(conn: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise Conflict if a new node has the uuid of a provider, which somebody else has made."""
    hosts = {row["uuid"]: row["host"] for row in rows}
    for uuid in sorted(providers.get_many(conn, list(hosts))):
        raise Conflict(f"Host {hosts[uuid]} reports a node {uuid}, which is a resource provider of another service.")


def _insert(conn: sa.Connection, rows: Sequence[dict[str, Any]]) -> None:
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
        for uuid in conn.execute(sa.select(_n.uuid).where(_n.uuid.in_(list(missing)))).scalars().all():
            del missing[uuid]


def _node_row(host: str, node: NodeResources, now: int) -> dict[str, Any]:
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


def _topology(node: NodeResources, topology: NodeTopology, ratios: Mapping[str, float]) -> NodeTopology:
    """Return a node's topology with the ratios of its inventories."""
    return msgspec.structs.replace(
        topology,
        cpu_allocation_ratio=_ratio(node, "VCPU", ratios),
        ram_allocation_ratio=_ratio(node, "MEMORY_MB", ratios),
    )


def _ratio(node: NodeResources, resource: str, ratios: Mapping[str, float]) -> float:
    return 1.0 if resource == "PCPU" else node.allocation_ratios.get(resource, ratios.get(resource, 1.0))


def _inventory_rows(node: NodeResources, now: int, ratios: Mapping[str, float]) -> list[dict[str, Any]]:
    totals = {"VCPU": node.vcpus, "MEMORY_MB": node.memory_mb, "DISK_GB": node.local_gb}
    if node.pcpus is not None:
        totals["PCPU"] = node.pcpus
    rows = []
    for resource, total in totals.items():
        reserved = min(node.reserved.get(resource, 0), total)
        ratio = _ratio(node, resource, ratios)
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
            }
        )
    return rows


_NAMES = {"VCPU": "vcpus", "MEMORY_MB": "memory_mb", "DISK_GB": "local_gb"}
_NUMBERS = {"total": _i.total, "reserved": _i.reserved, "claimed": _i.used}


def _stock(resource: str, number: str) -> sa.Label[int]:
    """One number of one resource class of a node, out of its inventory row; dedicated CPUs count as CPUs."""
    classes = (resource, _DEDICATED) if resource == "VCPU" else (resource,)
    value = sa.select(sa.func.sum(_NUMBERS[number])).where(_i.node_uuid == _n.uuid, _i.resource_class.in_(classes))
    return sa.func.coalesce(value.scalar_subquery(), 0).label(f"{_NAMES[resource]}_{number}")


_GUESTS = (
    sa.select(sa.func.count())
    .select_from(instances)
    .where(instances.c.host == _n.host, instances.c.node_uuid == _n.uuid)
    .scalar_subquery()
)
# A node with its totals, what is claimed of them and how many instances it holds: claims outdate reports. Each is a
# subquery that looks up one key, so that a page of nodes does not read what belongs to the others.
NODES = sa.select(
    compute_nodes,
    *(_stock(resource, number) for resource in _NAMES for number in _NUMBERS),
    _GUESTS.label("guests"),
)


_ENABLED = compute_nodes.join(
    services,
    sa.and_(services.c.host == _n.host, services.c.binary == COMPUTE, services.c.disabled.is_(False)),
)


def _sum(column: sa.ColumnElement[int]) -> sa.Cast[int]:
    return sa.cast(sa.func.coalesce(sa.func.sum(column), 0), sa.BigInteger)


_SUMS = sa.select(sa.func.count(), _sum(_n.current_workload), _sum(_n.disk_available_gb)).select_from(_ENABLED)
_STOCK_SUMS = (
    sa.select(_i.resource_class, _sum(_i.total), _sum(_i.reserved + _i.used))
    .select_from(inventories.join(_ENABLED, _i.node_uuid == _n.uuid))
    .group_by(_i.resource_class)
)
_GUEST_SUM = sa.select(sa.func.count()).select_from(
    instances.join(_ENABLED, sa.and_(instances.c.host == _n.host, instances.c.node_uuid == _n.uuid))
)


def statistics(conn: sa.Connection) -> dict[str, int]:
    """Return the sums over all nodes whose services are enabled, by the API's names: three statements."""
    count, workload, disk = conn.execute(_SUMS).one()
    stock = {name: (total, used) for name, total, used in conn.execute(_STOCK_SUMS)}
    sums = {
        "count": count,
        "current_workload": workload,
        "disk_available_least": disk,
        "running_vms": conn.execute(_GUEST_SUM).scalar_one(),
    }
    for resource, name in _NAMES.items():
        sums[name], sums[f"{name}_used"] = stock.get(resource, (0, 0))
    dedicated = stock.get(_DEDICATED, (0, 0))
    sums["vcpus"], sums["vcpus_used"] = sums["vcpus"] + dedicated[0], sums["vcpus_used"] + dedicated[1]
    return sums


def list_(
    conn: sa.Connection,
    *,
    host: str | None = None,
    pattern: str | None = None,
    marker: str | int | None = None,
    limit: int | None = None,
) -> Sequence[NodeRow]:
    """Return nodes with their numbers, in the order in which they came, after the marker (uuid or number)."""
    query = NODES.order_by(_n.id)
    if host is not None:
        query = query.where(_n.host == host)
    if pattern is not None:
        query = query.where(_n.hypervisor_hostname.contains(pattern, autoescape=True))
    if marker is not None:
        last = conn.execute(sa.select(_n.id).where(_n.uuid == marker if isinstance(marker, str) else _n.id == marker))
        after = last.scalar()
        if after is None:
            raise NotFound(f"Compute host {marker} could not be found.")
        query = query.where(_n.id > after)
    return cast(Sequence[NodeRow], conn.execute(query if limit is None else query.limit(limit)).all())


def get(conn: sa.Connection, key: str | int) -> NodeRow:
    """Return a node by its uuid, or by the number that old microversions show; raise NotFound."""
    found = conn.execute(NODES.where(_n.uuid == key if isinstance(key, str) else _n.id == key)).first()
    if found is None:
        raise NotFound(f"Hypervisor with ID '{key}' could not be found.")
    return cast(NodeRow, found)


def delete_of_host(conn: sa.Connection, host: str) -> None:
    """Delete a host's nodes with all that they provide; raise Conflict while something is allocated on them."""
    uuids = list(conn.execute(sa.select(_n.uuid).where(_n.host == host)).scalars())
    if not uuids:
        return
    conn.execute(sa.delete(compute_nodes).where(_n.uuid.in_(uuids)))
    conn.execute(sa.delete(node_topologies).where(node_topologies.c.node_uuid.in_(uuids)))
    try:
        providers.delete_trees(conn, uuids)
    except Conflict:
        raise Conflict(f"Host {host} still has instances or resources allocated to them.") from None


_HOSTS_OF_NAME = sa.select(_n.host).where(_n.hypervisor_hostname == sa.bindparam("name"))


def hosts_of_name(conn: sa.Connection, name: str) -> set[str]:
    """Return the hosts that have a node of this name."""
    return set(conn.execute(_HOSTS_OF_NAME, {"name": name}).scalars())


_HOSTS_WITH_NODES = sa.select(_n.host).where(one_of(_n.host, "hosts"))


def hosts_with_nodes(conn: sa.Connection, hosts: Sequence[str]) -> set[str]:
    """Return those of the hosts whose nodes are known."""
    return set(conn.execute(_HOSTS_WITH_NODES, {"hosts": list(hosts)}).scalars())


_ADDRESSES = sa.select(_n.host, _n.hypervisor_hostname, _n.host_ip).where(one_of(_n.host, "hosts"))


def addresses(conn: sa.Connection, hosts: Sequence[str]) -> dict[tuple[str, str], str | None]:
    """Return the addresses of the nodes of hosts, by host and node."""
    found = conn.execute(_ADDRESSES, {"hosts": list(hosts)})
    return {(row.host, row.hypervisor_hostname): row.host_ip for row in found}


_NOTE_METRICS = (
    sa.update(compute_nodes)
    .where(_n.host == sa.bindparam("b_host"), _n.hypervisor_hostname == sa.bindparam("b_node"))
    .values(metrics=sa.bindparam("b_metrics", type_=sa.JSON), changed_at=sa.bindparam("b_now"))
)


def note_metrics(conn: sa.Connection, measured: Mapping[tuple[str, str], Mapping[str, float]], now: int) -> None:
    """Record what the monitors of nodes, named by host and node, have measured; schedulers read it with the nodes."""
    if measured:
        rows = [
            {"b_host": host, "b_node": node, "b_metrics": dict(values), "b_now": now}
            for (host, node), values in sorted(measured.items())
        ]
        conn.execute(_NOTE_METRICS, rows)


def lacks(conn: sa.Connection, node_uuid: str | None, capability: str) -> bool:
    """Return whether a node has reported that its driver lacks a capability."""
    found = _CAPABILITIES.first(conn, {"node": node_uuid})
    return found is not None and found["capabilities"].get(capability_key(capability)) == "false"


def host_asks(conn: sa.Connection, host: str) -> bool:
    """Return whether the agent of a host asks before it does what cannot be undone, as all its nodes report."""
    found = conn.execute(sa.select(_n.capabilities).where(_n.host == host)).scalars().all()
    return bool(found) and all(each.get(ASKS_BEFORE_DESTRUCTION) == "true" for each in found)


def note_failed_build(conn: sa.Connection, node_uuid: str | None, now: int) -> None:
    """Count a build that failed on a node: a weigher may prefer others."""
    if node_uuid is not None:
        conn.execute(
            sa.update(compute_nodes)
            .where(_n.uuid == node_uuid)
            .values(failed_builds=_n.failed_builds + 1, changed_at=now)
        )


_NOTE_BUILT = Prepared(
    sa.update(compute_nodes)
    .where(_n.uuid == sa.bindparam("b_uuid"), _n.failed_builds > 0)
    .values(failed_builds=0, changed_at=sa.bindparam("b_now"))
)


def note_built(conn: sa.Connection, node_uuid: str | None, now: int) -> None:
    """Reset the count of failed builds after a successful one."""
    if node_uuid is not None:
        _NOTE_BUILT.run(conn, {"b_uuid": node_uuid, "b_now": now})
