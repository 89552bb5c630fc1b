"""What servers have read and written of their volumes, for the notification volume.usage.

A hypervisor counts from zero whenever a guest is started, and forgets a volume that is detached. So each row has what
the hypervisor says now, and what came before that. A volume has a row for each server that has, or had, it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import sqlalchemy as sa

from micronova.db import instances
from micronova.db.listed import one_of
from micronova.db.tables import block_devices, volume_usages
from micronova.db.tables import instances as instance_table
from micronova.objects.host_limits import LARGEST_NUMBER
from micronova.objects.instance import InstanceRow
from micronova.objects.volume import VolumeStatistics

_u = volume_usages.c
COUNTERS: Final = ("reads", "read_bytes", "writes", "write_bytes")
BATCH: Final = 1000
"""Rows that one transaction purges."""

_SERVERS = (
    sa.select(instance_table.c.host, instance_table.c.uuid)
    .join(block_devices, block_devices.c.instance_uuid == instance_table.c.uuid)
    .where(one_of(instance_table.c.host, "hosts"), block_devices.c.volume_id.is_not(None))
    .distinct()
    .order_by(instance_table.c.host, instance_table.c.uuid)
)
_OF_VOLUMES = sa.select(volume_usages).where(one_of(_u.volume_id, "volumes"))
_INSERT = volume_usages.insert()
_UPDATE = (
    volume_usages.update()
    .where(_u.volume_id == sa.bindparam("b_volume"), _u.instance_uuid == sa.bindparam("b_server"))
    .values({each: sa.bindparam(each.name) for each in _u if not each.primary_key})
)
_PURGE = volume_usages.delete().where(
    _u.volume_id == sa.bindparam("b_volume"),
    _u.instance_uuid == sa.bindparam("b_server"),
    _u.refreshed_at < sa.bindparam("before"),
)
_OLDEST = (
    sa.select(_u.volume_id, _u.instance_uuid)
    .where(_u.refreshed_at < sa.bindparam("before"))
    .order_by(_u.refreshed_at)
    .limit(BATCH)
)


class VolumeUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What was read and written of a volume, by the server that has it and by those that had it before."""

    volume_id: str
    instance_uuid: str
    project_id: str
    user_id: str
    availability_zone: str | None
    refreshed_at: int
    reads: int
    read_bytes: int
    writes: int
    write_bytes: int


def servers_with_volumes(conn: sa.Connection, hosts: Iterable[str]) -> dict[str, list[str]]:
    """Return the uuids of the servers on these hosts that have volumes, by host."""
    found: dict[str, list[str]] = {}
    for host, uuid in conn.execute(_SERVERS, {"hosts": list(hosts)}):
        found.setdefault(host, []).append(uuid)
    return found


def record(
    conn: sa.Connection, host: str, measured: Mapping[str, Sequence[VolumeStatistics]], now: int
) -> list[VolumeUsage]:
    """Record what a host has measured of its servers; return the usage of their volumes.

    What a host says of servers that it does not have, or of volumes that they do not have any more, is ignored.
    """
    instances.lock_many(conn, measured)
    rows = {uuid: row for uuid, row in instances.get_many(conn, measured).items() if row["host"] == host}
    held = {uuid: {device.volume_id for device in found} for uuid, found in instances.volumes(conn, rows).items()}
    counted = [
        (row, each)
        for uuid, row in rows.items()
        for each in {each.volume_id: each for each in measured[uuid]}.values()
        if each.volume_id in held.get(uuid, ())
    ]
    return _record(conn, counted, now, ends=False)


def record_end(conn: sa.Connection, row: InstanceRow, measured: VolumeStatistics, now: int) -> VolumeUsage:
    """Record what a server, whose row is locked, has done with a volume that it does not have any more."""
    [usage] = _record(conn, [(row, measured)], now, ends=True)
    return usage


def purge(conn: sa.Connection, before: int) -> int:
    """Delete rows that were not refreshed since this time; return how many, at most BATCH."""
    keys = conn.execute(_OLDEST, {"before": before}).all()
    stale = [{"b_volume": row.volume_id, "b_server": row.instance_uuid, "before": before} for row in keys]
    if stale:
        conn.execute(_PURGE, stale)
    return len(stale)


def _record(
    conn: sa.Connection, measured: Sequence[tuple[InstanceRow, VolumeStatistics]], now: int, *, ends: bool
) -> list[VolumeUsage]:
    """Record what servers have done with volumes, in three statements; return the usage of each volume."""
    if not measured:
        return []
    known: dict[str, dict[str, Mapping[str, int]]] = {each.volume_id: {} for _, each in measured}
    for row in conn.execute(_OF_VOLUMES, {"volumes": sorted(known)}).mappings():
        known[row["volume_id"]][row["instance_uuid"]] = dict(row)
    added, updated = [], []
    for server, statistics in measured:
        uuid, of_servers = server["uuid"], known[statistics.volume_id]
        values = _changed(of_servers.get(uuid), statistics, now, ends=ends)
        if uuid in of_servers:
            updated.append({"b_volume": statistics.volume_id, "b_server": uuid, **values})
        else:
            added.append({"volume_id": statistics.volume_id, "instance_uuid": uuid, **values})
        of_servers[uuid] = values
    if updated:
        conn.execute(_UPDATE, updated)
    if added:
        conn.execute(_INSERT, added)
    return [_usage(server, each.volume_id, known[each.volume_id].values(), now) for server, each in measured]


def _usage(row: InstanceRow, volume: str, of_servers: Iterable[Mapping[str, int]], now: int) -> VolumeUsage:
    """Return what the servers of a volume have done with it together."""
    found = list(of_servers)
    return VolumeUsage(
        volume_id=volume,
        instance_uuid=row["uuid"],
        project_id=row["project_id"],
        user_id=row["user_id"],
        availability_zone=row["availability_zone"],
        refreshed_at=now,
        **{name: sum(each[f"current_{name}"] + each[f"earlier_{name}"] for each in found) for name in COUNTERS},
    )


def _changed(known: Mapping[str, int] | None, found: VolumeStatistics, now: int, *, ends: bool) -> dict[str, int]:
    """Return a row's new values: a counter that is lower than before says that the guest was started again."""
    counted = {name: max(0, getattr(found, name)) for name in COUNTERS}
    before = {name: 0 if known is None else known[f"current_{name}"] for name in COUNTERS}
    earlier = {name: 0 if known is None else known[f"earlier_{name}"] for name in COUNTERS}
    if any(counted[name] < before[name] for name in COUNTERS):
        earlier = {name: earlier[name] + before[name] for name in COUNTERS}
    if ends:
        earlier = {name: earlier[name] + counted[name] for name in COUNTERS}
        counted = dict.fromkeys(COUNTERS, 0)
    values = {f"current_{name}": value for name, value in counted.items()}
    # A host can report any number: the sum must fit the column.
    values |= {f"earlier_{name}": min(value, LARGEST_NUMBER) for name, value in earlier.items()}
    return {**values, "refreshed_at": now}
