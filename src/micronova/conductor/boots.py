"""What hosts say of guests that do not boot: such a server is in ERROR, until its guest boots after all.

It is not an operation: nobody asked for it, nothing is to be done, and the guest runs on for its owner to look at. So a
verdict counts only for a server that is at rest, at the epoch that it was made at.
"""

from collections.abc import Iterable
from typing import Any, Final

import sqlalchemy as sa

from micronova.compute import states
from micronova.conductor.kinds import fault_of
from micronova.db import instances
from micronova.objects.orders import BootVerdict, HostBeat

NOT_BOOTED: Final = "GuestNotBooted"
"""The type of the fault, by which it is known that the guest itself can end it."""


def hear(conn: sa.Connection, beats: Iterable[HostBeat], now: int) -> dict[str, tuple[str, ...]]:
    """Take the verdicts of heartbeats; return by host those that are to be told again when no operation is at work."""
    # In the order in which all lock.
    told = sorted(
        ((beat.host, verdict) for beat in beats for verdict in beat.boots), key=lambda each: each[1].instance_uuid
    )
    if not told:
        return {}
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


def _change(row: Any, verdict: BootVerdict, now: int) -> dict[str, Any] | None:
    if verdict.fault and row["vm_state"] == states.ACTIVE:
        return {"vm_state": states.ERROR, "fault": {**fault_of(verdict.fault, now), "type": NOT_BOOTED}}
    if not verdict.fault and row["vm_state"] == states.ERROR and (row["fault"] or {}).get("type") == NOT_BOOTED:
        return {"vm_state": states.ACTIVE, "fault": None}
    return None
