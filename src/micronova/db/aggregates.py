"""Aggregates: groups of hosts with metadata; one with `availability_zone` is (a part of) a zone."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.db.host_states import touch_hosts
from micronova.db.tables import aggregate_hosts, aggregates, instances, services
from micronova.db.upsert import PerDialect
from micronova.objects.errors import Conflict, Invalid, NotFound

_a, _h = aggregates.c, aggregate_hosts.c
Row = sa.Row[Any]
ZONE = "availability_zone"

_INSERT = PerDialect(lambda insert: insert(aggregates).on_conflict_do_nothing(index_elements=[_a.name]))
_ADD = PerDialect(lambda insert: insert(aggregate_hosts).on_conflict_do_nothing())


def insert(conn: sa.Connection, uuid: str, name: str, zone: str | None, now: int) -> Row:
    """Add an aggregate; raise Conflict when its name is taken."""
    row = {"uuid": uuid, "name": name, "metadata": {ZONE: zone} if zone else {}, "created_at": now}
    if conn.execute(_INSERT.on(conn), row).rowcount != 1:
        raise Conflict(f"Aggregate {name} already exists.")
    return conn.execute(sa.select(aggregates).where(_a.uuid == uuid)).one()


def get(conn: sa.Connection, number: int, lock: bool = False) -> Row:
    """Return an aggregate; raise NotFound. A locked one nobody else changes until the transaction ends."""
    query = sa.select(aggregates).where(_a.id == number)
    found = conn.execute(query.with_for_update() if lock else query).first()
    if found is None:
        raise NotFound(f"Aggregate {number} could not be found.")
    return found


def list_(conn: sa.Connection) -> Sequence[Row]:
    """Return all aggregates in the order in which they came."""
    return conn.execute(sa.select(aggregates).order_by(_a.id)).all()


def hosts(conn: sa.Connection, numbers: Iterable[int] | None = None) -> dict[int, list[str]]:
    """Return the hosts of aggregates, by the aggregate's number."""
    query = sa.select(aggregate_hosts).order_by(_h.aggregate_id, _h.host)
    if numbers is not None:
        query = query.where(_h.aggregate_id.in_(list(numbers)))
    found: dict[int, list[str]] = {}
    for row in conn.execute(query):
        found.setdefault(row.aggregate_id, []).append(row.host)
    return found


def zones(conn: sa.Connection, of: Iterable[str] | None = None) -> dict[str, str]:
    """Return the zone of each host that is in one's aggregate."""
    query = sa.select(_h.host, _a.metadata).join(aggregates, _a.id == _h.aggregate_id).order_by(_a.id)
    if of is not None:
        query = query.where(_h.host.in_(list(of)))
    found: dict[str, str] = {}
    for row in conn.execute(query):
        if zone := row.metadata.get(ZONE):
            found.setdefault(row.host, zone)
    return found


def update(conn: sa.Connection, number: int, name: str | None, metadata: Mapping[str, str | None], now: int) -> Row:
    """Rename an aggregate, or change its metadata (None takes a key away); NotFound, Conflict, Invalid."""
    found = get(conn, number, lock=True)
    members = hosts(conn, [number]).get(number, [])
    if ZONE in metadata:
        _check_zone(conn, found, metadata[ZONE], members)
    merged = {**found.metadata, **metadata}
    kept = {key: value for key, value in merged.items() if value is not None}
    values: dict[str, Any] = {"metadata": kept, "updated_at": now}
    if name is not None and name != found.name:
        if conn.execute(sa.select(_a.id).where(_a.name == name)).first():
            raise Conflict(f"Aggregate {name} already exists.")
        values["name"] = name
    conn.execute(sa.update(aggregates).where(_a.id == number).values(**values))
    touch_hosts(conn, members, now)
    return get(conn, number)


def _check_zone(conn: sa.Connection, found: Row, zone: str | None, members: Sequence[str]) -> None:
    """A zone of servers that exist must not change under them, and a host is in one zone at most."""
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
    query = sa.select(_a.metadata).join(aggregate_hosts, _a.id == _h.aggregate_id)
    rows = conn.execute(query.where(_h.host.in_(list(members)), _a.id != number))
    return {found for row in rows if (found := row.metadata.get(ZONE)) and found != zone}


def _has_instances(conn: sa.Connection, members: Sequence[str]) -> bool:
    query = sa.select(instances.c.uuid).where(instances.c.host.in_(list(members))).limit(1)
    return conn.execute(query).first() is not None


def delete(conn: sa.Connection, number: int) -> None:
    """Remove an aggregate; raise NotFound, or Invalid while it has hosts."""
    get(conn, number, lock=True)
    if hosts(conn, [number]):
        raise Invalid(f"Cannot delete aggregate {number}: it has hosts; remove them first.")
    conn.execute(sa.delete(aggregates).where(_a.id == number))


def add_host(conn: sa.Connection, number: int, host: str, now: int) -> Row:
    """Add a host to an aggregate; raise NotFound, Conflict."""
    service = services.c
    known = sa.select(service.uuid).where(service.host == host, service.binary == "nova-compute")
    if conn.execute(known).first() is None:
        raise NotFound(f"Compute host {host} could not be found.")
    found = get(conn, number, lock=True)
    zone = found.metadata.get(ZONE)
    if zone:
        if _others(conn, number, zone, [host]):
            raise Conflict(f"Cannot add host to aggregate {number}: {host} is in another availability zone.")
        if zones(conn, [host]).get(host) != zone and _has_instances(conn, [host]):
            raise Conflict(f"Cannot add host to aggregate {number}: the zone of its servers would change.")
    if conn.execute(_ADD.on(conn), {"aggregate_id": number, "host": host}).rowcount != 1:
        raise Conflict(f"Aggregate {number} already has host {host}.")
    conn.execute(sa.update(aggregates).where(_a.id == number).values(updated_at=now))
    touch_hosts(conn, [host], now)
    return get(conn, number)


def remove_host(conn: sa.Connection, number: int, host: str, now: int) -> Row:
    """Take a host out of an aggregate; raise NotFound, Conflict."""
    found = get(conn, number, lock=True)
    zone = found.metadata.get(ZONE)
    if zone and not (_others(conn, number, "", [host])) and _has_instances(conn, [host]):
        raise Conflict(f"Cannot remove host from aggregate {number}: the zone of its servers would change.")
    leave = sa.delete(aggregate_hosts).where(_h.aggregate_id == number, _h.host == host)
    if conn.execute(leave).rowcount != 1:
        raise NotFound(f"Cannot remove host {host} in aggregate {number}")
    conn.execute(sa.update(aggregates).where(_a.id == number).values(updated_at=now))
    touch_hosts(conn, [host], now)
    return get(conn, number)


def forget_host(conn: sa.Connection, host: str) -> None:
    """Take a host out of every aggregate: it is no more."""
    conn.execute(sa.delete(aggregate_hosts).where(_h.host == host))
