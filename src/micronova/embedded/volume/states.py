"""What may be done with a volume or a snapshot in which status. The API's errors come from this table."""

from typing import Final, NamedTuple

from micronova.embedded.volume.model import (
    ATTACHING,
    AVAILABLE,
    BACKING_UP,
    CREATING,
    DELETING,
    DETACHING,
    DOWNLOADING,
    ERROR,
    ERROR_DELETING,
    ERROR_EXTENDING,
    ERROR_RESTORING,
    EXTENDING,
    IN_USE,
    RESERVED,
    RESTORING_BACKUP,
    REVERTING,
    UPLOADING,
    Snapshot,
    Volume,
)
from micronova.objects.errors import Invalid


class Action(NamedTuple):
    """The statuses that an action may start from, and the status while it runs; "" if it does not change it."""

    starts: tuple[str, ...]
    during: str = ""
    multiattach: tuple[str, ...] = ()  # further statuses that volumes with multiattach may have
    replaces: bool = False  # the file: a server that is attached, whatever status was set, would use the old one


ATTACHABLE: Final = (IN_USE, ATTACHING, RESERVED)
WORKING: Final = (EXTENDING, UPLOADING, BACKING_UP, DOWNLOADING)
"""The statuses of work on a volume that may be attached: they stay while attachments change."""

# `fail` of the kinds of operations (`*_work.py`) says in which status a failure leaves a volume.
VOLUME_ACTIONS: Final = {
    "delete": Action((AVAILABLE, ERROR, ERROR_DELETING, ERROR_EXTENDING, ERROR_RESTORING), DELETING),
    "extend": Action((AVAILABLE,), EXTENDING),
    "extend, attached or not": Action((AVAILABLE, IN_USE), EXTENDING),
    "revert": Action((AVAILABLE,), REVERTING, replaces=True),
    "upload": Action((AVAILABLE,), UPLOADING),
    "upload by force": Action((AVAILABLE, IN_USE), UPLOADING),
    "back up": Action((AVAILABLE,), BACKING_UP),
    "back up by force": Action((AVAILABLE, IN_USE), BACKING_UP),
    "reimage": Action((AVAILABLE, ERROR), DOWNLOADING),
    "reimage, reserved or not": Action((AVAILABLE, ERROR, RESERVED), DOWNLOADING),
    "restore a backup": Action((AVAILABLE,), RESTORING_BACKUP, replaces=True),
    "retype": Action((AVAILABLE,)),
    "set readonly": Action((AVAILABLE,)),
    "snapshot": Action((AVAILABLE,)),
    "snapshot by force": Action((AVAILABLE, IN_USE)),
    "reserve": Action((AVAILABLE,), ATTACHING, (IN_USE,)),
    "unreserve": Action((ATTACHING,)),
    "begin detaching": Action((IN_USE,), DETACHING),
    "roll detaching": Action((DETACHING,), IN_USE),
    "attach": Action((AVAILABLE, ATTACHING), IN_USE, (IN_USE,)),
    "detach": Action((IN_USE, DETACHING)),
    "reserve an attachment": Action((AVAILABLE,), RESERVED, ATTACHABLE),
}
SNAPSHOT_ACTIONS: Final = {
    "delete": Action((AVAILABLE, ERROR, ERROR_DELETING), DELETING),
}

REPORTED_STATUSES: Final = {CREATING: (CREATING, AVAILABLE, ERROR), DELETING: (DELETING, ERROR_DELETING)}
"""The statuses that compute may report of a snapshot, by the status that the snapshot has."""
DELETABLE_BACKUPS: Final = (AVAILABLE, ERROR, ERROR_DELETING)

VOLUME_STATUSES: Final = (
    "creating", "available", "deleting", "error", "error_deleting", "error_managing", "managing", "attaching", "in-use",
    "detaching", "maintenance", "restoring-backup", "error_restoring", "reserved", "awaiting-transfer", "backing-up",
    "error_backing-up", "error_extending", "downloading", "uploading", "retyping", "extending",
)  # fmt: skip
"""The statuses that an administrator may set. Those of snapshots and backups follow."""
SNAPSHOT_STATUSES: Final = (
    "available", "backing-up", "creating", "deleted", "deleting", "error", "error_deleting", "unmanaging", "restoring"
)  # fmt: skip
BACKUP_STATUSES: Final = (AVAILABLE, ERROR)


def check_volume(volume: Volume, action: str) -> Action:
    """Return the entry of an action; raise Invalid if the volume's status does not allow it."""
    entry = VOLUME_ACTIONS[action]
    starts = entry.starts + (entry.multiattach if volume.multiattach else ())
    if volume.status not in starts:
        raise Invalid(
            f"Invalid volume: Volume {volume.id} is {volume.status}; to {action}, it must be {' or '.join(starts)}."
        )
    if entry.replaces and volume.attachments:
        raise Invalid(f"Invalid volume: Volume {volume.id} is attached; to {action}, detach it before.")
    return entry


def check_snapshot(snapshot: Snapshot, action: str) -> Action:
    """Return the entry of an action; raise Invalid if the snapshot's status does not allow it."""
    entry = SNAPSHOT_ACTIONS[action]
    if snapshot.status not in entry.starts:
        raise Invalid(
            f"Invalid snapshot: Snapshot {snapshot.id} is {snapshot.status}; to {action} it, it must be "
            f"{' or '.join(entry.starts)}."
        )
    return entry
