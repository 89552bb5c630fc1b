"""Applies what hosts report of guests that do not boot: such a server is in ERROR until its guest boots.

This is not an operation: no user requested it, there is nothing to do, and the guest keeps running for its owner to
look at. So a verdict counts only for a server that no operation changes, at the epoch that the verdict names.
"""

from collections.abc import Iterable
from typing import Final

import sqlalchemy as sa

from micronova.db import instances
from micronova.objects import states
from micronova.objects.instance import InstanceChanges, InstanceRow, fault_of
from micronova.objects.orders import BootVerdict, HostBeat

NOT_BOOTED: Final = "GuestNotBooted"
"""The type of the fault: this one is taken back when the guest boots."""


def of_own_servers(conn: sa.Connection, beats: Iterable[HostBeat]) -> list[tuple[str, BootVerdict]]:
    """Return the hosts and their verdicts about servers of their own: a host can name any, and locks no others."""
    verdicts = [(beat.host, verdict) for beat in beats for verdict in beat.boots]
    if not verdicts:
        return []
    found = instances.states_of(conn, {verdict.instance_uuid for _, verdict in verdicts})
    hosts = {row.uuid: row.host for row in found}
    return [(host, verdict) for host, verdict in verdicts if hosts.get(verdict.instance_uuid) == host]


def apply(conn: sa.Connection, verdicts: Iterable[tuple[str, BootVerdict]], now: int) -> dict[str, tuple[str, ...]]:
    """Apply verdicts about servers that are locked; return by host those whose verdict is to be repeated later."""
    # Every transaction writes in this order.
    in_order = sorted(verdicts, key=lambda each: each[1].instance_uuid)
    rows = instances.get_many(conn, [verdict.instance_uuid for _, verdict in in_order]) if in_order else {}
    again: dict[str, tuple[str, ...]] = {}
    for host, verdict in in_order:
        row = rows.get(verdict.instance_uuid)
        if row is None or row["host"] != host:
            continue
        if row["task_state"] is not None:
            again[host] = (*again.get(host, ()), verdict.instance_uuid)
        elif row["epoch"] == verdict.epoch or (verdict.found and row["epoch"] > verdict.epoch):
            values = _change(row, verdict, now)
            if values is not None:
                instances.update(conn, row["uuid"], now, values, epoch=row["epoch"])
    return again


def _change(row: InstanceRow, verdict: BootVerdict, now: int) -> InstanceChanges | None:
    if verdict.fault and row["vm_state"] == states.ACTIVE:
        return {"vm_state": states.ERROR, "fault": {**fault_of(verdict.fault, now), "type": NOT_BOOTED}}
    if (
        not verdict.fault
        and row["vm_state"] == states.ERROR
        and row["fault"]
        and row["fault"].get("type") == NOT_BOOTED
    ):
        return {"vm_state": states.ACTIVE, "fault": None}
    return None
