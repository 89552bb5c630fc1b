"""The schema of the image service's own database.

Times are in microseconds. Rows of deleted images are removed. `deleted_images` keeps their ids, so that nobody can
create an image with an id that others still refer to.
"""

import sqlalchemy as sa
from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Index, Integer, String, Text

metadata = sa.MetaData()

images = sa.Table(
    "images",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("name", String(255)),
    Column("status", String(16), nullable=False),
    Column("visibility", String(16), nullable=False),
    Column("owner", String(255)),
    Column("disk_format", String(20)),
    Column("container_format", String(20)),
    Column("size", BigInteger),  # set if there is data; counted in the usage of the owner
    Column("virtual_size", BigInteger),
    Column("checksum", String(32)),
    Column("os_hash_algo", String(64)),
    Column("os_hash_value", String(128)),
    Column("min_disk", Integer, nullable=False),
    Column("min_ram", Integer, nullable=False),
    Column("protected", Boolean, nullable=False),
    Column("os_hidden", Boolean, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    # Counted up by every change. A change names the revision that it has read; see embedded.common.revisions.
    Column("version", Integer, nullable=False, key="revision"),
    # The upload that runs, whose id is also in the name of its temporary file; NULL if there is none.
    Column("upload_id", String(36)),
    Index("images_by_created", "created_at", "id"),
    Index("images_by_owner", "owner", "created_at", "id"),
    Index("images_by_name", "name"),
    Index("images_by_visibility", "visibility", "created_at", "id"),
)

# Without an index on values, which may be longer than an index entry.
properties = sa.Table(
    "image_properties",
    metadata,
    Column("image_id", String(36), ForeignKey("images.id", ondelete="CASCADE"), primary_key=True),
    Column("name", String(255), primary_key=True),
    Column("value", Text),
)

tags = sa.Table(
    "image_tags",
    metadata,
    Column("image_id", String(36), ForeignKey("images.id", ondelete="CASCADE"), primary_key=True),
    Column("tag", String(255), primary_key=True),
    Index("image_tags_by_tag", "tag"),
)

members = sa.Table(
    "image_members",
    metadata,
    Column("image_id", String(36), ForeignKey("images.id", ondelete="CASCADE"), primary_key=True),
    Column("member", String(255), primary_key=True),
    Column("status", String(16), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Index("image_members_by_member", "member", "status"),
)

deleted_images = sa.Table(
    "deleted_images",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("deleted_at", BigInteger, nullable=False),
    Index("deleted_images_by_time", "deleted_at"),
)

# The bytes of image data of each project, updated in the transaction of each change.
usage = sa.Table(
    "project_usage",
    metadata,
    Column("project_id", String(255), primary_key=True),
    Column("bytes", BigInteger, nullable=False),
)

# The bytes that each running upload may write, if projects have a limit. They count until the upload has ended.
reservations = sa.Table(
    "upload_reservations",
    metadata,
    Column("upload_id", String(36), primary_key=True),
    Column("image_id", String(36), ForeignKey("images.id", ondelete="CASCADE"), nullable=False),
    Column("project_id", String(255), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Index("upload_reservations_by_image", "image_id"),
    Index("upload_reservations_by_project", "project_id"),
)

# Without a foreign key to the images: a task is shown after its image has been deleted too.
tasks = sa.Table(
    "tasks",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("type", String(30), nullable=False),
    Column("status", String(30), nullable=False),
    Column("owner", String(255)),
    Column("image_id", String(36)),
    Column("user_id", String(64)),
    Column("request_id", String(64)),
    Column("input", sa.JSON, nullable=False),
    Column("result", sa.JSON),
    Column("message", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Index("tasks_by_created", "created_at", "id"),
    Index("tasks_by_expiry", "expires_at"),
    Index("tasks_by_image", "image_id"),
)

metadef_namespaces = sa.Table(
    "metadef_namespaces",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("namespace", String(80), nullable=False, unique=True),
    Column("display_name", String(80)),
    Column("description", Text),
    Column("visibility", String(16), nullable=False),
    Column("protected", Boolean, nullable=False),
    Column("owner", String(255)),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Index("metadef_namespaces_by_created", "created_at", "id"),
)

# The objects, properties and tags of namespaces.
metadef_items = sa.Table(
    "metadef_items",
    metadata,
    Column("namespace_id", String(36), ForeignKey("metadef_namespaces.id", ondelete="CASCADE"), primary_key=True),
    Column("kind", String(16), primary_key=True),
    Column("name", String(80), primary_key=True),
    Column("definition", sa.JSON, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
)

metadef_resource_types = sa.Table(
    "metadef_resource_types",
    metadata,
    Column("name", String(80), primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
)

# Without a foreign key to the resource types, of which none is ever deleted.
metadef_associations = sa.Table(
    "metadef_associations",
    metadata,
    Column("namespace_id", String(36), ForeignKey("metadef_namespaces.id", ondelete="CASCADE"), primary_key=True),
    Column("name", String(80), primary_key=True),
    Column("prefix", String(80)),
    Column("properties_target", String(80)),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Index("metadef_associations_by_name", "name"),
)
