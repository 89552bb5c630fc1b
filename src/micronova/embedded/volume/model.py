"""The rows of the volume service, the columns that it sets, and the statuses of volumes and what belongs to them."""

from typing import Any, Final, TypedDict

import msgspec

from micronova.objects.clock import micros

GIB: Final = 1 << 30
MAX_SIZE: Final = 0x7FFFFFFF  # GiB, as in Cinder
DOWN_AFTER: Final = 60.0  # seconds after the last sign of life of a service

# The statuses of volumes, snapshots and backups.
CREATING: Final = "creating"
DOWNLOADING: Final = "downloading"
AVAILABLE: Final = "available"
DELETING: Final = "deleting"
ERROR: Final = "error"
ERROR_DELETING: Final = "error_deleting"
IN_USE: Final = "in-use"
RESERVED: Final = "reserved"
ATTACHING: Final = "attaching"
DETACHING: Final = "detaching"
EXTENDING: Final = "extending"
ERROR_EXTENDING: Final = "error_extending"
UPLOADING: Final = "uploading"
AWAITING_TRANSFER: Final = "awaiting-transfer"
BACKING_UP: Final = "backing-up"
RESTORING: Final = "restoring"
RESTORING_BACKUP: Final = "restoring-backup"
ERROR_RESTORING: Final = "error_restoring"
REVERTING: Final = "reverting"
# Statuses that only administrators set.
DELETED: Final = "deleted"
ERROR_BACKING_UP: Final = "error_backing-up"
ERROR_MANAGING: Final = "error_managing"
MAINTENANCE: Final = "maintenance"
MANAGING: Final = "managing"
RETYPING: Final = "retyping"
UNMANAGING: Final = "unmanaging"
ATTACHED: Final = "attached"
"""A status of attachments, which also have RESERVED and ATTACHING."""


class ProjectRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that belongs to a project."""

    id: str
    project_id: str

    @property
    def target(self) -> dict[str, str]:
        """The policy target."""
        return {"project_id": self.project_id}


class ProjectResource(ProjectRow, frozen=True, kw_only=True):
    """What the rows of volumes, snapshots and backups have in common."""

    user_id: str
    name: str | None
    description: str | None
    size: int  # GiB
    status: str
    host: str
    bootable: bool
    image_metadata: dict[str, str]
    created_at: int
    updated_at: int | None
    revision: int
    encryption_key_id: str | None = None  # None: it is not encrypted
    sealed_key: bytes | None = None

    @property
    def target(self) -> dict[str, str]:
        """The policy target."""
        return {"project_id": self.project_id, "user_id": self.user_id}


class Attachment(ProjectRow, frozen=True, kw_only=True):
    """A row of `attachments`: a volume is reserved for, or attached to, a server or a host."""

    volume_id: str
    instance_uuid: str | None
    attached_host: str | None
    mountpoint: str | None
    attach_status: str
    attach_mode: str | None
    connector: dict[str, Any] | None  # in rows of 0.2 and older
    connection_info: dict[str, Any] | None
    attached_at: int | None
    created_at: int
    updated_at: int | None

    @property
    def is_connected(self) -> bool:
        """Whether a host can reach the volume through it."""
        return self.connection_info is not None


class Volume(ProjectResource, frozen=True, kw_only=True):
    """A row of `volumes`, with the metadata and attachments of the volume and the name of its type."""

    availability_zone: str
    volume_type_id: str
    snapshot_id: str | None
    source_volid: str | None
    multiattach: bool
    readonly: bool | None
    type_name: str
    metadata: dict[str, str] = {}
    attachments: tuple[Attachment, ...] = ()


class Snapshot(ProjectResource, frozen=True, kw_only=True):
    """A row of `snapshots`, with the metadata of the snapshot."""

    volume_id: str
    told_progress: str | None
    volume_type_id: str
    metadata: dict[str, str] = {}
    progress: int = 0  # of the operation that makes it, in percent


class Backup(ProjectResource, frozen=True, kw_only=True):
    """A row of `backups`: a full copy of a volume, which outlives it."""

    volume_id: str
    snapshot_id: str | None
    fail_reason: str | None
    volume_metadata: dict[str, str]
    metadata: dict[str, str]
    data_timestamp: int
    volume_type_id: str | None = None  # that the volume had; None: a backup of an older version


class ResourceColumns(TypedDict, total=False):
    """The columns of a volume, a snapshot or a backup that a statement sets."""

    project_id: str
    user_id: str
    name: str | None
    description: str | None
    size: int
    status: str
    bootable: bool
    image_metadata: dict[str, str]
    encryption_key_id: str | None
    sealed_key: bytes | None
    volume_type_id: str  # of volumes, as are the next two
    multiattach: bool
    readonly: bool | None
    told_progress: str | None  # of snapshots
    fail_reason: str | None  # of backups, as is the next
    metadata: dict[str, str]


class VolumeType(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `volume_types`."""

    id: str
    name: str
    description: str | None
    is_public: bool
    extra_specs: dict[str, str]
    qos_specs_id: str | None
    created_at: int
    updated_at: int | None
    revision: int

    @property
    def multiattach(self) -> bool:
        """Whether volumes of this type can be attached to several servers at once."""
        return self.extra_specs.get("multiattach", "").lower() in ("<is> true", "true")


class VolumeTypeColumns(TypedDict, total=False):
    """The columns of a volume type that a statement sets."""

    name: str
    description: str | None
    is_public: bool
    extra_specs: dict[str, str]
    qos_specs_id: str | None


class QosSpecs(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `qos_specs`."""

    id: str
    name: str
    consumer: str
    specs: dict[str, str]
    created_at: int
    updated_at: int | None
    revision: int


class QosSpecsColumns(TypedDict, total=False):
    """The columns of QoS specs that a statement sets."""

    consumer: str
    specs: dict[str, str]


class TypeEncryption(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `volume_type_encryptions`."""

    volume_type_id: str
    encryption_id: str
    provider: str
    cipher: str | None
    key_size: int | None
    control_location: str
    created_at: int
    updated_at: int | None


class TypeEncryptionColumns(TypedDict, total=False):
    """The columns of the encryption of a type that a statement sets."""

    provider: str
    cipher: str | None
    key_size: int | None
    control_location: str
    updated_at: int | None


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `operations`: work that goes on after the answer to a request."""

    id: str
    kind: str
    host: str
    resource_id: str
    source_id: str | None
    project_id: str
    request_id: str
    payload: dict[str, Any]
    cancelled: bool
    progress: int
    attempts: int
    not_before: int
    created_at: int


class ServiceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `services`."""

    binary: str
    host: str
    disabled: bool
    disabled_reason: str | None
    frozen: bool
    seen_at: int

    def is_up(self, now: int) -> bool:
        """Return whether the service has shown a sign of life lately."""
        return self.seen_at >= now - micros(DOWN_AFTER)


class Message(ProjectRow, frozen=True, kw_only=True):
    """A row of `messages`."""

    request_id: str
    resource_type: str
    resource_uuid: str
    event_id: str
    message_level: str
    user_message: str
    created_at: int
    expires_at: int


class Transfer(ProjectRow, frozen=True, kw_only=True):
    """A row of `transfers`. The key itself is not stored."""

    volume_id: str
    name: str | None
    salt: str
    key_hash: str
    no_snapshots: bool
    created_at: int
