"""Aggregates: groups of hosts with metadata. The metadata `availability_zone` puts the hosts into a zone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import sqlalchemy as sa

from micronova.db import providers
from micronova.db.host_states import touch_hosts
from micronova.db.listed import one_of
from micronova.db.tables import aggregate_hosts, aggregates, compute_nodes, instances, inventories, services
from micronova.db.upsert import PerDialect, insert_if_absent
from micronova.objects.errors import Conflict, Invalid, NotFound
from micronova.objects.service_names import COMPUTE

_a, _h = aggregates.c, aggregate_hosts.c
ZONE = "availability_zone"


class AggregateRow(Protocol):
    """A row of `aggregates`, as a cursor returns it. Times are microseconds since 1970 (UTC)."""

    id: int
    uuid: str
    name: str
    metadata: dict[str, str]
    created_at: int
    updated_at: int | None


_INSERT = PerDialect(lambda insert: insert(aggregates).on_conflict_do_nothing(index_elements=[_a.name]))


def insert(conn: sa.Connection, uuid: str, name: str, zone: str | None, now: int) -> AggregateRow:
    """Add an aggregate; raise Conflict when its name is taken."""
    row = {"uuid": uuid, "name": name, "metadata": {ZONE: zone} if zone else {}, "created_at": now}
    if conn.execute(_INSERT.on(conn), row).rowcount != 1:
        raise Conflict(f"Aggregate {name} already exists.")
    return cast(AggregateRow, conn.execute(sa.select(aggregates).where(_a.uuid == uuid)).one())


def get(conn: sa.Connection, number: int, lock: bool = False) -> AggregateRow:
    """Return an aggregate, locked until the transaction ends if asked for; raise NotFound."""
    query = sa.select(aggregates).where(_a.id == number)
    found = conn.execute(query.with_for_update() if lock else query).first()
    if found is None:
        raise NotFound(f"Aggregate {number} could not be found.")
    return cast(AggregateRow, found)


def list_(conn: sa.Connection) -> Sequence[AggregateRow]:
    """Return all aggregates in the order of their creation."""
    return cast(Sequence[AggregateRow], conn.execute(sa.select(aggregates).order_by(_a.id)).all())


def hosts(conn: sa.Connection, numbers: Iterable[int] | None = None) -> dict[int, list[str]]:
    """Return the hosts of aggregates, by the aggregate's number."""
    query = sa.select(aggregate_hosts).order_by(_h.aggregate_id, _h.host)
    if numbers is not None:
        query = query.where(_h.aggregate_id.in_(list(numbers)))
    found: dict[int, list[str]] = {}
    for row in conn.execute(query):
        found.setdefault(row.aggregate_id, []).append(row.host)
    return found


def largest_ratios(conn: sa.Connection, numbers: Iterable[int] | None = None) -> dict[int, dict[str, float]]:
    """Return the largest allocation ratio of the hosts of aggregates, by the aggregate's number and resource class."""
    query = (
        sa.select(_h.aggregate_id, inventories.c.resource_class, sa.func.max(inventories.c.allocation_ratio))
        .join(compute_nodes, compute_nodes.c.host == _h.host)
        .join(inventories, inventories.c.node_uuid == compute_nodes.c.uuid)
        .group_by(_h.aggregate_id, inventories.c.resource_class)
    )
    if numbers is not None:
        query = query.where(_h.aggregate_id.in_(list(numbers)))
    found: dict[int, dict[str, float]] = {}
    for number, resource_class, ratio in conn.execute(query):
        found.setdefault(number, {})[resource_class] = ratio
    return found


def zones(conn: sa.Connection, of: Iterable[str] | None = None) -> dict[str, str]:
    """Return the availability zone of each host that an aggregate puts into one."""
    query = sa.select(_h.host, _a.metadata).join(aggregates, _a.id == _h.aggregate_id).order_by(_a.id)
    if of is not None:
        query = query.where(one_of(_h.host, "hosts"))
    found: dict[str, str] = {}
    for row in conn.execute(query, {} if of is None else {"hosts": list(of)}):
        if zone := row.metadata.get(ZONE):
            found.setdefault(row.host, zone)
    return found


def zones_available(conn: sa.Connection, default_zone: str) -> dict[str, bool]:
    """Return the zones that have a compute service, and whether one of its services is enabled: counted, not listed."""
    zone_of = _zone_of_aggregates(conn)
    service = services.c
    enabled = sa.func.max(sa.case((service.disabled.is_(False), 1), else_=0))
    compute = sa.and_(service.host == _h.host, service.binary == COMPUTE)
    members = sa.select(_h.aggregate_id, enabled).join(services, compute).where(_h.aggregate_id.in_(list(zone_of)))
    found: dict[str, bool] = {}
    for number, usable in conn.execute(members.group_by(_h.aggregate_id)):
        zone = zone_of[number]
        found[zone] = found.get(zone, False) or bool(usable)
    in_zones = sa.select(_h.host).where(_h.aggregate_id.in_(list(zone_of)))
    others = sa.select(enabled).where(service.binary == COMPUTE, service.host.not_in(in_zones))
    usable = conn.execute(others).scalar()
    if usable is not None:
        found[default_zone] = found.get(default_zone, False) or bool(usable)
    return found


def has_zone(conn: sa.Connection, zone: str) -> bool:
    """Return whether an aggregate has this availability zone."""
    return zone in _zone_of_aggregates(conn).values()


def _zone_of_aggregates(conn: sa.Connection) -> dict[int, str]:
    found = conn.execute(sa.select(_a.id, _a.metadata)).all()
    return {row.id: row.metadata[ZONE] for row in found if row.metadata.get(ZONE)}


def zone_is_in_service(conn: sa.Connection, zone: str, default_zone: str) -> bool:
    """Return whether a host of the zone has a compute service that is enabled and not forced down.

    Heartbeats do not count, because they are missing during an outage of the broker, too. This reads the aggregates and
    looks for one host, however many there are.
    """
    zone_of = _zone_of_aggregates(conn)
    service = services.c
    usable = sa.select(service.uuid).where(
        service.binary == COMPUTE, service.disabled.is_(False), service.forced_down.is_(False)
    )
    own = [number for number, name in zone_of.items() if name == zone]
    if own:
        hosts_of = sa.select(_h.host).where(_h.aggregate_id.in_(own))
        if conn.execute(usable.where(service.host.in_(hosts_of)).limit(1)).first() is not None:
            return True
    if zone != default_zone:
        return False
    in_zones = sa.select(_h.host).where(_h.aggregate_id.in_(list(zone_of)))
    return conn.execute(usable.where(service.host.not_in(in_zones)).limit(1)).first() is not None


def update(
    conn: sa.Connection, number: int, name: str | None, metadata: Mapping[str, str | None], now: Callable[[], int]
) -> AggregateRow:
    """Rename an aggregate, or change its metadata (None removes a key); raise NotFound, Conflict or Invalid."""
    found = get(conn, number, lock=True)
    members = hosts(conn, [number]).get(number, [])
    if ZONE in metadata:
        _check_zone(conn, found, metadata[ZONE], members)
    merged = {**found.metadata, **metadata}
    kept = {key: value for key, value in merged.items() if value is not None}
    values: dict[str, Any] = {"metadata": kept, "updated_at": now()}
    if name is not None and name != found.name:
        if conn.execute(sa.select(_a.id).where(_a.name == name)).first():
            raise Conflict(f"Aggregate {name} already exists.")
        values["name"] = name
    conn.execute(sa.update(aggregates).where(_a.id == number).values(**values))
    touch_hosts(conn, members, now)
    return get(conn, number)


def _check_zone(conn: sa.Connection, found: AggregateRow, zone: str | None, members: Sequence[str]) -> None:
    """Raise Invalid if the zone of existing servers would change, or a host would be in two zones."""
    refused = f"Cannot update aggregate {found.id}"
    if not zone:
        raise Invalid(f"{refused}: the name of an availability zone must not be empty.")
    if zone == found.metadata.get(ZONE):
        return
    if _others(conn, found.id, zone, members):
        raise Invalid(f"{refused}: some of its hosts are in another availability zone.")
    if members and _has_instances(conn, members):
        raise Invalid(f"{refused}: some of its hosts have servers, whose availability zone would change.")


def _others(conn: sa.Connection, number: int, zone: str, members: Sequence[str]) -> set[str]:
    """Return the other zones that these hosts are in through other aggregates."""
    of_hosts = sa.select(_h.aggregate_id).where(one_of(_h.host, "hosts"))
    query = sa.select(_a.metadata).where(_a.id != number, _a.id.in_(of_hosts))
    rows = conn.execute(query, {"hosts": list(members)})
    return {found for row in rows if (found := row.metadata.get(ZONE)) and found != zone}


def _has_instances(conn: sa.Connection, members: Sequence[str]) -> bool:
    query = sa.select(instances.c.uuid).where(one_of(instances.c.host, "hosts")).limit(1)
    return conn.execute(query, {"hosts": list(members)}).first() is not None


def delete(conn: sa.Connection, number: int) -> None:
    """Delete an aggregate; raise NotFound, or Invalid if it has hosts."""
    get(conn, number, lock=True)
    if hosts(conn, [number]):
        raise Invalid(f"Cannot delete aggregate {number}: it has hosts; remove them first.")
    conn.execute(sa.delete(aggregates).where(_a.id == number))


def add_host(conn: sa.Connection, number: int, host: str, now: Callable[[], int]) -> AggregateRow:
    """Add a host to an aggregate; raise NotFound, Conflict."""
    service = services.c
    known = sa.select(service.uuid).where(service.host == host, service.binary == COMPUTE)
    if conn.execute(known).first() is None:
        raise NotFound(f"Compute host {host} could not be found.")
    found = get(conn, number, lock=True)
    zone = found.metadata.get(ZONE)
    if zone:
        if _others(conn, number, zone, [host]):
            raise Conflict(f"Cannot add host to aggregate {number}: {host} is in another availability zone.")
        if zones(conn, [host]).get(host) != zone and _has_instances(conn, [host]):
            raise Conflict(f"Cannot add host to aggregate {number}: the zone of its servers would change.")
    if not insert_if_absent(conn, aggregate_hosts, {"aggregate_id": number, "host": host}):
        raise Conflict(f"Aggregate {number} already has host {host}.")
    providers.follow_host(conn, host, found.uuid, joined=True)
    conn.execute(sa.update(aggregates).where(_a.id == number).values(updated_at=now()))
    touch_hosts(conn, [host], now)
    return get(conn, number)


def remove_host(conn: sa.Connection, number: int, host: str, now: Callable[[], int]) -> AggregateRow:
    """Remove a host from an aggregate; raise NotFound or Conflict."""
    found = get(conn, number, lock=True)
    zone = found.metadata.get(ZONE)
    if zone and not (_others(conn, number, "", [host])) and _has_instances(conn, [host]):
        raise Conflict(f"Cannot remove host from aggregate {number}: the zone of its servers would change.")
    leave = sa.delete(aggregate_hosts).where(_h.aggregate_id == number, _h.host == host)
    if conn.execute(leave).rowcount != 1:
        raise NotFound(f"Cannot remove host {host} in aggregate {number}")
    providers.follow_host(conn, host, found.uuid, joined=False)
    conn.execute(sa.update(aggregates).where(_a.id == number).values(updated_at=now()))
    touch_hosts(conn, [host], now)
    return get(conn, number)


def any_changed_since(conn: sa.Connection, moment: int) -> bool:
    """Return whether an aggregate, or the hosts of one, changed after a time; deleted ones are not known."""
    changed = sa.select(_a.id).where(sa.func.coalesce(_a.updated_at, _a.created_at) > moment)
    return conn.execute(changed.limit(1)).first() is not None


def forget_host(conn: sa.Connection, host: str) -> None:
    """Remove a deleted host from all aggregates."""
    conn.execute(sa.delete(aggregate_hosts).where(_h.host == host))
