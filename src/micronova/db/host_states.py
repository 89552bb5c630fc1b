"""Hosts as the scheduler needs them: all of them at its start, afterwards what changed."""

from collections.abc import Collection
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db.listed import one_of
from micronova.db.tables import aggregate_hosts, aggregates, compute_nodes, inventories, services
from micronova.objects.scheduling import HostState
from micronova.objects.service_names import COMPUTE

DEFAULT_ZONE = "nova"
_MANY = 5000  # beyond so many hosts, naming each costs more than reading all

Amount = tuple[str, str, int, int, int]  # node uuid, resource class, total, capacity, used
ServiceState = tuple[str, bool, bool, float]  # host, enabled, forced down, last seen


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What has changed since some time."""

    states: list[HostState]
    amounts: list[Amount]
    services: list[ServiceState]


_n, _i, _s = compute_nodes.c, inventories.c, services.c
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
    _n.cell,
    _n.changed_at,
    _s.disabled,
    _s.forced_down,
    _s.last_seen_at,
).outerjoin(services, sa.and_(_s.host == _n.host, _s.binary == COMPUTE))
_STATES_OF = _STATES.where(one_of(_n.uuid, "uuids"))
_STATES_SINCE = _STATES.where(_n.changed_at > bindparam("since"))
_AMOUNTS = sa.select(_i.node_uuid, _i.resource_class, _i.total, _i.capacity, _i.used)
_AMOUNTS_OF = _AMOUNTS.where(one_of(_i.node_uuid, "uuids"))
_AMOUNTS_SINCE = _AMOUNTS.where(_i.changed_at > bindparam("since"))
_SERVICES = sa.select(_s.host, _s.disabled, _s.forced_down, _s.last_seen_at).where(_s.binary == COMPUTE)
_SERVICES_SINCE = _SERVICES.where(_s.updated_at > bindparam("since"))
_SERVICES_HEARD_SINCE = _SERVICES.where(
    sa.or_(_s.last_seen_at > bindparam("heard_since"), _s.updated_at > bindparam("since"))
)
_AGGREGATES = sa.select(aggregate_hosts.c.host, aggregates.c.name, aggregates.c.metadata.label("properties")).join(
    aggregates, aggregates.c.id == aggregate_hosts.c.aggregate_id
)
_AGGREGATES_OF = _AGGREGATES.where(one_of(aggregate_hosts.c.host, "hosts"))


def load_hosts(
    conn: sa.Connection, uuids: Collection[str] | None = None, *, default_zone: str = DEFAULT_ZONE
) -> list[HostState]:
    """Return all hosts, or these nodes: three statements however many there are."""
    if uuids is None:
        rows = conn.execute(_STATES).all()
        amounts = conn.execute(_AMOUNTS).all()
        return _states(rows, amounts, conn.execute(_AGGREGATES).all(), default_zone)
    wanted = sorted(uuids)
    return _complete(conn, conn.execute(_STATES_OF, {"uuids": wanted}).all(), default_zone) if wanted else []


def load_changes(
    conn: sa.Connection, since: int, heard_since: int | None = None, *, default_zone: str = DEFAULT_ZONE
) -> Changes:
    """Return what changed since a time, and the services heard of since another (microseconds), in 3 statements."""
    rows = conn.execute(_STATES_SINCE, {"since": since}).all()
    if heard_since is None:
        heard = conn.execute(_SERVICES_SINCE, {"since": since}).all()
    else:
        heard = conn.execute(_SERVICES_HEARD_SINCE, {"since": since, "heard_since": heard_since}).all()
    return Changes(
        states=_complete(conn, rows, default_zone),
        amounts=_amounts(conn.execute(_AMOUNTS_SINCE, {"since": since})),
        services=[(host, not disabled, forced_down, seen / 1e6) for host, disabled, forced_down, seen in heard],
    )


def touch_hosts(conn: sa.Connection, hosts: Collection[str], now: int) -> None:
    """Make schedulers read hosts again, after changes in other tables such as aggregates."""
    conn.execute(compute_nodes.update().where(_n.host.in_(sorted(hosts))).values(changed_at=now))


def _complete(conn: sa.Connection, rows: Any, default_zone: str) -> list[HostState]:
    if not rows:
        return []
    if len(rows) > _MANY:
        amounts, groups = conn.execute(_AMOUNTS).all(), conn.execute(_AGGREGATES).all()
    else:
        amounts = conn.execute(_AMOUNTS_OF, {"uuids": [row.uuid for row in rows]}).all()
        groups = conn.execute(_AGGREGATES_OF, {"hosts": sorted({row.host for row in rows})}).all()
    return _states(rows, amounts, groups, default_zone)


def _states(rows: Any, amounts: Any, groups: Any, default_zone: str) -> list[HostState]:
    stock: dict[str, tuple[dict[str, int], dict[str, int], dict[str, int]]] = {}
    for node, name, total, capacity, used in amounts:
        totals, capacities, uses = stock.setdefault(node, ({}, {}, {}))
        totals[name], capacities[name], uses[name] = total, capacity, used
    member_of: dict[str, list[tuple[str, dict[str, str]]]] = {}
    for host, name, properties in groups:
        member_of.setdefault(host, []).append((name, properties))
    nothing: tuple[dict[str, int], dict[str, int], dict[str, int]] = ({}, {}, {})
    states = []
    for row in rows:
        totals, capacities, uses = stock.get(row.uuid, nothing)
        groups_of_host = tuple(sorted(member_of.get(row.host, ()), key=lambda each: each[0]))
        zones = (properties.get("availability_zone") for _, properties in groups_of_host)
        states.append(
            HostState(
                host=row.host,
                node=row.hypervisor_hostname,
                node_uuid=row.uuid,
                zone=next((zone for zone in zones if zone), default_zone),
                enabled=row.disabled is not None and not row.disabled,  # a host without a service gets no servers
                forced_down=bool(row.forced_down),
                last_seen=(row.last_seen_at or 0) / 1e6,
                cell=row.cell,
                total=totals,
                used=uses,
                capacity=capacities,
                hypervisor_type=row.hypervisor_type,
                hypervisor_version=row.hypervisor_version,
                cpu_info=row.cpu_info,
                supported=tuple((arch, kind, mode) for arch, kind, mode in row.supported),
                capabilities=row.capabilities,
                disk_available_gb=row.disk_available_gb,
                num_instances=row.running_vms,
                num_io_ops=row.current_workload,
                failed_builds=row.failed_builds,
                aggregates=groups_of_host,
                changed_at=row.changed_at,
            )
        )
    return states


def _amounts(rows: Any) -> list[Amount]:
    return [(node, name, total, capacity, used) for node, name, total, capacity, used in rows]
