"""Compute nodes: what each hypervisor is and has, as its host has reported it, and what is claimed of it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypedDict, cast

import sqlalchemy as sa

from micronova.db import providers
from micronova.db.listed import one_of
from micronova.db.prepared import Prepared
from micronova.db.tables import compute_nodes, instances, inventories, node_topologies, services
from micronova.objects.errors import Conflict, NotFound
from micronova.objects.orders import ASKS_BEFORE_DESTRUCTION, DECRYPTS_VOLUMES, capability_key
from micronova.objects.service_names import COMPUTE

_n, _i = compute_nodes.c, inventories.c
_DEDICATED = "PCPU"  # shown together with the CPUs that instances share


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


class NewNode(TypedDict):
    """What a report of a host writes of a compute node; the times and `failed_builds` are those of a new one."""

    uuid: str
    host: str
    hypervisor_hostname: str
    hypervisor_type: str
    hypervisor_version: int
    host_ip: str
    cpu_info: dict[str, Any]
    supported: list[list[str]]
    capabilities: dict[str, Any]
    traits: list[str]
    vcpus_used: int
    memory_mb_used: int
    local_gb_used: int
    disk_available_gb: int | None
    running_vms: int
    current_workload: int
    failed_builds: int
    created_at: int
    changed_at: int


_CAPABILITIES = Prepared(sa.select(_n.capabilities).where(_n.uuid == sa.bindparam("node")))
_NAMES = {"VCPU": "vcpus", "MEMORY_MB": "memory_mb", "DISK_GB": "local_gb"}
_NUMBERS = {"total": _i.total, "reserved": _i.reserved, "claimed": _i.used}


def _inventory_number(resource: str, number: str) -> sa.Label[int]:
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
    *(_inventory_number(resource, number) for resource in _NAMES for number in _NUMBERS),
    _GUESTS.label("guests"),
)


_ENABLED = compute_nodes.join(
    services,
    sa.and_(services.c.host == _n.host, services.c.binary == COMPUTE, services.c.disabled.is_(False)),
)


def _sum(column: sa.ColumnElement[int]) -> sa.Cast[int]:
    return sa.cast(sa.func.coalesce(sa.func.sum(column), 0), sa.BigInteger)


_SUMS = sa.select(sa.func.count(), _sum(_n.current_workload), _sum(_n.disk_available_gb)).select_from(_ENABLED)
_INVENTORY_SUMS = (
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
    of_classes = {name: (total, used) for name, total, used in conn.execute(_INVENTORY_SUMS)}
    sums = {
        "count": count,
        "current_workload": workload,
        "disk_available_least": disk,
        "running_vms": conn.execute(_GUEST_SUM).scalar_one(),
    }
    for resource, name in _NAMES.items():
        sums[name], sums[f"{name}_used"] = of_classes.get(resource, (0, 0))
    dedicated = of_classes.get(_DEDICATED, (0, 0))
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


_HOST = sa.select(_n.host).where(_n.uuid == sa.bindparam("uuid"))


def host_of(conn: sa.Connection, node_uuid: str) -> str | None:
    """Return the host of a node; None if there is no such node."""
    return conn.execute(_HOST, {"uuid": node_uuid}).scalar()


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
    return _has(conn, host, ASKS_BEFORE_DESTRUCTION)


def host_decrypts(conn: sa.Connection, host: str) -> bool:
    """Return whether the agent of a host decrypts volumes, as all its nodes report."""
    return _has(conn, host, DECRYPTS_VOLUMES)


def hosts_that_do_not_decrypt(conn: sa.Connection) -> set[str]:
    """Return the hosts with agents of an earlier version, which do not decrypt volumes. It looks at all nodes."""
    older = _n.capabilities[DECRYPTS_VOLUMES].as_string().is_distinct_from("true")
    return set(conn.execute(sa.select(_n.host).where(older)).scalars())


def _has(conn: sa.Connection, host: str, capability: str) -> bool:
    found = conn.execute(sa.select(_n.capabilities).where(_n.host == host)).scalars().all()
    return bool(found) and all(each.get(capability) == "true" for each in found)


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
