"""Conductors find servers that are rescued for too long by an index."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Make it unless the first revision, which is the metadata as it is now, has made it."""
    rescued = sa.text("vm_state = 'rescued'")
    op.create_index(
        "instances_rescued",
        "instances",
        ["launched_at"],
        if_not_exists=True,
        sqlite_where=rescued,
        postgresql_where=rescued,
    )
