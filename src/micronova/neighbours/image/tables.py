"""The schema of the image service's own database.

Times are BigInteger microseconds. Rows are deleted for real; `deleted_images` remembers only ids, so that
nobody can take over the id of an image that others still refer to.
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
    Column("size", BigInteger),  # set exactly when there is data; this much is charged to the owner
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
    # Raised by every change: who changes what it has read says which version that was.
    Column("version", Integer, nullable=False),
    # The upload that is under way, which is also part of its temporary file's name; NULL when there is none.
    Column("upload_id", String(36)),
    Index("images_by_created", "created_at", "id"),
    Index("images_by_owner", "owner", "created_at", "id"),
    Index("images_by_name", "name"),
)

# No index on values: they may be longer than an index entry, and are compared for images found otherwise.
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
)

# What each project's image data takes up; charged and given back with the change itself, never counted.
usage = sa.Table(
    "project_usage",
    metadata,
    Column("project_id", String(255), primary_key=True),
    Column("bytes", BigInteger, nullable=False),
)
