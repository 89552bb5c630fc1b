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

    phrase: str  # what the action does with the resource: "to PHRASE, it must be available", users read
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
    "delete": ActionRule("delete it", (AVAILABLE, ERROR, ERROR_DELETING, ERROR_EXTENDING, ERROR_RESTORING), DELETING),
    "extend": ActionRule("extend it", (AVAILABLE,), EXTENDING),
    "extend_attached": ActionRule("extend it", (AVAILABLE, IN_USE), EXTENDING),
    "revert": ActionRule("revert it to a snapshot", (AVAILABLE,), REVERTING, attachments="none"),
    "upload": ActionRule("make an image of it", (AVAILABLE,), UPLOADING),
    "force_upload": ActionRule("make an image of it", (AVAILABLE, IN_USE), UPLOADING),
    "back_up": ActionRule("back it up", (AVAILABLE,), BACKING_UP),
    "force_back_up": ActionRule("back it up", (AVAILABLE, IN_USE), BACKING_UP),
    "reimage": ActionRule("write an image to it", (AVAILABLE, ERROR), DOWNLOADING, attachments="reserved"),
    "reimage_reserved": ActionRule(
        "write an image to it", (AVAILABLE, ERROR, RESERVED), DOWNLOADING, attachments="reserved"
    ),
    "restore_backup": ActionRule("restore a backup to it", (AVAILABLE,), RESTORING_BACKUP, attachments="none"),
    "retype": ActionRule("change its type", (AVAILABLE,)),
    "set_readonly": ActionRule("make it read-only or writable", (AVAILABLE,)),
    "snapshot": ActionRule("take a snapshot of it", (AVAILABLE,)),
    "force_snapshot": ActionRule("take a snapshot of it", (AVAILABLE, IN_USE)),
    "reserve": ActionRule("reserve it", (AVAILABLE,), ATTACHING, (IN_USE,)),
    "unreserve": ActionRule("end its reservation", (ATTACHING,)),
    "begin_detaching": ActionRule("begin to detach it", (IN_USE,), DETACHING),
    "roll_detaching": ActionRule("keep it attached", (DETACHING,), IN_USE),
    "attach": ActionRule("attach it", (AVAILABLE, ATTACHING), IN_USE, (IN_USE,)),
    "detach": ActionRule("detach it", (IN_USE, DETACHING)),
    "transfer": ActionRule("transfer it", (AVAILABLE,), AWAITING_TRANSFER),
    "reserve_attachment": ActionRule("reserve it", (AVAILABLE,), RESERVED, ATTACHABLE),
}
SNAPSHOT_ACTIONS: Final = {
    "delete": ActionRule("delete it", (AVAILABLE, ERROR, ERROR_DELETING), DELETING),
    "back_up": ActionRule("back it up", (AVAILABLE,), BACKING_UP),
}
BACKUP_ACTIONS: Final = {
    "delete": ActionRule("delete it", (AVAILABLE, ERROR, ERROR_DELETING), DELETING),
    "restore": ActionRule("restore it", (AVAILABLE,), RESTORING),
    "export": ActionRule("export it", (AVAILABLE,)),
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
            f"Invalid volume: Volume {volume.id} is {volume.status}; to {entry.phrase}, it must be "
            f"{' or '.join(starts)}."
        )
    if entry.attachments == "reserved" and any(each.is_connected for each in volume.attachments):
        raise Invalid(f"Invalid volume: Volume {volume.id} is connected to a host; to {entry.phrase}, detach it first.")
    if entry.attachments == "none" and volume.attachments:
        raise Invalid(f"Invalid volume: Volume {volume.id} is attached; to {entry.phrase}, detach it first.")
    return entry


def check_snapshot(snapshot: Snapshot, action: str) -> ActionRule:
    """Return the entry of an action; raise Invalid if the snapshot's status does not allow it."""
    return _check("snapshot", snapshot, SNAPSHOT_ACTIONS[action])


def check_backup(backup: Backup, action: str) -> ActionRule:
    """Return the entry of an action; raise Invalid if the backup's status does not allow it."""
    return _check("backup", backup, BACKUP_ACTIONS[action])


def _check(noun: str, found: Snapshot | Backup, entry: ActionRule) -> ActionRule:
    if found.status not in entry.starts:
        raise Invalid(
            f"Invalid {noun}: {noun.capitalize()} {found.id} is {found.status}; to {entry.phrase}, it must be "
            f"{' or '.join(entry.starts)}."
        )
    return entry
