"""Records power states of guests that changed by themselves: the server's new state, and an instance action.

Nova stops a server whose guest has stopped, which is an instance action and sends `power_off` notifications; here each
such change is an action with its notifications. Nobody asked for it, so it has no user. A guest whose operating system
has panicked puts its server in ERROR with a fault. The guest is kept as it is for its owner to look at; a hard reboot
leads out of ERROR.
"""

import logging
import uuid
from typing import Final

import sqlalchemy as sa

from micronova.conductor.operations.host_kind import fault_of
from micronova.conductor.operations.power import action_event_of, notification_of
from micronova.db import instance_actions, instances
from micronova.objects import power_state, states
from micronova.objects.context import Context
from micronova.objects.instance import InstanceChanges, InstanceRow, changed

log = logging.getLogger(__name__)

PANICKED: Final = "GuestPanicked"
"""The type of the fault: this one is taken back when the guest runs again."""
PANIC: Final = (
    "The guest's operating system panicked and is halted. Its console log may say why; a hard reboot starts it again."
)
_NAMESPACE: Final = uuid.UUID("8a2f4e66-2a5b-4a4f-9c0d-3a3f6f0b7c21")
_DETAILS: Final = {
    states.ACTIVE: "The guest runs, although nobody asked for it here.",
    states.PAUSED: "The guest was paused, although nobody asked for it here.",
    states.STOPPED: "The guest stopped by itself, or its process on the host ended.",
    states.SUSPENDED: "The guest was suspended, although nobody asked for it here.",
    states.ERROR: PANIC,
}
_ACTION: Final = {
    states.ACTIVE: "start",
    states.PAUSED: "pause",
    states.STOPPED: "stop",
    states.SUSPENDED: "suspend",
    states.ERROR: "stop",
}

Unasked = tuple[Context, list[tuple[str, InstanceRow]]]
"""The notifications of a change: the context, and the names with the server."""


def record(conn: sa.Connection, instance_uuid: str, power: int, now: int) -> Unasked | None:
    """Record a guest's new power state, which no operation caused; return the notifications to send."""
    row = instances.get(conn, instance_uuid)
    if row is None:
        return None
    changes = _changes(row, power, now)
    if not instances.update(conn, row["uuid"], now, changes, epoch=row["epoch"]):
        return None
    after = changes["vm_state"]
    if after == row["vm_state"]:
        return None
    log.warning("server %s is %s on host %s without a request: %s", row["uuid"], after, row["host"], _DETAILS[after])
    action = _ACTION[after]
    request = f"req-{uuid.uuid5(_NAMESPACE, ' '.join((row['uuid'], str(row['epoch']), after, str(now))))}"
    _record_action(conn, row, action, request, after, now)
    if after == states.ERROR:  # the guest has not stopped
        return None
    name = notification_of(action)
    # As if the action had found the guest already in its new power state.
    before = changed(row, {"power_state": power, "task_state": states.ACTIONS[action].task_state})
    return Context(request_id=request), [(f"{name}.start", before), (f"{name}.end", changed(row, changes))]


def _changes(row: InstanceRow, power: int, now: int) -> InstanceChanges:
    before = row["vm_state"]
    panicked = before == states.ERROR and row["fault"] is not None and row["fault"].get("type") == PANICKED
    if power == power_state.CRASHED and before in _DETAILS and before != states.ERROR:
        return {
            "power_state": power,
            "vm_state": states.ERROR,
            "fault": {**fault_of(PANIC, now), "type": PANICKED},
        }
    if panicked and power != power_state.CRASHED:
        return {"power_state": power, "vm_state": states.after_power_change(states.ACTIVE, power), "fault": None}
    return {"power_state": power, "vm_state": states.after_power_change(before, power)}


def _record_action(conn: sa.Connection, row: InstanceRow, action: str, request: str, after: str, now: int) -> None:
    instance_actions.start(conn, row["uuid"], request, action, "", "", now, finished=True)
    result = "Error" if after == states.ERROR else "Success"
    instance_actions.event_finish(
        conn,
        row["uuid"],
        request,
        row["epoch"],
        action_event_of(action),
        now,
        result=result,
        host=row["host"],
        details=_DETAILS[after],
    )
