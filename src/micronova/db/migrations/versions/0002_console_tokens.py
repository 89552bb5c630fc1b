"""Tokens of consoles."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make the table; the first revision, which is the metadata as it is now, may have made it already."""
    op.create_table(
        "console_tokens",
        sa.Column("token_digest", sa.String(64), primary_key=True),
        sa.Column("instance_uuid", sa.String(36), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("protocol", sa.String(16), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        if_not_exists=True,
    )
    op.create_index("console_tokens_by_instance", "console_tokens", ["instance_uuid"], if_not_exists=True)
    op.create_index("console_tokens_by_expiry", "console_tokens", ["expires_at"], if_not_exists=True)
