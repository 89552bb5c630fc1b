"""Records power states of guests that changed by themselves: the server's new state, and an instance action.

Nova stops a server whose guest has stopped, which is an instance action and sends `power_off` notifications; here each
such change is an action with its notifications. Nobody asked for it, so it has no user. A guest whose operating system
has panicked puts its server in ERROR with a fault. The guest is kept as it is for its owner to look at; a hard reboot
leads out of ERROR.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple
from uuid import UUID, uuid5

import sqlalchemy as sa

from micronova.conductor.operations.power import action_event_of, notification_of
from micronova.db import instance_actions, instances
from micronova.objects import power_state, states
from micronova.objects.context import Context
from micronova.objects.instance import InstanceChanges, InstanceRow, changed, fault_of
from micronova.objects.orders import PowerChange

log = logging.getLogger(__name__)

PANICKED: Final = "GuestPanicked"
"""The type of the fault: this one is taken back when the guest runs again."""
PANIC: Final = (
    "The guest's operating system panicked and is halted. Its console log may say why; a hard reboot starts it again."
)
_NAMESPACE: Final = UUID("8a2f4e66-2a5b-4a4f-9c0d-3a3f6f0b7c21")
_RECORDED_AS: Final = {
    states.ACTIVE: ("start", "The guest runs, although nobody asked for it here."),
    states.PAUSED: ("pause", "The guest was paused, although nobody asked for it here."),
    states.STOPPED: ("stop", "The guest stopped by itself, or its process on the host ended."),
    states.SUSPENDED: ("suspend", "The guest was suspended, although nobody asked for it here."),
    states.ERROR: ("stop", PANIC),
}
"""New vm state -> the name and the details of the instance action."""

PowerChangeNotifications = tuple[Context, list[tuple[str, InstanceRow]]]
"""The notifications of a change: the context, and the names with the server."""


class Differing(NamedTuple):
    """A power state that an instance does not have, and the instance's epoch when that was found."""

    host: str
    change: PowerChange
    epoch: int


class Compared(NamedTuple):
    """Power states that instances do not have: those that count, and by host those to report again."""

    differing: dict[str, Differing]
    # Instances that an operation changes: what counts is what it leaves. And those of a database that was restored from
    # a backup, whose guests are newer: `micronova audit --repair` mends that.
    repeat: dict[str, tuple[str, ...]]


class StateChange(NamedTuple):
    """A server that got another vm state without a request."""

    uuid: str
    vm_state: str
    host: str | None
    details: str


class Recorded(NamedTuple):
    """What a transaction has recorded of power changes."""

    notifications: list[PowerChangeNotifications]  # to send
    changed: list[StateChange]  # to log
    repeat: dict[str, tuple[str, ...]]  # by host the instances whose change is to be reported again


def log_changes(changes: Iterable[StateChange]) -> None:
    """Log servers that got another vm state without a request, when the transaction is committed."""
    for each in changes:
        log.warning(
            "server %s is %s on host %s without a request: %s", each.uuid, each.vm_state, each.host, each.details
        )


def compare(conn: sa.Connection, changes: Iterable[tuple[str, PowerChange]]) -> Compared:
    """Find the instances whose guests, by host, have other power states than they.

    One query however many there are: the first heartbeat of a host names all its guests. It locks nothing, because
    most power states are those that the instances have.
    """
    # By host too: a host that names the guest of another one must not hide what that one says.
    reported = {(host, change.instance_uuid): change for host, change in changes}
    found = Compared({}, {})
    if not reported:
        return found
    for row in instances.states_of(conn, {uuid for _, uuid in reported}):
        change = None if row.host is None else reported.get((row.host, row.uuid))
        if change is None or row.host is None or change.power_state == row.power_state:
            continue
        if row.epoch >= change.epoch and _is_free(row.task_state):
            found.differing[row.uuid] = Differing(row.host, change, row.epoch)
        else:
            found.repeat[row.host] = (*found.repeat.get(row.host, ()), row.uuid)
    return found


def _differs(change: PowerChange, epoch: int, power: int) -> bool:
    return epoch >= change.epoch and power != change.power_state


def _is_free(task: str | None) -> bool:
    """Return whether no operation sets the power state of an instance with this task state."""
    return task is None or task in states.KEEPS_POWER_STATE


def record(conn: sa.Connection, compared: Compared, now: int) -> Recorded:
    """Record the new power states of guests, which no operation caused.

    The instances are locked by now. An action that was accepted before that has changed them since they were compared,
    so they are compared again. If one has even ended since, nobody can tell whether the guest had its power state
    before or after it: the host reports it once more. It does so, too, as long as an operation goes on: one that fails,
    or that a request ends, may leave a guest in another power state and say nothing of it.

    Instances that change in the same way share their statements, so that the number of statements does not grow with
    the number of instances.
    """
    power: dict[str, int] = {}
    found, repeat = compared.differing, dict(compared.repeat)
    rows = instances.get_many(conn, found) if found else {}
    for uuid, row in list(rows.items()):
        host, change, epoch = found[uuid]
        if row["host"] != host or not _differs(change, row["epoch"], row["power_state"]):
            del rows[uuid]
        elif not _is_free(row["task_state"]) or (row["epoch"] != epoch and row["task_state"] is None):
            del rows[uuid]
            repeat[host] = (*repeat.get(host, ()), uuid)
        else:
            power[uuid] = change.power_state
    return Recorded(*_record(conn, rows, power, now), repeat)


def _record(
    conn: sa.Connection, rows: Mapping[str, InstanceRow], power: Mapping[str, int], now: int
) -> tuple[list[PowerChangeNotifications], list[StateChange]]:
    alike: dict[tuple[int, str, bool], list[str]] = {}  # by power state, new vm state, and whether the fault changes
    requests: dict[str, dict[str, str]] = {}  # by new vm state
    notifications: list[PowerChangeNotifications] = []
    changed: list[StateChange] = []
    for uuid, row in rows.items():
        changes = _changes(row, power[uuid], now)
        after = changes["vm_state"]
        alike.setdefault((power[uuid], after, "fault" in changes), []).append(uuid)
        if after == row["vm_state"]:
            continue
        _, details = _RECORDED_AS[after]
        changed.append(StateChange(uuid, after, row["host"], details))
        request = f"req-{uuid5(_NAMESPACE, ' '.join((uuid, str(row['epoch']), after, str(now))))}"
        requests.setdefault(after, {})[uuid] = request
        if after != states.ERROR:  # a guest that panicked has not stopped
            notifications.append(_notifications(row, changes, request))
    for uuids in alike.values():
        instances.update_many(conn, uuids, now, _changes(rows[uuids[0]], power[uuids[0]], now))
    for after, of_servers in requests.items():
        action, details = _RECORDED_AS[after]
        instance_actions.record_finished(
            conn,
            of_servers,
            action,
            action_event_of(action),
            now,
            result="Error" if after == states.ERROR else "Success",
            details=details,
        )
    return notifications, changed


def _notifications(row: InstanceRow, changes: InstanceChanges, request: str) -> PowerChangeNotifications:
    action, _ = _RECORDED_AS[changes["vm_state"]]
    name = notification_of(action)
    # As if the action had found the guest already in its new power state.
    before = changed(row, {"power_state": changes["power_state"], "task_state": states.ACTIONS[action].task_state})
    return Context(request_id=request), [(f"{name}.start", before), (f"{name}.end", changed(row, changes))]


def _changes(row: InstanceRow, power: int, now: int) -> InstanceChanges:
    before = row["vm_state"]
    panicked = before == states.ERROR and row["fault"] is not None and row["fault"].get("type") == PANICKED
    if power == power_state.CRASHED and before in _RECORDED_AS and before != states.ERROR:
        return {
            "power_state": power,
            "vm_state": states.ERROR,
            "fault": {**fault_of(PANIC, now), "type": PANICKED},
        }
    if panicked and power != power_state.CRASHED:
        return {"power_state": power, "vm_state": states.after_power_change(states.ACTIVE, power), "fault": None}
    return {"power_state": power, "vm_state": states.after_power_change(before, power)}
