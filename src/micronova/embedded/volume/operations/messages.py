"""Messages: what users are told about operations that failed.

The id of an event has Cinder's numbers of the resource and the action. Numbers above 100 are our own.
"""

import errno
from enum import Enum
from typing import Final

from micronova.embedded.volume.backend.keys import KeyNotReadable
from micronova.embedded.volume.model import Message, Operation
from micronova.exporter.client import ExportFailed

KEPT: Final = 30 * 24 * 3600 * 1_000_000  # microseconds for which a message is shown
ERROR_LEVEL: Final = "ERROR"


class Resource(Enum):
    """What a message is about."""

    VOLUME = "VOLUME"
    SNAPSHOT = "VOLUME_SNAPSHOT"
    BACKUP = "VOLUME_BACKUP"


class NumberedText(Enum):
    """A part of a message: its number in the id of an event, and its text."""

    @property
    def number(self) -> str:
        """The number."""
        return str(self.value[0])

    @property
    def text(self) -> str:
        """The text."""
        return str(self.value[1])


class Action(NumberedText):
    """What was tried: its number, and how a message begins."""

    COPY_VOLUME_TO_IMAGE = ("003", "The volume was not copied to the image")
    EXTEND_VOLUME = ("007", "The volume was not extended")
    CREATE_VOLUME = ("008", "The volume was not created")
    DELETE_VOLUME = ("101", "The volume was not deleted")
    REIMAGE_VOLUME = ("021", "The image was not written to the volume")
    REVERT_VOLUME = ("102", "The volume was not reverted")
    CREATE_SNAPSHOT = ("009", "The snapshot was not created")
    DELETE_SNAPSHOT = ("010", "The snapshot was not deleted")
    CREATE_BACKUP = ("013", "The backup was not created")
    IMPORT_BACKUP = ("103", "The backup was not imported")
    DELETE_BACKUP = ("014", "The backup was not deleted")
    RESTORE_BACKUP = ("015", "The backup was not restored")


class Detail(NumberedText):
    """Why it failed: its number, and how a message ends."""

    UNKNOWN = ("001", "an error that was not expected occurred.")
    NO_BACKEND = ("003", "no storage service takes volumes of this type.")
    NO_SPACE = ("101", "the storage has no space left.")
    NO_SOURCE = ("102", "what it was to be made of is gone.")
    NO_IMAGE = ("103", "the image service did not give the image out, or did not take it.")
    IMAGE_REFUSED = ("104", "the image is unsafe, or it is not of the format that it declares.")
    IMAGE_TOO_LARGE = ("105", "the image is larger than the volume.")
    HAS_SNAPSHOTS = ("106", "it has snapshots that could not be deleted.")
    NO_FILE = ("107", "its file is gone.")
    NOT_EXPORTED = ("108", "the storage daemon that serves the volume refused.")
    NO_KEY = ("109", "the service has no key to encrypt it with, or cannot read its key.")


def detail_of(error: Exception, operation: Operation) -> Detail:
    """Return what users are told about an error; its own text may have paths of this machine."""
    if is_no_space(error):
        return Detail.NO_SPACE
    if isinstance(error, FileNotFoundError):
        return Detail.NO_FILE if operation.source_id is None else Detail.NO_SOURCE
    if isinstance(error, ExportFailed):
        return Detail.NOT_EXPORTED
    if isinstance(error, KeyNotReadable):
        return Detail.NO_KEY
    return Detail.UNKNOWN


def is_no_space(error: Exception) -> bool:
    """Return whether a file system is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def message(id: str, operation: Operation, resource: Resource, action: Action, detail: Detail, now: int) -> Message:
    """Return the message about an operation that failed."""
    return Message(
        id=id,
        project_id=operation.project_id,
        request_id=operation.request_id,
        resource_type=resource.value,
        resource_uuid=operation.resource_id,
        event_id=f"VOLUME_{resource.value}_{action.number}_{detail.number}",
        message_level=ERROR_LEVEL,
        user_message=f"{action.text}: {detail.text}",
        created_at=now,
        expires_at=now + KEPT,
    )
