"""Services: the processes of the cloud, when they were last heard of, and whether they are enabled."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, cast

import sqlalchemy as sa

from micronova.db import providers
from micronova.db.listed import DIALECTS, as_pairs, one_of, pairs
from micronova.db.locking import in_order, numbered
from micronova.db.tables import hosts, services
from micronova.db.upsert import PerDialect, insert_if_absent
from micronova.objects.clock import micros
from micronova.objects.errors import NotFound, StaleHeartbeat
from micronova.objects.service_names import COMPUTE

_s = services.c
REMOVED = "removed"  # the reason for which a host without its broker user is disabled
NAMESPACE = uuid.UUID("5f0d1c2e-7d57-4a4c-9a6b-6d6963726f6e")  # of the ids that follow from binary and host


class ServiceRow(Protocol):
    """A row of `services`, as a cursor returns it. Times are microseconds since 1970 (UTC)."""

    uuid: str
    id: int
    host: str
    binary: str
    disabled: bool
    disabled_reason: str | None
    forced_down: bool
    last_seen_at: int
    alive_at: int
    stopped_at: int | None
    heartbeat_number: int
    version: int
    created_at: int
    updated_at: int | None


class ServiceChanges(TypedDict, total=False):
    """The columns of a service that administrators change."""

    disabled: bool
    disabled_reason: str | None
    forced_down: bool


_INSERT = PerDialect(lambda insert: insert(services).on_conflict_do_nothing())


def service_uuid(binary: str, host: str) -> str:
    """Return the id of a service: the same each time it registers."""
    return str(uuid.uuid5(NAMESPACE, f"{binary}@{host}"))


_OF_HOSTS = sa.and_(_s.binary == sa.bindparam("b_binary"), one_of(_s.host, "b_hosts"))
# The rows are locked in one order: two conductors may hear of the same hosts at the same moment.
_SEEN = (
    sa.update(services).where(in_order(_s.uuid, _OF_HOSTS)).values(last_seen_at=sa.bindparam("now"), stopped_at=None)
)
_SEEN_WITH_VERSION = _SEEN.values(version=sa.bindparam("b_version"))
_STOPPED = (
    sa.update(services)
    .where(in_order(_s.uuid, _OF_HOSTS))
    .values(last_seen_at=sa.bindparam("seen"), stopped_at=sa.bindparam("now"), updated_at=sa.bindparam("now"))
)
_KNOWN_HOSTS = sa.select(_s.host).where(_OF_HOSTS)
_NUMBERS = sa.select(_s.host, _s.heartbeat_number).where(_OF_HOSTS)


def _seen_in_order(
    numbers: sa.TableValuedAlias, alive: sa.TableValuedAlias, versions: sa.TableValuedAlias
) -> sa.Update:
    """Return the statement that records heartbeats, unless newer ones are recorded.

    `numbers` are by host, and so are the times at which the hosts are known to have been `alive`, and the `versions` of
    their agents.
    """
    number, alive_at = sa.cast(numbers.c.value, sa.BigInteger), sa.cast(alive.c.value, sa.BigInteger)
    of_host = (_s.host == numbers.c.key, _s.host == alive.c.key, _s.host == versions.c.key)
    newer = _SEEN.where(*of_host, _s.heartbeat_number <= number)
    return newer.values(heartbeat_number=number, alive_at=alive_at, version=sa.cast(versions.c.value, sa.Integer))


def _newer(numbers: sa.TableValuedAlias) -> sa.Select[Any]:
    """Return the statement that reads heartbeats that are newer than these."""
    newer = sa.select(_s.host, _s.heartbeat_number).where(_OF_HOSTS, _s.host == numbers.c.key)
    return newer.where(_s.heartbeat_number > sa.cast(numbers.c.value, sa.BigInteger))


_SEEN_IN_ORDER = {
    dialect: _seen_in_order(pairs("numbers", dialect), pairs("alive", dialect), pairs("versions", dialect))
    for dialect in DIALECTS
}
_NEWER = {dialect: _newer(pairs("numbers", dialect)) for dialect in DIALECTS}
STATE_OF_HOST = (
    _s.disabled.label("service_disabled"),
    _s.forced_down.label("service_forced_down"),
    _s.last_seen_at.label("service_seen_at"),
)
"""Columns of `with_services`: the state of the compute service on a server's host; null if there is none."""
_ON_HOSTS = sa.select(services).where(_OF_HOSTS).order_by(_s.id)


def with_services(servers: sa.FromClause) -> sa.Join:
    """Return servers with the compute services on their hosts."""
    compute = sa.literal_column(f"'{COMPUTE}'", sa.String)  # no parameter: each statement has the same
    return servers.outerjoin(services, sa.and_(_s.host == servers.c.host, _s.binary == compute))


def heartbeat(conn: sa.Connection, binary: str, hosts: Sequence[str], now: int, version: int = 1) -> set[str]:
    """Record that a service was heard of on hosts (one statement, unless some are new); return the new."""
    names = sorted(set(hosts))
    if not names:
        return set()
    values = {"b_binary": binary, "b_hosts": names, "now": now, "b_version": version}
    if conn.execute(_SEEN_WITH_VERSION, values).rowcount >= len(names):
        return set()
    return _register(conn, binary, names, now, version)


def newer_heartbeats(conn: sa.Connection, numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of recorded heartbeats of compute hosts that are newer than these, by host."""
    values = {"b_binary": COMPUTE, "b_hosts": sorted(numbers), "numbers": as_pairs(numbers)}
    return {row.host: row.heartbeat_number for row in conn.execute(_NEWER[conn.dialect.name], values)}


def compute_heartbeats(
    conn: sa.Connection,
    numbers: Mapping[str, int],
    alive: Mapping[str, int],
    now: int,
    versions: Mapping[str, int] | None = None,
) -> set[str]:
    """Record the heartbeats of compute hosts, by host and number; raise StaleHeartbeat if one has a newer one already.

    `alive` are the times at which the hosts are known to have been alive, `versions` those of their agents. The
    heartbeat that was applied last may be applied again: a message may be delivered twice. Return the new hosts.
    """
    of_hosts: dict[str, Any] = {"b_binary": COMPUTE, "b_hosts": sorted(numbers)}
    versions = versions or dict.fromkeys(numbers, 1)
    values = {
        **of_hosts,
        "now": now,
        "numbers": as_pairs(numbers),
        "alive": as_pairs(alive),
        "versions": as_pairs(versions),
    }
    if conn.execute(_SEEN_IN_ORDER[conn.dialect.name], values).rowcount >= len(numbers):
        return set()
    known = {row.host: row.heartbeat_number for row in conn.execute(_NUMBERS, of_hosts)}
    for host, newest in known.items():
        if newest > numbers[host]:
            raise StaleHeartbeat(f"A newer heartbeat of host {host} was applied already.", newest=newest)
    new = _register(conn, COMPUTE, sorted(numbers.keys() - known.keys()), now, 1)
    if new:
        compute_heartbeats(
            conn,
            {host: numbers[host] for host in new},
            {host: alive[host] for host in new},
            now,
            {host: versions[host] for host in new},
        )
    return new


def compute_hosts_stopped(conn: sa.Connection, hosts: Iterable[str], now: int, down_time: float) -> None:
    """Record that compute hosts have announced their stop: they count as down at once, and may return.

    Schedulers read it with the next changes, and not only when they look for late heartbeats.
    """
    if names := sorted(set(hosts)):
        values = {"b_binary": COMPUTE, "b_hosts": names, "now": now, "seen": now - micros(down_time) - 1}
        conn.execute(_STOPPED, values)


def _register(conn: sa.Connection, binary: str, hosts: Sequence[str], now: int, version: int) -> set[str]:
    of_hosts = {"b_binary": binary, "b_hosts": hosts}
    missing = set(hosts) - set(conn.execute(_KNOWN_HOSTS, of_hosts).scalars())
    added = set(missing)
    while missing:
        first = conn.execute(sa.select(sa.func.coalesce(sa.func.max(_s.id), 0))).scalar_one() + 1
        rows = [
            {
                "uuid": service_uuid(binary, host),
                "host": host,
                "binary": binary,
                "disabled": False,
                "forced_down": False,
                "last_seen_at": now,
                "version": version,
                "created_at": now,
            }
            for host in missing
        ]
        # Ids are unique: of two processes that register at the same moment, one finds its id taken and tries again.
        conn.execute(_INSERT.on(conn), numbered(rows, first))
        missing -= set(conn.execute(_KNOWN_HOSTS, of_hosts).scalars())
    return added


_SILENT = sa.select(_s.host, _s.last_seen_at).where(_OF_HOSTS, _s.last_seen_at < sa.bindparam("before"))
_LOCK = sa.select(_s.uuid).where(_OF_HOSTS).order_by(_s.uuid).with_for_update()


def silent(conn: sa.Connection, binary: str, hosts: Sequence[str], before: int) -> dict[str, int]:
    """Return those of the hosts that were last heard of before a time, and when.

    If there are some, their rows stay locked, so only one of two concurrent transactions reports a host as back.
    """
    values = {"b_binary": binary, "b_hosts": sorted(set(hosts))}
    if conn.execute(_SILENT, {**values, "before": before}).first() is None:
        return {}
    conn.execute(_LOCK, values)
    return {row.host: row.last_seen_at for row in conn.execute(_SILENT, {**values, "before": before})}


def on_hosts(conn: sa.Connection, binary: str, hosts: Iterable[str]) -> dict[str, ServiceRow]:
    """Return the services of this binary on hosts, by host: one statement."""
    found = conn.execute(_ON_HOSTS, {"b_binary": binary, "b_hosts": sorted(set(hosts))})
    return {row.host: cast(ServiceRow, row) for row in found}


def count_up(conn: sa.Connection, binary: str, now: int, down_time: float) -> int:
    """Return on how many hosts a service is up."""
    counted = sa.select(sa.func.count()).select_from(services).where(_s.binary == binary, is_up_at(now, down_time))
    return int(conn.execute(counted).scalar_one())


def list_(
    conn: sa.Connection,
    *,
    binary: str | None = None,
    host: str | None = None,
    after: int = 0,
    limit: int | None = None,
) -> Sequence[ServiceRow]:
    """Return services in the order in which they registered, after the one with this number."""
    query = sa.select(services).where(_s.id > after).order_by(_s.id).limit(limit)
    if binary is not None:
        query = query.where(_s.binary == binary)
    if host is not None:
        query = query.where(_s.host == host)
    return cast(Sequence[ServiceRow], conn.execute(query).all())


def get(conn: sa.Connection, key: str | int) -> ServiceRow:
    """Return a service by its uuid, or by the number that old microversions show; raise NotFound."""
    query = sa.select(services).where(_s.uuid == key if isinstance(key, str) else _s.id == key)
    found = conn.execute(query).first()
    if found is None:
        raise NotFound(f"Service {key} could not be found.")
    return cast(ServiceRow, found)


def find(conn: sa.Connection, host: str, binary: str) -> ServiceRow:
    """Return the service of a host; raise NotFound."""
    found = conn.execute(sa.select(services).where(_s.host == host, _s.binary == binary)).first()
    if found is None:
        raise NotFound(f"Could not find binary {binary} on host {host}.")
    return cast(ServiceRow, found)


def update(conn: sa.Connection, service: str, values: ServiceChanges, now: int) -> ServiceRow:
    """Change a service (by uuid); raise NotFound. The traits of its nodes say whether it is disabled."""
    found = get(conn, service)
    if "disabled" in values and found.binary == COMPUTE:
        providers.follow_service(conn, found.host, disabled=values["disabled"], now=now)
    conn.execute(sa.update(services).where(_s.uuid == service).values(**values, updated_at=now))
    return get(conn, service)


def delete(conn: sa.Connection, service: str) -> None:
    """Delete a service (by uuid)."""
    conn.execute(sa.delete(services).where(_s.uuid == service))


def is_up(service: ServiceRow, now: int, down_time: float) -> bool:
    """Return whether a service is up: heard of within `down_time` seconds, and not forced down."""
    return not service.forced_down and now - service.last_seen_at <= micros(down_time)


def is_up_at(now: int, down_time: float) -> sa.ColumnElement[bool]:
    """Return the rule of `is_up` as a condition."""
    return sa.and_(_s.forced_down.is_(False), _s.last_seen_at >= now - micros(down_time))


def host_is_up(conn: sa.Connection, host: str, now: int, down_time: float, *, since: int | None = None) -> bool:
    """Return whether a compute host is up; one that never registered is not.

    With `since`, it must be known to have been alive after that time: a host that has just died counts as up for long,
    and a heartbeat that it sent before may arrive late.
    """
    up = sa.select(_s.uuid).where(_s.host == host, _s.binary == COMPUTE, is_up_at(now, down_time))
    if since is not None:
        up = up.where(_s.alive_at > since)
    return conn.execute(up).first() is not None


def host_is_lost(conn: sa.Connection, host: str, now: int, down_time: float) -> bool:
    """Return whether nobody needs to wait for a compute host: it is down, and was not just stopped to be started again.

    This rule decides about what cannot be undone. A host that announces its stop is lost `down_time` seconds later,
    unless it is forced down. Silence may be an outage of the bus: a conductor asks `Transitions.host_is_lost`.
    """
    returns = sa.and_(_s.forced_down.is_(False), _s.stopped_at >= now - micros(down_time))
    not_lost = sa.select(_s.uuid).where(
        _s.host == host, _s.binary == COMPUTE, sa.or_(is_up_at(now, down_time), returns)
    )
    return conn.execute(not_lost).first() is None


def host_is_forced_down(conn: sa.Connection, host: str) -> bool:
    """Return whether an administrator has said that a compute host is down."""
    forced = sa.select(_s.uuid).where(_s.host == host, _s.binary == COMPUTE, _s.forced_down.is_(True))
    return conn.execute(forced).first() is not None


def host_may_return(conn: sa.Connection, host: str, now: int, down_time: float) -> bool:
    """Return whether a compute host is up, or has been down for less than `down_time` seconds.

    Agents that are restarted, all of them perhaps, are silent for some seconds.
    """
    return host_is_up(conn, host, now, 2 * down_time)


def any_up(conn: sa.Connection, binary: str, now: int, down_time: float, *, besides: Sequence[str] = ()) -> bool:
    """Return whether a service that is enabled and up runs on another host than these."""
    up = sa.select(_s.uuid).where(
        _s.binary == binary, _s.disabled.is_(False), ~one_of(_s.host, "besides"), is_up_at(now, down_time)
    )
    return conn.execute(up.limit(1), {"besides": list(besides)}).first() is not None


def any_without_heartbeat(conn: sa.Connection, binary: str, now: int, down_time: float) -> bool:
    """Return whether a service that is enabled and not forced down has not been heard of for too long."""
    unheard = sa.select(_s.uuid).where(
        _s.binary == binary, _s.disabled.is_(False), _s.forced_down.is_(False), sa.not_(is_up_at(now, down_time))
    )
    return conn.execute(unheard.limit(1)).first() is not None


HostUsersMark = tuple[int, int, int, int]  # differs when the hosts that have, or had, broker users differ
_h = hosts.c
_HOST_USERS_MARK = sa.select(
    sa.func.count(),
    sa.func.coalesce(sa.func.sum(_h.created_at), 0),
    sa.func.count(_h.removed_at),
    sa.func.coalesce(sa.func.sum(_h.removed_at), 0),
).select_from(hosts)


class HostUserNames(NamedTuple):
    """The hosts that have a broker user of their own, and those that had one and were removed."""

    registered: frozenset[str]
    removed: frozenset[str]


def host_users(conn: sa.Connection) -> HostUserNames:
    """Return the hosts that have, or had, a broker user of their own."""
    rows = conn.execute(sa.select(_h.name, _h.removed_at)).all()
    removed = frozenset(row.name for row in rows if row.removed_at is not None)
    return HostUserNames(frozenset(row.name for row in rows) - removed, removed)


def host_users_unless(conn: sa.Connection, known: HostUsersMark | None) -> tuple[HostUsersMark, HostUserNames | None]:
    """Return the mark of the present host users, and these themselves unless their mark is the known one."""
    count, created, removals, removed = conn.execute(_HOST_USERS_MARK).one()
    mark = (int(count), int(created), int(removals), int(removed))
    return mark, None if mark == known else host_users(conn)


def console_address(conn: sa.Connection, host: str) -> str | None:
    """Return the address registered for a host's console relay, "" if none is or the host was removed.

    Return None if the host never had a broker user of its own.
    """
    found: str | None = conn.execute(sa.select(_h.console_address).where(_h.name == host)).scalar()
    return found


def register_host_user(conn: sa.Connection, host: str, now: int, console_address: str = "") -> None:
    """Record that a host has a broker user of its own; from then on only that user sends its messages.

    A host that is registered already keeps its console address, unless there is a new one. One that was removed is
    registered anew.
    """
    row = {"name": host, "console_address": console_address, "created_at": now, "removed_at": None}
    if not insert_if_absent(conn, hosts, row):
        again = sa.update(hosts).where(_h.name == host, _h.removed_at.is_not(None)).values(**row)
        if not conn.execute(again).rowcount and console_address:
            conn.execute(sa.update(hosts).where(_h.name == host).values(console_address=console_address))
    back = {"disabled": False, "disabled_reason": None, "forced_down": False, "updated_at": now}
    removed = sa.and_(_s.host == host, _s.binary == COMPUTE, _s.disabled_reason == REMOVED)
    if conn.execute(sa.select(_s.uuid).where(removed)).first() is not None:
        providers.follow_service(conn, host, disabled=False, now=now)
    conn.execute(sa.update(services).where(removed).values(**back))


def forget_host_user(conn: sa.Connection, host: str, now: int) -> None:
    """Record that a host has no broker user any more, and force it down; raise NotFound if it had none.

    The broker knows the user until an administrator deletes it there, so the host stays known as removed.
    """
    gone = sa.update(hosts).where(_h.name == host, _h.removed_at.is_(None))
    if not conn.execute(gone.values(removed_at=now, console_address="")).rowcount:
        raise NotFound(f"There is no host {host} with a broker user: `micronova host list` names all hosts.")
    providers.follow_service(conn, host, disabled=True, now=now)
    out = {"disabled": True, "disabled_reason": REMOVED, "forced_down": True, "updated_at": now}
    conn.execute(sa.update(services).where(_s.host == host, _s.binary == COMPUTE).values(**out))
