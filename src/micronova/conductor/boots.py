"""Applies what hosts report of guests that do not boot: such a server is in ERROR until its guest boots.

This is not an operation: no user requested it, there is nothing to do, and the guest keeps running for its owner to
look at. So a boot result counts only for a server that no operation changes, at the epoch that the result names.
"""

from collections.abc import Iterable
from typing import Final

import sqlalchemy as sa

from micronova.db import instances
from micronova.objects import states
from micronova.objects.instance import InstanceChanges, InstanceRow, fault_of
from micronova.objects.orders import BootResult, HostBeat

NOT_BOOTED: Final = "GuestNotBooted"
"""The type of the fault: this one is taken back when the guest boots."""


def of_own_servers(conn: sa.Connection, beats: Iterable[HostBeat]) -> list[tuple[str, BootResult]]:
    """Return the hosts and their boot results of servers of their own: a host can name any, and locks no others."""
    results = [(beat.host, result) for beat in beats for result in beat.boots]
    if not results:
        return []
    found = instances.states_of(conn, {result.instance_uuid for _, result in results})
    hosts = {row.uuid: row.host for row in found}
    return [(host, result) for host, result in results if hosts.get(result.instance_uuid) == host]


def apply(conn: sa.Connection, results: Iterable[tuple[str, BootResult]], now: int) -> dict[str, tuple[str, ...]]:
    """Apply boot results of servers that are locked; return by host those whose result is to be repeated later."""
    # Every transaction writes in this order.
    in_order = sorted(results, key=lambda each: each[1].instance_uuid)
    rows = instances.get_many(conn, [result.instance_uuid for _, result in in_order]) if in_order else {}
    again: dict[str, tuple[str, ...]] = {}
    for host, result in in_order:
        row = rows.get(result.instance_uuid)
        if row is None or row["host"] != host:
            continue
        if row["task_state"] is not None:
            again[host] = (*again.get(host, ()), result.instance_uuid)
        elif row["epoch"] == result.epoch or (result.found and row["epoch"] > result.epoch):
            values = _change(row, result, now)
            if values is not None:
                instances.update(conn, row["uuid"], now, values, epoch=row["epoch"])
    return again


def _change(row: InstanceRow, result: BootResult, now: int) -> InstanceChanges | None:
    if result.fault and row["vm_state"] == states.ACTIVE:
        return {"vm_state": states.ERROR, "fault": {**fault_of(result.fault, now), "type": NOT_BOOTED}}
    if not result.fault and row["vm_state"] == states.ERROR and row["fault"] and row["fault"].get("type") == NOT_BOOTED:
        return {"vm_state": states.ACTIVE, "fault": None}
    return None
