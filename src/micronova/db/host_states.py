"""Hosts as the scheduler needs them: all of them at its start, afterwards what changed.

Changes are found by their times. A commit may be late, so a reader looks at the last seconds again each time, without
reading again what it knows. First it reads how many rows changed in each short slot of time, with the sum of their
times. Then it reads the rows of the slots in which this differs from what it has read before.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db.listed import one_of
from micronova.db.prepared import Prepared
from micronova.db.tables import (
    aggregate_hosts,
    aggregates,
    compute_nodes,
    inventories,
    node_topologies,
    provider_traits,
    resource_providers,
    services,
)
from micronova.objects.scheduling import HostState
from micronova.objects.service_names import COMPUTE

DEFAULT_ZONE = "nova"
SLOT = 100_000  # microseconds
END = 1 << 62  # microseconds: later than any change

Amount = tuple[str, str, int, int, int, int, int, float, int]  # a `NodeAmount`, changed at
Topology = tuple[str, str, str, int]  # node uuid, topology and what is held as they are stored, changed at
Service = tuple[str, bool, bool, float, int]  # a `ServiceState`, changed at
Digest = tuple[int, int]  # of the rows that changed in a slot: how many they are, and the sum of the times of change


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What has changed since some time: nodes, amounts and topologies by slot."""

    nodes: dict[int, Digest]
    amounts: dict[int, Digest]
    topologies: dict[int, Digest]
    services: list[Service]  # the first that an administrator, or their host's start or stop, has changed
    silent: Digest | None  # of the services not heard of, if asked for; of the times of their last heartbeats


_n, _i, _s, _t = compute_nodes.c, inventories.c, services.c, node_topologies.c
_p = resource_providers.c
_STATES = sa.select(
    _n.uuid,
    _n.host,
    _n.hypervisor_hostname,
    _n.hypervisor_type,
    _n.hypervisor_version,
    _n.cpu_info,
    _n.supported,
    _n.capabilities,
    _n.disk_available_gb,
    _n.running_vms,
    _n.current_workload,
    _n.failed_builds,
    _n.host_ip,
    _n.metrics,
    _n.changed_at,
    _s.disabled,
    _s.forced_down,
    _s.last_seen_at,
    _t.topology,
    _t.held,
).select_from(
    compute_nodes.outerjoin(services, sa.and_(_s.host == _n.host, _s.binary == COMPUTE)).outerjoin(
        node_topologies, _t.node_uuid == _n.uuid
    )
)
_STATES_OF = _STATES.where(one_of(_n.uuid, "uuids"))
_PAGE = _STATES.where(_n.uuid > bindparam("after")).order_by(_n.uuid).limit(bindparam("limit"))
_AMOUNTS = sa.select(
    _i.node_uuid,
    _i.resource_class,
    _i.total,
    _i.reserved,
    _i.capacity,
    _i.used,
    _i.max_unit,
    _i.allocation_ratio,
    _i.changed_at,
)
_AMOUNTS_OF = _AMOUNTS.where(one_of(_i.node_uuid, "uuids"))
_SERVICES = sa.select(_s.host, _s.disabled, _s.forced_down, _s.last_seen_at, _s.updated_at).where(_s.binary == COMPUTE)
# Without an index, which each heartbeat would have to change: it is read rarely.
_SILENT = sa.and_(_s.binary == COMPUTE, _s.last_seen_at < bindparam("silent_since"))
_SILENT_SERVICES = Prepared(
    _SERVICES.where(_SILENT, _s.host > bindparam("after")).order_by(_s.host).limit(bindparam("limit"))
)
_SILENT_DIGEST = Prepared(
    sa.select(
        sa.func.count().label("number"), sa.func.coalesce(sa.func.sum(_s.last_seen_at // 1_000), 0).label("total")
    ).where(_SILENT)
)


def _changed_between(query: Any, *columns: Any) -> Any:
    """The rows that changed from a time on until another, after the mark (time and key), in this order."""
    at, until = bindparam("at", type_=sa.BigInteger), bindparam("until", type_=sa.BigInteger)
    mark = sa.tuple_(at, *(bindparam(f"key{number}", type_=sa.String) for number in range(len(columns) - 1)))
    changed = query.where(columns[0] >= at, columns[0] < until, sa.tuple_(*columns) > mark)
    return changed.order_by(*columns).limit(bindparam("limit"))


_LOCK = sa.select(_n.uuid).where(one_of(_n.host, "hosts")).order_by(_n.uuid).with_for_update()
_TOUCH = compute_nodes.update().where(one_of(_n.host, "hosts")).values(changed_at=bindparam("now"))
_LOCK_PROVIDERS = sa.select(_p.uuid).where(one_of(_p.uuid, "uuids")).order_by(_p.uuid).with_for_update()
_TOUCH_PROVIDERS = resource_providers.update().where(one_of(_p.uuid, "uuids")).values(updated_at=bindparam("now"))
_CHANGED_NODES = _changed_between(_STATES, _n.changed_at, _n.uuid)
# A service that has just registered is read with its node, which registers afterwards.
_CHANGED_SERVICES = Prepared(_changed_between(_SERVICES, _s.updated_at, _s.host))
_CHANGED_AMOUNTS = Prepared(_changed_between(_AMOUNTS, _i.changed_at, _i.node_uuid, _i.resource_class))
_CHANGED_TOPOLOGIES = _changed_between(
    sa.select(_t.node_uuid, _t.topology, _t.held, _t.changed_at), _t.changed_at, _t.node_uuid
)


def _digests(changed_at: Any) -> Prepared:
    slot = (changed_at // SLOT).label("slot")
    total = sa.func.sum(changed_at - bindparam("since", type_=sa.BigInteger))
    counted = sa.select(slot, sa.func.count().label("number"), total.label("total"))
    return Prepared(counted.where(changed_at >= bindparam("since")).group_by(slot))


_NODE_DIGESTS = _digests(_n.changed_at)
_AMOUNT_DIGESTS = _digests(_i.changed_at)
_TOPOLOGY_DIGESTS = _digests(_t.changed_at)
_AGGREGATES = sa.select(aggregate_hosts.c.host, aggregates.c.name, aggregates.c.metadata.label("properties")).join(
    aggregates, aggregates.c.id == aggregate_hosts.c.aggregate_id
)
_AGGREGATES_OF = _AGGREGATES.where(one_of(aggregate_hosts.c.host, "hosts"))
# One row per node instead of one per trait: hosts have dozens, and nearly all have the same.
_TRAITS_OF = (
    sa.select(provider_traits.c.provider_uuid, sa.func.aggregate_strings(provider_traits.c.trait, ","))
    .where(one_of(provider_traits.c.provider_uuid, "uuids"))
    .group_by(provider_traits.c.provider_uuid)
)


def load_hosts(conn: sa.Connection, uuids: Collection[str], *, default_zone: str = DEFAULT_ZONE) -> list[HostState]:
    """Return these nodes: four statements however many there are."""
    wanted = sorted(uuids)
    return _complete(conn, conn.execute(_STATES_OF, {"uuids": wanted}).all(), default_zone) if wanted else []


def load_page(conn: sa.Connection, after: str, limit: int, *, default_zone: str = DEFAULT_ZONE) -> list[HostState]:
    """Return the next nodes after a uuid, in the order of their uuids."""
    return _complete(conn, conn.execute(_PAGE, {"after": after, "limit": limit}).all(), default_zone)


def load_changes(conn: sa.Connection, since: int, limit: int, silent_since: int | None = None) -> Changes:
    """Return what changed since a time, with a digest of the services not heard of since another, if one is named."""
    silent = None
    if silent_since is not None:
        [row] = _SILENT_DIGEST.all(conn, {"silent_since": silent_since})
        silent = row["number"], int(row["total"])

    def digests(query: Prepared) -> dict[int, Digest]:
        return {row["slot"]: (row["number"], int(row["total"])) for row in query.all(conn, {"since": since})}

    return Changes(
        nodes=digests(_NODE_DIGESTS),
        amounts=digests(_AMOUNT_DIGESTS),
        topologies=digests(_TOPOLOGY_DIGESTS),
        services=load_changed_services(conn, (since, ""), limit),
        silent=silent,
    )


def load_changed_services(conn: sa.Connection, after: tuple[int, str], limit: int) -> list[Service]:
    """Return services that changed after a mark (time and host), in the order of their changes."""
    at, host = after
    rows = _CHANGED_SERVICES.all(conn, {"at": at, "key0": host, "until": END, "limit": limit})
    return [_service(row) for row in rows]


def load_silent_services(conn: sa.Connection, silent_since: int, after: str, limit: int) -> list[Service]:
    """Return the next services, by host, that were not heard of since a time (microseconds)."""
    parameters = {"silent_since": silent_since, "after": after, "limit": limit}
    return [_service(row) for row in _SILENT_SERVICES.all(conn, parameters)]


def _service(row: Mapping[str, Any]) -> Service:
    return row["host"], not row["disabled"], row["forced_down"], row["last_seen_at"] / 1e6, row["updated_at"]


def load_changed_nodes(
    conn: sa.Connection, after: tuple[int, str], until: int, limit: int, *, default_zone: str = DEFAULT_ZONE
) -> list[HostState]:
    """Return nodes that changed before a time and after a mark (time and uuid), in the order of their changes."""
    at, uuid = after
    rows = conn.execute(_CHANGED_NODES, {"at": at, "key0": uuid, "until": until, "limit": limit}).all()
    return _complete(conn, rows, default_zone)


def load_changed_amounts(conn: sa.Connection, after: tuple[int, str, str], until: int, limit: int) -> list[Amount]:
    """Return amounts that changed before a time and after a mark (time, node, class), in the order of their changes."""
    at, node, name = after
    mark = {"at": at, "key0": node, "key1": name}
    return [tuple(row.values()) for row in _CHANGED_AMOUNTS.all(conn, mark | {"until": until, "limit": limit})]


def load_changed_topologies(conn: sa.Connection, after: tuple[int, str], until: int, limit: int) -> list[Topology]:
    """Return topologies that changed before a time and after a mark (time, node), in the order of their changes."""
    at, node = after
    rows = conn.execute(_CHANGED_TOPOLOGIES, {"at": at, "key0": node, "until": until, "limit": limit})
    return [tuple(row) for row in rows]


def touch_hosts(conn: sa.Connection, hosts: Collection[str], now: Callable[[], int]) -> None:
    """Make schedulers read hosts again, after changes in other tables such as aggregates.

    Their providers tell conductors that these hosts may be for others now: an aggregate may be gone when they ask.
    The time is taken when all locks are held: schedulers read the last seconds again, and no claim checks aggregates.
    """
    if hosts:
        nodes = conn.execute(_LOCK, {"hosts": sorted(hosts)}).scalars().all()
        conn.execute(_LOCK_PROVIDERS, {"uuids": nodes}).all()
        at = now()
        conn.execute(_TOUCH, {"hosts": sorted(hosts), "now": at})
        conn.execute(_TOUCH_PROVIDERS, {"uuids": nodes, "now": at})


class _Node(Protocol):
    """A node with its service and its topology, which are None if there is none. Times are microseconds."""

    uuid: str
    host: str
    hypervisor_hostname: str
    hypervisor_type: str
    hypervisor_version: int
    cpu_info: dict[str, object]
    supported: list[list[str]]
    capabilities: dict[str, str]
    disk_available_gb: int | None
    running_vms: int
    current_workload: int
    failed_builds: int
    host_ip: str
    metrics: dict[str, float] | None
    changed_at: int
    disabled: bool | None
    forced_down: bool | None
    last_seen_at: int | None
    topology: str | None
    held: str | None


_Membership = tuple[str, str, dict[str, str]]  # a host, the name of an aggregate of it, and its metadata


def _complete(conn: sa.Connection, found: Sequence[object], default_zone: str) -> list[HostState]:
    rows = cast(Sequence[_Node], found)
    if not rows:
        return []
    amounts = cast(Sequence[Amount], conn.execute(_AMOUNTS_OF, {"uuids": [row.uuid for row in rows]}).all())
    hosts = {"hosts": sorted({row.host for row in rows})}
    memberships = cast(Sequence[_Membership], conn.execute(_AGGREGATES_OF, hosts).all())
    traits = _sorted_traits(
        (uuid, text) for uuid, text in conn.execute(_TRAITS_OF, {"uuids": [row.uuid for row in rows]})
    )
    return _states(rows, amounts, memberships, traits, default_zone)


def _sorted_traits(rows: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """Return traits by node."""
    known: dict[str, tuple[str, ...]] = {}
    found = {}
    for uuid, text in rows:
        if text not in known:
            known[text] = tuple(sorted(text.split(",")))
        found[uuid] = known[text]
    return found


class _Amounts(NamedTuple):
    """The amounts of one node by resource class."""

    total: dict[str, int]
    reserved: dict[str, int]
    capacity: dict[str, int]
    used: dict[str, int]
    max_unit: dict[str, int]
    allocation_ratio: dict[str, float]


def _states(
    rows: Sequence[_Node],
    amounts: Sequence[Amount],
    memberships: Sequence[_Membership],
    traits: Mapping[str, tuple[str, ...]],
    default_zone: str,
) -> list[HostState]:
    by_node: dict[str, _Amounts] = {}
    for node, name, total, reserved, capacity, used, max_unit, ratio, _ in amounts:
        if (own := by_node.get(node)) is None:
            own = by_node[node] = _Amounts({}, {}, {}, {}, {}, {})
        own.total[name], own.reserved[name], own.capacity[name], own.used[name] = total, reserved, capacity, used
        own.max_unit[name], own.allocation_ratio[name] = max_unit, ratio
    member_of: dict[str, list[tuple[str, dict[str, str]]]] = {}
    for host, name, properties in memberships:
        member_of.setdefault(host, []).append((name, properties))
    nothing = _Amounts({}, {}, {}, {}, {}, {})
    states = []
    for row in rows:
        own = by_node.get(row.uuid, nothing)
        of_host = tuple(sorted(member_of.get(row.host, ()), key=lambda each: each[0]))
        zones = (properties.get("availability_zone") for _, properties in of_host)
        states.append(
            HostState(
                host=row.host,
                node=row.hypervisor_hostname,
                node_uuid=row.uuid,
                zone=next((zone for zone in zones if zone), default_zone),
                enabled=row.disabled is not None and not row.disabled,  # a host without a service gets no servers
                forced_down=bool(row.forced_down),
                last_seen=(row.last_seen_at or 0) / 1e6,
                total=own.total,
                reserved=own.reserved,
                used=own.used,
                capacity=own.capacity,
                max_unit=own.max_unit,
                allocation_ratio=own.allocation_ratio,
                hypervisor_type=row.hypervisor_type,
                hypervisor_version=row.hypervisor_version,
                cpu_info=row.cpu_info,
                supported=tuple((arch, kind, mode) for arch, kind, mode in row.supported),
                capabilities=row.capabilities,
                traits=traits.get(row.uuid, ()),
                disk_available_gb=row.disk_available_gb,
                num_instances=row.running_vms,
                num_io_ops=row.current_workload,
                failed_builds=row.failed_builds,
                aggregates=of_host,
                host_ip=row.host_ip,
                metrics=row.metrics or {},
                changed_at=row.changed_at,
                topology=row.topology or "",
                held=row.held or "",
            )
        )
    return states
