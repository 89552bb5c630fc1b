"""What the rows of operations carry for their kinds, as `operations.payload` stores it.

Rows outlive the process that wrote them, so a field that is added has a default, and fields keep their names.
"""

from typing import Self

import msgspec
from msgspec import field

from micronova.embedded.volume.model import Operation


class Payload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The payload of one kind of operation."""

    @classmethod
    def of(cls, operation: Operation) -> Self:
        """Return the payload of an operation."""
        return msgspec.convert(operation.payload, cls)


class CreateVolumePayload(Payload, frozen=True, kw_only=True):
    """What a volume is made from. A volume without any of it is blank."""

    # Of the file that is copied; `source_id` is its name.
    source_directory: str | None = field(default=None, name="copy")
    image_id: str | None = None
    disk_format: str | None = None  # of the image


class ReimageVolumePayload(Payload, frozen=True, kw_only=True):
    """The image that replaces the content of a volume."""

    image_id: str
    disk_format: str
    image_metadata: dict[str, str]


class ExtendVolumePayload(Payload, frozen=True, kw_only=True):
    """The new size of a volume, and what was charged to the quota for it; both in GiB."""

    size: int
    charged: int


class UploadVolumePayload(Payload, frozen=True, kw_only=True):
    """The image that gets the data, and the status that the volume had before."""

    image_id: str
    status: str


class CreateBackupPayload(Payload, frozen=True, kw_only=True):
    """What is backed up."""

    source_directory: str = field(name="copy")  # as of a new volume


class RestoredValues(msgspec.Struct, frozen=True, kw_only=True):
    """Columns that a restored volume gets from the backup."""

    bootable: bool
    image_metadata: dict[str, str]


class RestoreBackupPayload(Payload, frozen=True, kw_only=True):
    """What a restored volume gets from the backup besides its data."""

    values: RestoredValues
    metadata: dict[str, str]
