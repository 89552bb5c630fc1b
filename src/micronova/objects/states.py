"""The states of servers: what an action on a server starts from and ends in, and the status that users see.

`ACTIONS` has the actions on a server that exists: the API refuses by it, and conductors set the states that it names.
Create and delete are not in it: create makes the server, and a delete, soft or not, is accepted in every state and
interrupts all.
"""

from dataclasses import dataclass

from micronova.objects import power_state
from micronova.objects.operations import instance_action

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
RESCUING = "rescuing"
UNRESCUING = "unrescuing"
UPDATING_PASSWORD = "updating_password"
TRIGGERING_CRASH_DUMP = "triggering_crash_dump"  # Nova has none for it
ATTACHING_INTERFACE = "attaching_interface"
DETACHING_INTERFACE = "detaching_interface"
ATTACHING_VOLUME = "attaching_volume"
DETACHING_VOLUME = "detaching_volume"
EXTENDING_VOLUME = "extending_volume"
SWAPPING_VOLUME = "swapping_volume"
IMAGE_SNAPSHOT_PENDING = "image_snapshot_pending"
IMAGE_SNAPSHOT = "image_snapshot"
IMAGE_BACKUP = "image_backup"
IMAGE_PENDING_UPLOAD = "image_pending_upload"
IMAGE_UPLOADING = "image_uploading"
REBUILDING = "rebuilding"
REBUILD_BLOCK_DEVICE_MAPPING = "rebuild_block_device_mapping"
REBUILD_SPAWNING = "rebuild_spawning"
SOFT_DELETING = "soft-deleting"
RESTORING = "restoring"
SHELVING = "shelving"
SHELVING_IMAGE_PENDING_UPLOAD = "shelving_image_pending_upload"
SHELVING_IMAGE_UPLOADING = "shelving_image_uploading"
SHELVING_OFFLOADING = "shelving_offloading"
UNSHELVING = "unshelving"
MIGRATING = "migrating"
RESIZE_PREP = "resize_prep"
RESIZE_MIGRATING = "resize_migrating"
RESIZE_MIGRATED = "resize_migrated"
RESIZE_FINISH = "resize_finish"
RESIZE_CONFIRMING = "resize_confirming"
RESIZE_REVERTING = "resize_reverting"
DELETING = "deleting"

CHANGES_INTERFACES = frozenset({ATTACHING_INTERFACE, DETACHING_INTERFACE})
"""Task states of operations on the interfaces of a server."""

CHANGES_VOLUMES = frozenset({ATTACHING_VOLUME, DETACHING_VOLUME, EXTENDING_VOLUME, SWAPPING_VOLUME})
"""Task states of operations on the volumes of a server."""

_MAKES_IMAGE = (IMAGE_SNAPSHOT_PENDING, IMAGE_SNAPSHOT, IMAGE_BACKUP, IMAGE_PENDING_UPLOAD, IMAGE_UPLOADING)
KEEPS_POWER_STATE = CHANGES_INTERFACES.union(CHANGES_VOLUMES, _MAKES_IMAGE) | {UPDATING_PASSWORD, TRIGGERING_CRASH_DUMP}
"""Task states of operations that do not change the power state: power changes of the guest still count meanwhile."""

CHANGEABLE = frozenset({ACTIVE, PAUSED, SUSPENDED, STOPPED})
"""VM states in which a server's metadata and tags can be changed."""

NEEDS_GUEST = frozenset({ACTIVE, STOPPED, PAUSED, SUSPENDED, RESCUED, RESIZED, SHELVED})
"""VM states of servers that have a guest on their host, running or not."""

WITHOUT_HOST = frozenset({SHELVED_OFFLOADED})
"""VM states of servers that have no host and can be worked on: an image has what was on their disk."""

# The vm state of a server after a power change that no order caused.
_AFTER_POWER_CHANGE = {
    power_state.RUNNING: ACTIVE,
    power_state.PAUSED: PAUSED,
    power_state.SHUTDOWN: STOPPED,
    power_state.SUSPENDED: SUSPENDED,
}

_PLUGGABLE = frozenset({ACTIVE, PAUSED, STOPPED})
_ATTACHABLE = frozenset({ACTIVE, PAUSED, STOPPED, RESIZED, SOFT_DELETED, SHELVED, SHELVED_OFFLOADED})
_COPYABLE = frozenset({ACTIVE, STOPPED, PAUSED, SUSPENDED})
_UPLOAD = (IMAGE_PENDING_UPLOAD, IMAGE_UPLOADING)
_MOVABLE = frozenset({ACTIVE, STOPPED})


@dataclass(frozen=True, slots=True)
class Action:
    """One action on a server."""

    name: str  # its key in ACTIONS; the operation of `reboot_hard` is of the kind `reboot`
    starts_from: frozenset[str]  # vm states
    task_state: str  # when it is accepted; `then` has those that follow
    ends_in: str | None  # vm state after success; None: the one before
    fails_in: str | None  # vm state after a failure; None: the one before
    interrupts: frozenset[str] = frozenset()  # task states of operations that it may replace
    interrupts_all: bool = False  # it may replace every operation but a delete
    capability: str | None = None  # that the host's driver must have, by its name in virt.driver
    then: tuple[str, ...] = ()  # further task states that its host reaches, in their order: see `is_further`
    label: str = ""  # its name in messages, if it is not that of its instance action

    @property
    def shown_name(self) -> str:
        """Return its name in messages to users."""
        return self.label or instance_action(self.name)


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
            interrupts=frozenset(
                {REBOOTING, REBOOTING_HARD, PAUSING, UNPAUSING, SUSPENDING, RESUMING, TRIGGERING_CRASH_DUMP}
            ),
            label="reboot",
        ),
        Action("pause", frozenset({ACTIVE}), PAUSING, PAUSED, None, capability="pause"),
        Action("unpause", frozenset({PAUSED}), UNPAUSING, ACTIVE, None, capability="pause"),
        # A failure may leave the memory half on disk, neither running nor suspended. A hard reboot leads out of ERROR.
        Action("suspend", frozenset({ACTIVE}), SUSPENDING, SUSPENDED, ERROR, capability="suspend"),
        Action("resume", frozenset({SUSPENDED}), RESUMING, ACTIVE, ERROR, capability="suspend"),
        # A failure leaves a guest that is off, or on its own disk. A hard reboot or another rescue leads out of ERROR.
        Action("rescue", frozenset({ACTIVE, STOPPED, ERROR}), RESCUING, RESCUED, ERROR, capability="rescue"),
        Action("unrescue", frozenset({RESCUED}), UNRESCUING, ACTIVE, ERROR, capability="rescue"),
        Action(
            "change_password",
            frozenset({ACTIVE}),
            UPDATING_PASSWORD,
            None,
            None,
            capability="admin_password",
        ),
        Action(
            "trigger_crash_dump",
            frozenset({ACTIVE, PAUSED, RESCUED, RESIZED, ERROR}),
            TRIGGERING_CRASH_DUMP,
            None,
            None,
            capability="crash_dump",
        ),
        # It ends in STOPPED if the server was stopped (`conductor/operations/rebuild.py`).
        Action(
            "rebuild",
            frozenset({ACTIVE, STOPPED, ERROR}),
            REBUILDING,
            ACTIVE,
            ERROR,
            capability="rebuild",
            then=(REBUILD_BLOCK_DEVICE_MAPPING, REBUILD_SPAWNING),
        ),
        Action("restore", frozenset({SOFT_DELETED}), RESTORING, ACTIVE, None),
        Action("attach_interface", _PLUGGABLE, ATTACHING_INTERFACE, None, None, capability="hot_plug"),
        Action("detach_interface", _PLUGGABLE, DETACHING_INTERFACE, None, None, capability="hot_plug"),
        Action("attach_volume", _ATTACHABLE, ATTACHING_VOLUME, None, None, capability="volumes"),
        Action("detach_volume", _ATTACHABLE, DETACHING_VOLUME, None, None, capability="volumes"),
        Action("swap_volume", frozenset({ACTIVE, PAUSED, RESIZED}), SWAPPING_VOLUME, None, None, capability="volumes"),
        Action(
            "extend_volume", frozenset({ACTIVE, PAUSED, STOPPED}), EXTENDING_VOLUME, None, None, capability="volumes"
        ),
        Action(
            "create_image",
            _COPYABLE,
            IMAGE_SNAPSHOT_PENDING,
            None,
            None,
            capability="snapshot",
            then=(IMAGE_SNAPSHOT, *_UPLOAD),
        ),
        Action(
            "create_backup",
            _COPYABLE,
            IMAGE_BACKUP,
            None,
            None,
            capability="snapshot",
            then=_UPLOAD,
        ),
        # Where a move leads decides what its hosts must be able to do (`servers/moves.py`). One that cannot be undone
        # leaves the server in ERROR (`conductor/operations/move_outcomes.py`).
        Action("resize", _MOVABLE, RESIZE_PREP, RESIZED, None),
        Action("migrate", _MOVABLE, RESIZE_PREP, RESIZED, None),
        Action("live_migrate", frozenset({ACTIVE, PAUSED}), MIGRATING, None, None, label="os-migrateLive"),
        # What an operation wants of a host that is lost does not happen. It ends in STOPPED if the server must be off
        # (`conductor/operations/evacuate.py`).
        Action("evacuate", frozenset({ACTIVE, STOPPED, ERROR}), REBUILDING, ACTIVE, ERROR, interrupts_all=True),
        # With `shelved_offload_time` 0 it goes on as `shelve_offload` does. If it fails after it has switched the guest
        # off, the server is STOPPED (`conductor/operations/create_image.py`).
        Action(
            "shelve",
            _COPYABLE,
            SHELVING,
            SHELVED,
            None,
            capability="snapshot",
            then=(SHELVING_IMAGE_PENDING_UPLOAD, SHELVING_IMAGE_UPLOADING),
        ),
        Action(
            "shelve_offload",
            frozenset({SHELVED}),
            SHELVING_OFFLOADING,
            SHELVED_OFFLOADED,
            None,
        ),
        # If the image of a server that has left its host is gone, it fails in ERROR
        # (`conductor/operations/unshelve_offloaded.py`).
        Action("unshelve", frozenset({SHELVED, SHELVED_OFFLOADED}), UNSHELVING, ACTIVE, None),
        # They end in ACTIVE or STOPPED, as the server was before it was resized (`after_resize`).
        Action("confirm_resize", frozenset({RESIZED}), RESIZE_CONFIRMING, ACTIVE, ERROR),
        Action("revert_resize", frozenset({RESIZED}), RESIZE_REVERTING, ACTIVE, ERROR),
    )
}


def refusal(action: Action, vm_state: str, task_state: str | None, placed: bool) -> str | None:
    """Return why the action cannot start in this state, or None if it can."""
    if vm_state not in action.starts_from:
        return f"while it is in vm_state {vm_state}"
    removes = (DELETING, SOFT_DELETING)
    replaces = task_state not in removes if action.interrupts_all else task_state in action.interrupts
    if task_state is not None and not replaces:
        return f"while it is in task_state {task_state}"
    return None if placed or vm_state in WITHOUT_HOST else "while it has no host"


def is_further(action: Action, task_state: str | None, wanted: str) -> bool:
    """Return whether an action that has this task state may go on to the wanted one: it never goes back."""
    states = (action.task_state, *action.then)
    return task_state in states and wanted in states[states.index(task_state) + 1 :]


def state_after(action: Action, vm_state: str, *, failed: bool = False) -> str:
    """Return the vm state of a server after the action, which began in this one."""
    return (action.fails_in if failed else action.ends_in) or vm_state


def after_resize(power: int) -> str:
    """Return the vm state of a server whose resize was confirmed or reverted."""
    return STOPPED if power == power_state.SHUTDOWN else ACTIVE


def after_power_change(vm_state: str, power_state: int) -> str:
    """Return the vm state of a server after a power change of its guest that no order caused."""
    return _AFTER_POWER_CHANGE.get(power_state, vm_state) if vm_state in _AFTER_POWER_CHANGE.values() else vm_state


_REBUILD = dict.fromkeys((REBUILDING, REBUILD_BLOCK_DEVICE_MAPPING, REBUILD_SPAWNING), "REBUILD")
_RESIZE = dict.fromkeys((RESIZE_PREP, RESIZE_MIGRATING, RESIZE_MIGRATED, RESIZE_FINISH), "RESIZE")
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
            UPDATING_PASSWORD: "PASSWORD",
            **_REBUILD,
            MIGRATING: "MIGRATING",
            **_RESIZE,
        },
    ),
    BUILDING: ("BUILD", {}),
    STOPPED: ("SHUTOFF", {**_RESIZE, **_REBUILD}),
    RESIZED: ("VERIFY_RESIZE", {RESIZE_REVERTING: "REVERT_RESIZE"}),
    PAUSED: ("PAUSED", {MIGRATING: "MIGRATING"}),
    SUSPENDED: ("SUSPENDED", {}),
    RESCUED: ("RESCUE", {}),
    ERROR: ("ERROR", _REBUILD),
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
