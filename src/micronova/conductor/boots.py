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


def apply(conn: sa.Connection, beats: Iterable[HostBeat], now: int) -> dict[str, tuple[str, ...]]:
    """Apply the verdicts of heartbeats; return by host the instances whose verdict is to be repeated later."""
    # Every transaction locks in this order.
    told = sorted(
        ((beat.host, verdict) for beat in beats for verdict in beat.boots), key=lambda each: each[1].instance_uuid
    )
    if not told:
        return {}
    # Whole rows of the hosts' own servers only: a host can name any.
    hosts = {row.uuid: row.host for row in instances.states_of(conn, {verdict.instance_uuid for _, verdict in told})}
    told = [(host, verdict) for host, verdict in told if hosts.get(verdict.instance_uuid) == host]
    rows = instances.get_many(conn, [verdict.instance_uuid for _, verdict in told])
    again: dict[str, tuple[str, ...]] = {}
    for host, verdict in told:
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
