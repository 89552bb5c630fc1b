"""Conductors find servers that are shelved for too long by an index."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Make it unless the first revision, which is the metadata as it is now, has made it."""
    shelved = sa.text("vm_state = 'shelved'")
    op.create_index(
        "instances_shelved",
        "instances",
        ["uuid"],
        if_not_exists=True,
        sqlite_where=shelved,
        postgresql_where=shelved,
    )
