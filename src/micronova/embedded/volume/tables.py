"""The schema of the volume service's own database.

Times are in microseconds, sizes in GiB. A row exists before its file and until its file is removed. Rows of deleted
resources are removed.
"""

from typing import Any

import sqlalchemy as sa
from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Index, Integer, LargeBinary, String, Text

from micronova.embedded.common.compute_events import event_columns

metadata = sa.MetaData()


def _times() -> tuple[Column[int], Column[int | None]]:
    return Column("created_at", BigInteger, nullable=False), Column("updated_at", BigInteger)


def _resource() -> tuple[Column[Any], ...]:
    """Return what volumes, snapshots and backups have in common."""
    return (
        Column("project_id", String(255), nullable=False),
        Column("user_id", String(255), nullable=False),
        Column("name", String(255)),
        Column("description", String(255)),
        Column("size", Integer, nullable=False),  # of the volume; of a snapshot or a backup as the volume was
        Column("status", String(32), nullable=False),
        Column("host", String(255), nullable=False),  # of the service that has the file
        Column("bootable", Boolean, nullable=False),
        Column("image_metadata", sa.JSON, nullable=False),
        *_times(),
        # Raised by every change. A change names the revision that it has read; see embedded.common.revisions.
        Column("revision", Integer, nullable=False),
        # Of what is encrypted: the id of its key, and the key, encrypted with the cloud's.
        Column("encryption_key_id", String(36)),
        Column("sealed_key", LargeBinary),
    )


def _lists(table: str) -> tuple[Index, Index]:
    """Return the indexes of the lists of all projects and of one."""
    return (
        Index(f"{table}_by_created", "created_at", "id"),
        Index(f"{table}_by_project", "project_id", "created_at", "id"),
    )


def _items(table: str, owner: Column[str], *indexes: Index) -> sa.Table:
    """Return the table of the metadata of a resource."""
    return sa.Table(
        table,
        metadata,
        owner,
        Column("key", String(255), primary_key=True),
        Column("value", String(255), nullable=False),
        *indexes,
    )


def _limits(table: str, owner: str) -> sa.Table:
    """Return a table of the limits of quotas."""
    return sa.Table(
        table,
        metadata,
        Column(owner, String(255), primary_key=True),
        Column("resource", String(255), primary_key=True),
        Column("maximum", BigInteger, nullable=False),
    )


volumes = sa.Table(
    "volumes",
    metadata,
    Column("id", String(36), primary_key=True),
    *_resource(),
    Column("availability_zone", String(255), nullable=False),
    Column("volume_type_id", String(36), ForeignKey("volume_types.id"), nullable=False),
    Column("snapshot_id", String(36)),
    Column("source_volid", String(36)),
    Column("multiattach", Boolean, nullable=False),
    Column("readonly", Boolean),  # None: never set
    *_lists("volumes"),
    Index("volumes_by_type", "volume_type_id"),
)

volume_metadata = _items(
    "volume_metadata",
    Column("volume_id", String(36), ForeignKey("volumes.id", ondelete="CASCADE"), primary_key=True),
    # Compute finds a volume, in whatever project it is, by the device that it was made for.
    Index("volume_metadata_by_item", "value", "key"),
)

snapshots = sa.Table(
    "snapshots",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("volume_id", String(36), ForeignKey("volumes.id"), nullable=False),
    *_resource(),
    Column("told_progress", String(255)),  # what os-update_snapshot_status has reported
    Column("volume_type_id", String(36), ForeignKey("volume_types.id"), nullable=False),
    *_lists("snapshots"),
    Index("snapshots_by_volume", "volume_id"),
    Index("snapshots_by_type", "volume_type_id"),
)

snapshot_metadata = _items(
    "snapshot_metadata",
    Column("snapshot_id", String(36), ForeignKey("snapshots.id", ondelete="CASCADE"), primary_key=True),
)

# Without foreign keys: a backup outlives its volume.
backups = sa.Table(
    "backups",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("volume_id", String(36), nullable=False),
    Column("snapshot_id", String(36)),
    *_resource(),
    Column("fail_reason", String(255)),
    Column("volume_metadata", sa.JSON, nullable=False),
    Column("metadata", sa.JSON, nullable=False),
    Column("data_timestamp", BigInteger, nullable=False),
    Column("volume_type_id", String(36)),  # that the volume had
    *_lists("backups"),
    Index("backups_by_volume", "volume_id"),
)

attachments = sa.Table(
    "attachments",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("volume_id", String(36), ForeignKey("volumes.id", ondelete="CASCADE"), nullable=False),
    Column("project_id", String(255), nullable=False),
    Column("instance_uuid", String(36)),
    Column("attached_host", String(255)),
    Column("mountpoint", String(255)),
    Column("attach_status", String(32), nullable=False),
    Column("attach_mode", String(8)),
    Column("connector", sa.JSON(none_as_null=True)),
    Column("connection_info", sa.JSON(none_as_null=True)),
    Column("attached_at", BigInteger),
    *_times(),
    *_lists("attachments"),
    Index("attachments_by_volume", "volume_id"),
    Index("attachments_by_instance", "instance_uuid"),
)

# The hosts that os-initialize_connection has connected. Those that attachments connect are in `attachments`.
volume_connections = sa.Table(
    "volume_connections",
    metadata,
    Column("volume_id", String(36), ForeignKey("volumes.id", ondelete="CASCADE"), primary_key=True),
    Column("host", String(255), primary_key=True),
)

volume_types = sa.Table(
    "volume_types",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("description", String(255)),
    Column("is_public", Boolean, nullable=False),
    Column("extra_specs", sa.JSON, nullable=False),
    Column("qos_specs_id", String(36), ForeignKey("qos_specs.id")),
    *_times(),
    Column("revision", Integer, nullable=False),
    Index("volume_types_by_created", "created_at", "id"),
)

# How volumes of a type are encrypted. A type without a row has volumes in the clear.
type_encryptions = sa.Table(
    "volume_type_encryptions",
    metadata,
    Column("volume_type_id", String(36), ForeignKey("volume_types.id", ondelete="CASCADE"), primary_key=True),
    Column("encryption_id", String(36), nullable=False),
    Column("provider", String(255), nullable=False),
    Column("cipher", String(255)),
    Column("key_size", Integer),
    Column("control_location", String(16), nullable=False),
    *_times(),
)

qos_specs = sa.Table(
    "qos_specs",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("consumer", String(16), nullable=False),
    Column("specs", sa.JSON, nullable=False),
    *_times(),
    Column("revision", Integer, nullable=False),
    Index("qos_specs_by_created", "created_at", "id"),
)

# The types of volumes for which a project names no type.
default_types = sa.Table(
    "default_types",
    metadata,
    Column("project_id", String(255), primary_key=True),
    Column("volume_type_id", String(36), ForeignKey("volume_types.id", ondelete="CASCADE"), nullable=False),
    Index("default_types_by_type", "volume_type_id"),
)

# The projects that may use a type that is not public.
volume_type_projects = sa.Table(
    "volume_type_projects",
    metadata,
    Column("volume_type_id", String(36), ForeignKey("volume_types.id", ondelete="CASCADE"), primary_key=True),
    Column("project_id", String(255), primary_key=True),
    Index("volume_type_projects_by_project", "project_id"),
)

# Work that goes on after the answer to a request. The row is written in the transaction of the request and removed in
# the one that records the result; see operations/engine.py.
operations = sa.Table(
    "operations",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("host", String(255), nullable=False),  # of the service that has the files
    Column("resource_id", String(36), nullable=False),  # the volume, snapshot or backup that it changes
    Column("source_id", String(36)),  # what it reads; nothing changes or deletes it until the operation has ended
    Column("project_id", String(255), nullable=False),
    Column("request_id", String(64), nullable=False),
    Column("payload", sa.JSON, nullable=False),
    Column("cancelled", Boolean, nullable=False),  # its result is not wanted any more
    Column("progress", Integer, nullable=False),  # in percent
    Column("attempts", Integer, nullable=False),
    Column("not_before", BigInteger, nullable=False),  # a pause after an attempt that lacked something for the moment
    Column("created_at", BigInteger, nullable=False),
    Index("operations_by_host", "host", "created_at", "id"),
    Index("operations_by_resource", "resource_id"),
    Index("operations_by_source", "source_id"),
)

# The outbox of events for compute: written with the change, deleted when compute has answered.
events = sa.Table(
    "events",
    metadata,
    Column("id", String(36), primary_key=True),
    *event_columns(),
    Index("events_by_volume", "tag", "server_id"),
)

# What a project uses, changed in the transaction of each change.
usages = sa.Table(
    "quota_usages",
    metadata,
    Column("project_id", String(255), primary_key=True),
    Column("resource", String(255), primary_key=True),
    Column("used", BigInteger, nullable=False),
)

# Limits of projects. Those of the class "default" hold for projects without limits of their own.
limits = _limits("quota_limits", "project_id")
class_limits = _limits("quota_class_limits", "class_name")

# The services that operators know from Cinder, for what they set; each host has the same ones.
services = sa.Table(
    "services",
    metadata,
    Column("binary", String(255), primary_key=True),
    Column("host", String(255), primary_key=True),
    Column("disabled", Boolean, nullable=False),
    Column("disabled_reason", String(255)),
    Column("frozen", Boolean, nullable=False),  # resources stay as they are: no operation is recorded
    Column("seen_at", BigInteger, nullable=False),
)

transfers = sa.Table(
    "transfers",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("volume_id", String(36), ForeignKey("volumes.id", ondelete="CASCADE"), nullable=False, unique=True),
    Column("project_id", String(255), nullable=False),
    Column("name", String(255)),
    Column("salt", String(64), nullable=False),
    Column("key_hash", String(128), nullable=False),
    Column("no_snapshots", Boolean, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    *_lists("transfers"),
)

# What users are told about operations that failed.
messages = sa.Table(
    "messages",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("project_id", String(255), nullable=False),
    Column("request_id", String(64), nullable=False),
    Column("resource_type", String(32), nullable=False),
    Column("resource_uuid", String(36), nullable=False),
    Column("event_id", String(64), nullable=False),
    Column("message_level", String(16), nullable=False),
    Column("user_message", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Index("messages_by_project", "project_id", "created_at", "id"),
    Index("messages_by_expiry", "expires_at"),
)
