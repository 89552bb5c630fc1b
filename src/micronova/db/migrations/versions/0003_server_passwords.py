"""Passwords that guests post to their metadata service."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the table; the first revision, which is the metadata as it is now, may have made it already."""
    op.create_table(
        "server_passwords",
        sa.Column("instance_uuid", sa.String(36), primary_key=True),
        sa.Column("password", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        if_not_exists=True,
    )
