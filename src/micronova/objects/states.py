"""The states of servers: what an action on a server starts from and ends in, and the status that users see.

`ACTIONS` has the actions on a server that exists: the API refuses by it, and conductors set the states that it names.
Create and delete are not in it: create makes the server, and a delete is accepted in every state and interrupts all.
"""

from dataclasses import dataclass

from micronova.objects import power_state

# vm states
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

# task states: what an operation does to the server
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
"""Task states of operations that do not change the power state: power changes of the guest still count meanwhile."""

CHANGEABLE = frozenset(VM_STATES) - {SOFT_DELETED, DELETED}
"""VM states in which a server's metadata and tags can be changed."""

NEEDS_GUEST = frozenset({ACTIVE, STOPPED, PAUSED, SUSPENDED})
"""VM states of servers that have a guest on their host, running or not."""

# The vm state of a server after a power change that no order caused.
_AFTER_POWER_CHANGE = {
    power_state.RUNNING: ACTIVE,
    power_state.PAUSED: PAUSED,
    power_state.SHUTDOWN: STOPPED,
    power_state.SUSPENDED: SUSPENDED,
}

_PLUGGABLE = frozenset({ACTIVE, PAUSED, STOPPED})


@dataclass(frozen=True, slots=True)
class Action:
    """One action on a server."""

    name: str  # its key in ACTIONS; the operation of `reboot_hard` is of the kind `reboot`
    starts_from: frozenset[str]  # vm states
    task_state: str  # while it runs
    ends_in: str | None  # vm state after success; None: the one before
    fails_in: str | None  # vm state after a failure; None: the one before
    interrupts: frozenset[str] = frozenset()  # task states of operations that it may replace
    capability: str | None = None  # that the host's driver must have, by its name in virt.driver


ACTIONS = {
    action.name: action
    for action in (
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
        # A failure may leave the memory half on disk, neither running nor suspended. A hard reboot leads out of ERROR.
        Action("suspend", frozenset({ACTIVE}), SUSPENDING, SUSPENDED, ERROR, capability="suspend"),
        Action("resume", frozenset({SUSPENDED}), RESUMING, ACTIVE, ERROR, capability="suspend"),
        Action("attach_interface", _PLUGGABLE, ATTACHING_INTERFACE, None, None, capability="hot_plug"),
        Action("detach_interface", _PLUGGABLE, DETACHING_INTERFACE, None, None, capability="hot_plug"),
    )
}


def refusal(action: Action, vm_state: str, task_state: str | None, placed: bool) -> str | None:
    """Return why the action cannot start in this state, or None if it can."""
    if vm_state not in action.starts_from:
        return f"while it is in vm_state {vm_state}"
    if task_state is not None and task_state not in action.interrupts:
        return f"while it is in task_state {task_state}"
    return None if placed else "while it has no host"


def state_after(action: Action, vm_state: str, *, failed: bool = False) -> str:
    """Return the vm state of a server after the action, which began in this one."""
    return (action.fails_in if failed else action.ends_in) or vm_state


def after_power_change(vm_state: str, power_state: int) -> str:
    """Return the vm state of a server after a power change of its guest that no order caused."""
    return _AFTER_POWER_CHANGE.get(power_state, vm_state) if vm_state in _AFTER_POWER_CHANGE.values() else vm_state


# vm state -> its status, and the statuses of certain task states
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
    """Return the states that have a status: (vm state, its task states or None for all, task states to exclude)."""
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
