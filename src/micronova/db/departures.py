"""Records of departures: an instance has left a host at an epoch, so the host destroys its guest of up to that epoch.

They are the only reason for which an agent destroys a guest without an order, besides the reply to a report of its own
that came too late (`ReportReply.destroy`).
"""

from collections.abc import Iterable, Sequence
from typing import TypedDict, cast

import sqlalchemy as sa

from micronova.db.listed import DIALECTS, as_triples, one_of, triples
from micronova.db.services import is_up_at
from micronova.db.tables import deleted_instances, departures, instances, migrations, services
from micronova.objects import migration_states, states
from micronova.objects.clock import micros
from micronova.objects.migration import MigrationRow
from micronova.objects.service_names import COMPUTE

_OF_HOSTS = (
    sa.select(departures, deleted_instances.c.uuid.is_not(None).label("deleted"))
    .outerjoin(deleted_instances, deleted_instances.c.uuid == departures.c.instance_uuid)
    .where(one_of(departures.c.host, "hosts"))
)
# A server that moved between hosts, and is on one that is not known to have been alive since it left the other, may
# have its last copy there. What is left of a build or an evacuation is no copy.
_MOVED = sa.and_(
    migrations.c.instance_uuid == departures.c.instance_uuid,
    migrations.c.migration_type != migration_states.EVACUATION,
    sa.or_(migrations.c.source_compute == departures.c.host, migrations.c.dest_compute == departures.c.host),
)
_HAS_OTHER_HOST = sa.and_(
    instances.c.uuid == departures.c.instance_uuid,
    instances.c.host != departures.c.host,
    instances.c.task_state.is_distinct_from(states.DELETING),
)
_HEARD = sa.and_(
    services.c.host == instances.c.host,
    services.c.binary == COMPUTE,
    services.c.alive_at > departures.c.created_at,
)
_NOT_YET = sa.and_(~sa.exists().where(_HEARD), sa.exists().where(_MOVED))
_HELD_BACK = (
    sa.select(departures.c.host, departures.c.instance_uuid, departures.c.epoch)
    .join(instances, _HAS_OTHER_HOST)
    .where(one_of(departures.c.host, "hosts"), _NOT_YET)
)
_OLDEST = (
    sa.select(departures)
    .outerjoin(instances, _HAS_OTHER_HOST)
    .where(
        departures.c.created_at < sa.bindparam("before"),
        sa.or_(instances.c.uuid.is_(None), sa.not_(_NOT_YET)),
    )
    .order_by(departures.c.created_at)
    .limit(sa.bindparam("most"))
)
_OTHERS = sa.select(departures).where(
    departures.c.instance_uuid == sa.bindparam("instance"), departures.c.host != sa.bindparam("host")
)
_PURGE = departures.delete().where(
    one_of(departures.c.instance_uuid, "instances"),
    ~sa.exists().where(services.c.host == departures.c.host, services.c.binary == COMPUTE),
)
# PostgreSQL does not know how few triples there are: the list of instances lets it use an index.
_GONE = {
    dialect: sa.and_(
        one_of(departures.c.instance_uuid, "instances"),
        sa.tuple_(departures.c.host, departures.c.instance_uuid, departures.c.epoch).in_(triples("gone", dialect)),
    )
    for dialect in DIALECTS
}
_DELETE = {dialect: departures.delete().where(_GONE[dialect]) for dialect in DIALECTS}

# What a destination has removed of a live migration that failed or was aborted: that has ended with the departure, or
# later. A later departure of the same instance has nothing to do with it.
_ROLLED_BACK = {
    dialect: sa.select(migrations)
    .join(
        departures,
        sa.and_(
            migrations.c.instance_uuid == departures.c.instance_uuid,
            migrations.c.dest_compute == departures.c.host,
            migrations.c.migration_type == migration_states.LIVE_MIGRATION,
            migrations.c.status.in_((migration_states.RUNNING, migration_states.FAILED, migration_states.CANCELLED)),
            migrations.c.updated_at >= departures.c.created_at,
        ),
    )
    .where(_GONE[dialect])
    for dialect in DIALECTS
}


class DepartureRow(TypedDict):
    """A row of `departures`."""

    host: str
    instance_uuid: str
    epoch: int
    created_at: int


class RecordedDeparture(DepartureRow):
    """A row of `departures`, and whether the instance is deleted."""

    deleted: bool


def record(conn: sa.Connection, host: str, instance_uuid: str, epoch: int, now: int) -> None:
    """Record that an instance left a host, which then destroys its guest of up to this epoch."""
    conn.execute(departures.delete().where(departures.c.host == host, departures.c.instance_uuid == instance_uuid))
    conn.execute(departures.insert(), {"host": host, "instance_uuid": instance_uuid, "epoch": epoch, "created_at": now})


def of_hosts(conn: sa.Connection, hosts: Iterable[str]) -> list[RecordedDeparture]:
    """Return the guests that hosts still have to destroy."""
    return cast(list[RecordedDeparture], list(conn.execute(_OF_HOSTS, {"hosts": list(hosts)}).mappings()))


def overdue(conn: sa.Connection, now: int, down_time: float, most: int) -> list[DepartureRow]:
    """Return the oldest of the guests that hosts which are up have had to destroy for `down_time` seconds.

    Those that are held back, and those of hosts that are down, are not among them, however many they are.
    """
    up = sa.select(services.c.host).where(services.c.binary == COMPUTE, is_up_at(now, down_time))
    query = _OLDEST.where(departures.c.host.in_(up))
    found = conn.execute(query, {"before": now - micros(down_time), "most": most}).mappings()
    return cast(list[DepartureRow], list(found))


def elsewhere(conn: sa.Connection, instance_uuid: str, host: str) -> list[DepartureRow]:
    """Return the guests of an instance that other hosts than this one still have to destroy."""
    found = conn.execute(_OTHERS, {"instance": instance_uuid, "host": host}).mappings()
    return cast(list[DepartureRow], list(found))


def held_back(conn: sa.Connection, hosts: Iterable[str]) -> set[tuple[str, str, int]]:
    """Return those departures (host, instance, epoch) that hosts must not act on yet.

    The guest may be the last copy of the disks of an instance that moved: the host that the instance is on has to have
    been alive after the departure was recorded. If that never happens, the guest stays until the instance is evacuated
    or deleted.
    """
    found = conn.execute(_HELD_BACK, {"hosts": list(hosts)})
    return {(row.host, row.instance_uuid, row.epoch) for row in found}


def delete_of_host(conn: sa.Connection, host: str) -> None:
    """Delete the records of a host that is gone, except of instances that live elsewhere.

    If the host comes back after all, it must not have a second guest of these. Guests of deleted instances are found
    by a job (`conductor/running_deleted.py`).
    """
    lives = sa.exists().where(instances.c.uuid == departures.c.instance_uuid)
    conn.execute(departures.delete().where(departures.c.host == host, ~lives))


def purge(conn: sa.Connection, instance_uuids: Sequence[str]) -> None:
    """Delete the records that hosts without a service have of instances whose own records are deleted."""
    conn.execute(_PURGE, {"instances": list(instance_uuids)})


def rolled_back(conn: sa.Connection, gone: Sequence[tuple[str, str, int]]) -> list[MigrationRow]:
    """Return the live migrations that failed or were aborted, and of which these departures are the last trace."""
    if not gone:
        return []
    found = conn.execute(_ROLLED_BACK[conn.dialect.name], _of(gone)).mappings()
    return cast(list[MigrationRow], list(found))


def delete(conn: sa.Connection, gone: Sequence[tuple[str, str, int]]) -> None:
    """Delete these records (host, instance, epoch): the hosts have destroyed the guests."""
    if gone:
        conn.execute(_DELETE[conn.dialect.name], _of(gone))


def _of(gone: Sequence[tuple[str, str, int]]) -> dict[str, object]:
    """Return the parameters of `_GONE`."""
    return {"gone": as_triples(gone), "instances": sorted({instance for _, instance, _ in gone})}
