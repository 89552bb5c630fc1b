"""Processes and audits, for `micronova status`."""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"


def upgrade() -> None:
    """Make the tables unless the first revision, which is the metadata as it is now, has made them."""
    op.create_table(
        "processes",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("roles", sa.String(255), nullable=False),
        sa.Column("release", sa.String(64), nullable=False),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("seen_at", sa.BigInteger, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "audits",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("began_at", sa.BigInteger, nullable=False),
        sa.Column("ended_at", sa.BigInteger, nullable=False),
        sa.Column("auditor", sa.String(255), nullable=False),
        sa.Column("findings", sa.JSON, nullable=False),
        if_not_exists=True,
    )
