"""Counts of the whole region for metrics and `micronova status`: operations, services, servers. All are aggregates."""

from typing import Final

import msgspec
import sqlalchemy as sa

from micronova.db.services import is_up_at
from micronova.db.tables import instances, operations, services
from micronova.objects.service_names import COMPUTE
from micronova.objects.states import status

_o, _s, _i = operations.c, services.c, instances.c
_OPEN: Final = _o.finished_at.is_(None)
_NOW = sa.bindparam("now", type_=sa.BigInteger)
_OPERATIONS = (
    sa.select(
        _o.kind,
        _o.step,
        sa.func.count().label("number"),
        sa.func.min(_o.created_at).label("oldest"),
        sa.func.sum(sa.case((_o.deadline < _NOW, 1), else_=0)).label("late"),
        sa.func.sum(sa.case((_o.lease_until < _NOW, 1), else_=0)).label("unleased"),
        sa.func.max(_o.leases).label("leases"),
    )
    .where(_OPEN)
    .group_by(_o.kind, _o.step)
    .order_by(_o.kind, _o.step)
)
_SERVERS = sa.select(_i.vm_state, _i.task_state, sa.func.count().label("number")).group_by(_i.vm_state, _i.task_state)


class OperationCount(msgspec.Struct, frozen=True):
    """The open operations of one kind at one step."""

    kind: str
    step: str
    number: int
    oldest_seconds: float
    late: int  # whose deadline is over
    unleased: int  # which nobody works on at this moment: they wait, or nobody has found them yet
    most_leases: int  # how often one of them was begun


class ServiceCount(msgspec.Struct, frozen=True):
    """The services of one name in one state: up, down or disabled."""

    binary: str
    state: str
    number: int


class RegionCounts(msgspec.Struct, frozen=True):
    """What is counted of a region."""

    operations: tuple[OperationCount, ...]
    services: tuple[ServiceCount, ...]
    servers: dict[str, int]  # by the status that users see


def read(conn: sa.Connection, now: int, down_time: float) -> RegionCounts:
    """Count what there is, in three statements."""
    found = [
        OperationCount(
            row.kind,
            row.step,
            row.number,
            max(0.0, (now - row.oldest) / 1e6),
            int(row.late),
            int(row.unleased),
            row.leases,
        )
        for row in conn.execute(_OPERATIONS, {"now": now})
    ]
    state = sa.case((_s.disabled, "disabled"), (is_up_at(now, down_time), "up"), else_="down")
    by_state = sa.select(_s.binary, state.label("state"), sa.func.count().label("number")).group_by(_s.binary, state)
    counted = [ServiceCount(row.binary, row.state, row.number) for row in conn.execute(by_state)]
    servers: dict[str, int] = {}
    for row in conn.execute(_SERVERS):
        name = status(row.vm_state, row.task_state)
        servers[name] = servers.get(name, 0) + row.number
    return RegionCounts(tuple(found), tuple(sorted(counted, key=lambda each: (each.binary, each.state))), servers)


class HostNotUp(msgspec.Struct, frozen=True):
    """A compute host that is down or disabled."""

    host: str
    state: str
    seconds_ago: float  # since it was heard of
    reason: str  # of an administrator


def hosts_not_up(conn: sa.Connection, now: int, down_time: float, limit: int) -> list[HostNotUp]:
    """Return compute hosts that are down or disabled, those that were silent for longest first."""
    wanted = (
        sa.select(services)
        .where(_s.binary == COMPUTE, sa.or_(_s.disabled, sa.not_(is_up_at(now, down_time))))
        .order_by(_s.last_seen_at, _s.host)
        .limit(limit)
    )
    return [
        HostNotUp(
            row.host,
            "disabled" if row.disabled else "down",
            max(0.0, (now - row.last_seen_at) / 1e6),
            row.disabled_reason or "",
        )
        for row in conn.execute(wanted)
    ]


def versions(conn: sa.Connection, now: int, down_time: float) -> dict[str, dict[int, int]]:
    """Return how many services that are up have each version, by name of the service and version."""
    wanted = (
        sa.select(_s.binary, _s.version, sa.func.count().label("number"))
        .where(is_up_at(now, down_time))
        .group_by(_s.binary, _s.version)
        .order_by(_s.binary, _s.version)
    )
    found: dict[str, dict[int, int]] = {}
    for row in conn.execute(wanted):
        found.setdefault(row.binary, {})[row.version] = row.number
    return found
