"""Indexes for the order of lists of ports."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make them unless the first revision, which is the metadata as it is now, has made them."""
    op.create_index("ports_by_created", "ports", ["created_at", "id"], if_not_exists=True)
    op.create_index("ports_by_project_created", "ports", ["project_id", "created_at", "id"], if_not_exists=True)
