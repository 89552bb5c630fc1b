"""What may be done with a volume, a snapshot or a backup in which status. The API's errors come from this table."""

from typing import Final, Literal, NamedTuple

from micronova.embedded.volume.model import (
    ATTACHING,
    AVAILABLE,
    AWAITING_TRANSFER,
    BACKING_UP,
    CREATING,
    DELETED,
    DELETING,
    DETACHING,
    DOWNLOADING,
    ERROR,
    ERROR_BACKING_UP,
    ERROR_DELETING,
    ERROR_EXTENDING,
    ERROR_MANAGING,
    ERROR_RESTORING,
    EXTENDING,
    IN_USE,
    MAINTENANCE,
    MANAGING,
    RESERVED,
    RESTORING,
    RESTORING_BACKUP,
    RETYPING,
    REVERTING,
    UNMANAGING,
    UPLOADING,
    Backup,
    Snapshot,
    Volume,
)
from micronova.objects.errors import Invalid


class ActionRule(NamedTuple):
    """The statuses in which an action may start, and the status of the resource while the action runs."""

    starts: tuple[str, ...]
    during: str = ""  # empty if the action does not change the status
    multiattach: tuple[str, ...] = ()  # further statuses that volumes with multiattach may have
    # Which attachments the volume may have when the action starts, whatever status an administrator has set: a server
    # would go on to use a file that is replaced.
    attachments: Literal["any", "reserved", "none"] = "any"


ATTACHABLE: Final = (IN_USE, ATTACHING, RESERVED)
WORKING: Final = (EXTENDING, UPLOADING, BACKING_UP, DOWNLOADING)
"""The statuses of work on a volume that may be attached: they stay while attachments change."""

# `failure_status` of a kind of operation (`operations/*_work.py`) is the status of the resource after a failure.
VOLUME_ACTIONS: Final = {
    "delete": ActionRule((AVAILABLE, ERROR, ERROR_DELETING, ERROR_EXTENDING, ERROR_RESTORING), DELETING),
    "extend": ActionRule((AVAILABLE,), EXTENDING),
    "extend, attached or not": ActionRule((AVAILABLE, IN_USE), EXTENDING),
    "revert": ActionRule((AVAILABLE,), REVERTING, attachments="none"),
    "upload": ActionRule((AVAILABLE,), UPLOADING),
    "upload by force": ActionRule((AVAILABLE, IN_USE), UPLOADING),
    "back up": ActionRule((AVAILABLE,), BACKING_UP),
    "back up by force": ActionRule((AVAILABLE, IN_USE), BACKING_UP),
    "reimage": ActionRule((AVAILABLE, ERROR), DOWNLOADING, attachments="reserved"),
    "reimage, reserved or not": ActionRule((AVAILABLE, ERROR, RESERVED), DOWNLOADING, attachments="reserved"),
    "restore a backup": ActionRule((AVAILABLE,), RESTORING_BACKUP, attachments="none"),
    "retype": ActionRule((AVAILABLE,)),
    "set readonly": ActionRule((AVAILABLE,)),
    "snapshot": ActionRule((AVAILABLE,)),
    "snapshot by force": ActionRule((AVAILABLE, IN_USE)),
    "reserve": ActionRule((AVAILABLE,), ATTACHING, (IN_USE,)),
    "unreserve": ActionRule((ATTACHING,)),
    "begin detaching": ActionRule((IN_USE,), DETACHING),
    "roll detaching": ActionRule((DETACHING,), IN_USE),
    "attach": ActionRule((AVAILABLE, ATTACHING), IN_USE, (IN_USE,)),
    "detach": ActionRule((IN_USE, DETACHING)),
    "transfer": ActionRule((AVAILABLE,), AWAITING_TRANSFER),
    "reserve an attachment": ActionRule((AVAILABLE,), RESERVED, ATTACHABLE),
}
SNAPSHOT_ACTIONS: Final = {
    "delete": ActionRule((AVAILABLE, ERROR, ERROR_DELETING), DELETING),
    "back up": ActionRule((AVAILABLE,), BACKING_UP),
}
BACKUP_ACTIONS: Final = {
    "delete": ActionRule((AVAILABLE, ERROR, ERROR_DELETING), DELETING),
    "restore": ActionRule((AVAILABLE,), RESTORING),
    "export": ActionRule((AVAILABLE,)),
}

REPORTED_STATUSES: Final = {CREATING: (CREATING, AVAILABLE, ERROR), DELETING: (DELETING, ERROR_DELETING)}
"""The statuses that compute may report of a snapshot, by the status that the snapshot has."""

VOLUME_STATUSES: Final = (
    CREATING, AVAILABLE, DELETING, ERROR, ERROR_DELETING, ERROR_MANAGING, MANAGING, ATTACHING, IN_USE, DETACHING,
    MAINTENANCE, RESTORING_BACKUP, ERROR_RESTORING, RESERVED, AWAITING_TRANSFER, BACKING_UP, ERROR_BACKING_UP,
    ERROR_EXTENDING, DOWNLOADING, UPLOADING, RETYPING, EXTENDING,
)  # fmt: skip
"""The statuses that an administrator may set. Those of snapshots and backups follow."""
SNAPSHOT_STATUSES: Final = (
    AVAILABLE, BACKING_UP, CREATING, DELETED, DELETING, ERROR, ERROR_DELETING, UNMANAGING, RESTORING
)  # fmt: skip
BACKUP_STATUSES: Final = (AVAILABLE, ERROR)


def check_volume(volume: Volume, action: str) -> ActionRule:
    """Return the entry of an action; raise Invalid if the volume's status does not allow it."""
    entry = VOLUME_ACTIONS[action]
    starts = entry.starts + (entry.multiattach if volume.multiattach else ())
    if volume.status not in starts:
        raise Invalid(
            f"Invalid volume: Volume {volume.id} is {volume.status}; to {action}, it must be {' or '.join(starts)}."
        )
    if entry.attachments == "reserved" and any(each.is_connected for each in volume.attachments):
        raise Invalid(f"Invalid volume: Volume {volume.id} is connected to a host; to {action}, detach it first.")
    if entry.attachments == "none" and volume.attachments:
        raise Invalid(f"Invalid volume: Volume {volume.id} is attached; to {action}, detach it first.")
    return entry


def check_snapshot(snapshot: Snapshot, action: str) -> ActionRule:
    """Return the entry of an action; raise Invalid if the snapshot's status does not allow it."""
    return _check("snapshot", snapshot, SNAPSHOT_ACTIONS[action], action)


def check_backup(backup: Backup, action: str) -> ActionRule:
    """Return the entry of an action; raise Invalid if the backup's status does not allow it."""
    return _check("backup", backup, BACKUP_ACTIONS[action], action)


def _check(noun: str, found: Snapshot | Backup, entry: ActionRule, action: str) -> ActionRule:
    if found.status not in entry.starts:
        raise Invalid(
            f"Invalid {noun}: {noun.capitalize()} {found.id} is {found.status}; to {action} it, it must be "
            f"{' or '.join(entry.starts)}."
        )
    return entry
