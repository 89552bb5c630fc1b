"""No index of ports by project alone: that of their lists begins with the project."""

from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Remove it, unless the first revision, which is the metadata as it is now, has not made it."""
    op.drop_index("ix_ports_project_id", "ports", if_exists=True)
