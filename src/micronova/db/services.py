"""Services: the processes of the cloud, when they were last heard of, and whether they may be given work."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.db.tables import hosts, services
from micronova.db.upsert import PerDialect
from micronova.objects.errors import NotFound

_s = services.c
Row = sa.Row[Any]
REMOVED = "removed"  # why a host is disabled that lost its broker user
NAMESPACE = uuid.UUID("5f0d1c2e-7d57-4a4c-9a6b-6d6963726f6e")  # of the ids that follow from binary and host

_INSERT = PerDialect(lambda insert: insert(services).on_conflict_do_nothing())


def service_uuid(binary: str, host: str) -> str:
    """Return the id of a service: the same each time it registers."""
    return str(uuid.uuid5(NAMESPACE, f"{binary}@{host}"))


def heartbeat(conn: sa.Connection, binary: str, hosts: Sequence[str], now: int, version: int = 1) -> set[str]:
    """Record that a service was heard of on hosts (one statement, unless some are new); return the new."""
    if not hosts:
        return set()
    seen = sa.update(services).where(_s.binary == binary, _s.host.in_(sorted(hosts)))
    seen = seen.values(last_seen_at=now, version=version)
    if conn.execute(seen).rowcount >= len(set(hosts)):
        return set()
    return _register(conn, binary, hosts, now, version)


def _register(conn: sa.Connection, binary: str, hosts: Sequence[str], now: int, version: int) -> set[str]:
    missing = set(hosts) - set(conn.execute(sa.select(_s.host).where(_s.binary == binary)).scalars())
    added = set(missing)
    while missing:
        first = conn.execute(sa.select(sa.func.coalesce(sa.func.max(_s.id), 0))).scalar_one() + 1
        rows = [
            {
                "uuid": service_uuid(binary, host),
                "id": first + number,
                "host": host,
                "binary": binary,
                "disabled": False,
                "forced_down": False,
                "last_seen_at": now,
                "version": version,
                "created_at": now,
            }
            for number, host in enumerate(sorted(missing))
        ]
        # Ids are unique: of two who register at the same moment one finds the number taken, and tries again.
        conn.execute(_INSERT.on(conn), rows)
        missing -= set(conn.execute(sa.select(_s.host).where(_s.binary == binary)).scalars())
    return added


def list_(conn: sa.Connection, *, binary: str | None = None, host: str | None = None) -> Sequence[Row]:
    """Return services in the order in which they came."""
    query = sa.select(services).order_by(_s.id)
    if binary is not None:
        query = query.where(_s.binary == binary)
    if host is not None:
        query = query.where(_s.host == host)
    return conn.execute(query).all()


def get(conn: sa.Connection, key: str | int) -> Row:
    """Return a service by its uuid, or by the number that old microversions show; raise NotFound."""
    query = sa.select(services).where(_s.uuid == key if isinstance(key, str) else _s.id == key)
    found = conn.execute(query).first()
    if found is None:
        raise NotFound(f"Service {key} could not be found.")
    return found


def find(conn: sa.Connection, host: str, binary: str) -> Row:
    """Return the service of a host; raise NotFound."""
    found = conn.execute(sa.select(services).where(_s.host == host, _s.binary == binary)).first()
    if found is None:
        raise NotFound(f"Could not find binary {binary} on host {host}.")
    return found


def update(conn: sa.Connection, service: str, values: Mapping[str, Any], now: int) -> Row:
    """Change `disabled`, `disabled_reason` or `forced_down` of a service (by uuid); raise NotFound."""
    conn.execute(sa.update(services).where(_s.uuid == service).values(**values, updated_at=now))
    return get(conn, service)


def delete(conn: sa.Connection, service: str) -> None:
    """Forget a service (by uuid)."""
    conn.execute(sa.delete(services).where(_s.uuid == service))


def is_up(service: Row, now: int, down_time: float) -> bool:
    """Say whether a service may be believed to live: heard of lately, and not declared dead by an operator."""
    return not service.forced_down and now - service.last_seen_at <= down_time * 1_000_000


def any_silent(conn: sa.Connection, binary: str, oldest: int) -> bool:
    """Say whether some service, which nobody took out of use, was last heard of before a moment."""
    unheard = sa.select(_s.uuid).where(
        _s.binary == binary, _s.last_seen_at < oldest, _s.disabled.is_(False), _s.forced_down.is_(False)
    )
    return conn.execute(unheard.limit(1)).first() is not None


def any_up(conn: sa.Connection, binary: str, since: int, *, besides: Sequence[str] = ()) -> bool:
    """Say whether some service in use, on none of these hosts, was heard of since a moment."""
    heard = sa.select(_s.uuid).where(
        _s.binary == binary,
        _s.last_seen_at >= since,
        _s.disabled.is_(False),
        _s.forced_down.is_(False),
        _s.host.not_in(besides),
    )
    return conn.execute(heard.limit(1)).first() is not None


def host_users(conn: sa.Connection) -> frozenset[str]:
    """Return the hosts that have a broker user of their own."""
    return frozenset(conn.execute(sa.select(hosts.c.name)).scalars())


def register_host_user(conn: sa.Connection, host: str, now: int) -> None:
    """Record that a host has a broker user of its own: nobody else may speak for it from then on."""
    row = {"name": host, "cell": "", "created_at": now}
    conn.execute(_REGISTER.on(conn), row)
    back = {"disabled": False, "disabled_reason": None, "forced_down": False, "updated_at": now}
    removed = sa.and_(_s.host == host, _s.binary == "nova-compute", _s.disabled_reason == REMOVED)
    conn.execute(sa.update(services).where(removed).values(**back))


def forget_host_user(conn: sa.Connection, host: str, now: int) -> None:
    """Record that a host has no broker user any more, and count it as dead; raise NotFound if it had none."""
    if not conn.execute(sa.delete(hosts).where(hosts.c.name == host)).rowcount:
        raise NotFound(f"There is no host {host} with a broker user: `micronova host list` names all hosts.")
    out = {"disabled": True, "disabled_reason": REMOVED, "forced_down": True, "updated_at": now}
    conn.execute(sa.update(services).where(_s.host == host, _s.binary == "nova-compute").values(**out))


_REGISTER = PerDialect(lambda insert: insert(hosts).on_conflict_do_nothing())
