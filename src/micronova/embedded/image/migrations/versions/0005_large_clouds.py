"""Indexes for lists of images that are shared with all, and for deleted ids that are forgotten."""

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Make them unless the first revision, which is the metadata as it is now, has made them."""
    op.create_index("images_by_visibility", "images", ["visibility", "created_at", "id"], if_not_exists=True)
    op.create_index("deleted_images_by_time", "deleted_images", ["deleted_at"], if_not_exists=True)
