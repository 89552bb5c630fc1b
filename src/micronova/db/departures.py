"""Records of departures: an instance has left a host at an epoch, so the host destroys its guest of up to that epoch.

They are the only reason for which an agent destroys a guest without an order.
"""

from collections.abc import Iterable, Sequence
from typing import TypedDict, cast

import sqlalchemy as sa

from micronova.db.listed import DIALECTS, as_triples, one_of, triples
from micronova.db.tables import departures, instances, services
from micronova.objects.service_names import COMPUTE

_OF_HOSTS = sa.select(departures).where(one_of(departures.c.host, "hosts"))
_PURGE = departures.delete().where(
    one_of(departures.c.instance_uuid, "instances"),
    ~sa.exists().where(services.c.host == departures.c.host, services.c.binary == COMPUTE),
)
_DELETE = {
    dialect: departures.delete().where(
        sa.tuple_(departures.c.host, departures.c.instance_uuid, departures.c.epoch).in_(triples("gone", dialect))
    )
    for dialect in DIALECTS
}


class DepartureRow(TypedDict):
    """A row of `departures`."""

    host: str
    instance_uuid: str
    epoch: int
    created_at: int


def record(conn: sa.Connection, host: str, instance_uuid: str, epoch: int, now: int) -> None:
    """Record that an instance left a host, which then destroys its guest of up to this epoch."""
    conn.execute(departures.delete().where(departures.c.host == host, departures.c.instance_uuid == instance_uuid))
    conn.execute(departures.insert(), {"host": host, "instance_uuid": instance_uuid, "epoch": epoch, "created_at": now})


def of_hosts(conn: sa.Connection, hosts: Iterable[str]) -> list[DepartureRow]:
    """Return the guests that hosts still have to destroy."""
    return cast(list[DepartureRow], list(conn.execute(_OF_HOSTS, {"hosts": list(hosts)}).mappings()))


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


def delete(conn: sa.Connection, gone: Sequence[tuple[str, str, int]]) -> None:
    """Delete these records (host, instance, epoch): the hosts have destroyed the guests."""
    if gone:
        conn.execute(_DELETE[conn.dialect.name], {"gone": as_triples(gone)})
