"""The states of a server, and for each action where it may start, what it shows meanwhile and where it ends.

This table is the only place that knows: the API's 409s, the status shown to users, the operations' compare-and-set
and the exhaustive tests all read it.
"""

from dataclasses import dataclass

# vm states: what a server is
BUILDING = "building"
ACTIVE = "active"
STOPPED = "stopped"
PAUSED = "paused"
SUSPENDED = "suspended"
RESCUED = "rescued"
RESIZED = "resized"
SHELVED = "shelved"
SHELVED_OFFLOADED = "shelved_offloaded"
SOFT_DELETED = "soft-delete"
DELETED = "deleted"
ERROR = "error"

VM_STATES = (
    BUILDING,
    ACTIVE,
    STOPPED,
    PAUSED,
    SUSPENDED,
    RESCUED,
    RESIZED,
    SHELVED,
    SHELVED_OFFLOADED,
    SOFT_DELETED,
    DELETED,
    ERROR,
)

# task states: what is being done to it
SCHEDULING = "scheduling"
SPAWNING = "spawning"
POWERING_ON = "powering-on"
POWERING_OFF = "powering-off"
REBOOTING = "rebooting"
REBOOTING_HARD = "rebooting_hard"
PAUSING = "pausing"
UNPAUSING = "unpausing"
SUSPENDING = "suspending"
RESUMING = "resuming"
ATTACHING_INTERFACE = "attaching_interface"
DETACHING_INTERFACE = "detaching_interface"
DELETING = "deleting"

CHANGES_INTERFACES = frozenset({ATTACHING_INTERFACE, DETACHING_INTERFACE})
"""Task states of work that leaves the guest's power alone: what the guest itself does meanwhile counts."""

# power states: what the hypervisor says of the guest
NOSTATE, RUNNING, PAUSED_POWER, SHUTDOWN, CRASHED, SUSPENDED_POWER = 0, 1, 3, 4, 6, 7

# power states: what a server is whose guest changed by itself
_SEEN = {
    RUNNING: ACTIVE,
    PAUSED_POWER: PAUSED,
    SHUTDOWN: STOPPED,
    CRASHED: STOPPED,
    SUSPENDED_POWER: SUSPENDED,
}

ANY = frozenset(VM_STATES)
_PLUGGABLE = frozenset({ACTIVE, PAUSED, STOPPED})


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that can be done to a server."""

    name: str  # the operation's kind, and the name of the instance action shown to users
    starts_from: frozenset[str]  # vm states
    task_state: str  # while it runs
    ends_in: str | None  # vm state after success; None: the one it came from, or no server any more (delete)
    fails_in: str | None  # vm state after a failure; None: the one it came from
    interrupts: frozenset[str] = frozenset()  # task states that it may take over; otherwise none may be set
    interrupts_any: bool = False
    needs_host: bool = True  # makes sense only once the server was placed
    respects_lock: bool = True  # a locked server refuses it to its owner
    capability: str | None = None  # what the host's driver must be able to do, by its name in virt.driver


ACTIONS = {
    action.name: action
    for action in (
        Action("create", frozenset({BUILDING}), SCHEDULING, ACTIVE, ERROR, needs_host=False, respects_lock=False),
        Action("delete", ANY, DELETING, None, ERROR, interrupts_any=True, needs_host=False),
        Action("start", frozenset({STOPPED}), POWERING_ON, ACTIVE, None),
        Action("stop", frozenset({ACTIVE, ERROR}), POWERING_OFF, STOPPED, None),
        Action("reboot", frozenset({ACTIVE}), REBOOTING, ACTIVE, None),
        Action(
            "reboot_hard",
            frozenset({ACTIVE, STOPPED, PAUSED, SUSPENDED, ERROR}),
            REBOOTING_HARD,
            ACTIVE,
            ERROR,
            interrupts=frozenset({REBOOTING, REBOOTING_HARD, PAUSING, UNPAUSING, SUSPENDING, RESUMING}),
        ),
        Action("pause", frozenset({ACTIVE}), PAUSING, PAUSED, None, capability="pause"),
        Action("unpause", frozenset({PAUSED}), UNPAUSING, ACTIVE, None, capability="pause"),
        # Memory that is half on disk is neither running nor suspended: a hard reboot is the way out of ERROR.
        Action("suspend", frozenset({ACTIVE}), SUSPENDING, SUSPENDED, ERROR, capability="suspend"),
        Action("resume", frozenset({SUSPENDED}), RESUMING, ACTIVE, ERROR, capability="suspend"),
        Action("attach_interface", _PLUGGABLE, ATTACHING_INTERFACE, None, None, capability="hot_plug"),
        Action("detach_interface", _PLUGGABLE, DETACHING_INTERFACE, None, None, capability="hot_plug"),
    )
}


def refusal(action: Action, vm_state: str, task_state: str | None, placed: bool) -> str | None:
    """Return why the action cannot start in this state, or None when it can."""
    if vm_state not in action.starts_from:
        return f"while it is in vm_state {vm_state}"
    if task_state is not None and not action.interrupts_any and task_state not in action.interrupts:
        return f"while it is in task_state {task_state}"
    if action.needs_host and not placed:
        return "while it has no host"
    return None


def seen(vm_state: str, power_state: int) -> str:
    """Return what a server is once its guest has this power state without having been ordered to."""
    return _SEEN.get(power_state, vm_state) if vm_state in _SEEN.values() else vm_state


# (vm state) -> default status, and statuses that certain task states show instead
_STATUS: dict[str, tuple[str, dict[str, str]]] = {
    ACTIVE: (
        "ACTIVE",
        {
            REBOOTING: "REBOOT",
            "reboot_pending": "REBOOT",
            "reboot_started": "REBOOT",
            REBOOTING_HARD: "HARD_REBOOT",
            "reboot_pending_hard": "HARD_REBOOT",
            "reboot_started_hard": "HARD_REBOOT",
            "updating_password": "PASSWORD",
            "rebuilding": "REBUILD",
            "rebuild_block_device_mapping": "REBUILD",
            "rebuild_spawning": "REBUILD",
            "migrating": "MIGRATING",
            "resize_prep": "RESIZE",
            "resize_migrating": "RESIZE",
            "resize_migrated": "RESIZE",
            "resize_finish": "RESIZE",
        },
    ),
    BUILDING: ("BUILD", {}),
    STOPPED: (
        "SHUTOFF",
        {
            "resize_prep": "RESIZE",
            "resize_migrating": "RESIZE",
            "resize_migrated": "RESIZE",
            "resize_finish": "RESIZE",
            "rebuilding": "REBUILD",
            "rebuild_block_device_mapping": "REBUILD",
            "rebuild_spawning": "REBUILD",
        },
    ),
    RESIZED: ("VERIFY_RESIZE", {"resize_reverting": "REVERT_RESIZE"}),
    PAUSED: ("PAUSED", {"migrating": "MIGRATING"}),
    SUSPENDED: ("SUSPENDED", {}),
    RESCUED: ("RESCUE", {}),
    ERROR: (
        "ERROR",
        {"rebuilding": "REBUILD", "rebuild_block_device_mapping": "REBUILD", "rebuild_spawning": "REBUILD"},
    ),
    DELETED: ("DELETED", {}),
    SOFT_DELETED: ("SOFT_DELETED", {}),
    SHELVED: ("SHELVED", {}),
    SHELVED_OFFLOADED: ("SHELVED_OFFLOADED", {}),
}


def status(vm_state: str, task_state: str | None) -> str:
    """Return the status that users see."""
    default, special = _STATUS.get(vm_state, ("UNKNOWN", {}))
    return special.get(task_state, default) if task_state else default


def states_of(wanted: str) -> list[tuple[str, frozenset[str] | None, frozenset[str]]]:
    """Return how servers with a status are found: (vm state, task states or None for any but the last, excluded)."""
    found: list[tuple[str, frozenset[str] | None, frozenset[str]]] = []
    for vm_state, (default, special) in _STATUS.items():
        if default == wanted.upper():
            found.append((vm_state, None, frozenset(special)))
        tasks = frozenset(task for task, shown in special.items() if shown == wanted.upper())
        if tasks:
            found.append((vm_state, tasks, frozenset()))
    return found


STATUSES = frozenset(
    [default for default, _ in _STATUS.values()]
    + [shown for _, special in _STATUS.values() for shown in special.values()]
    + ["UNKNOWN"]
)
