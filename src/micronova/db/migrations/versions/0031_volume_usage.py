"""What servers have read and written of their volumes, for the notification volume.usage."""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"


def upgrade() -> None:
    """Make the table unless the first revision, which is the metadata as it is now, has made it."""
    if sa.inspect(op.get_bind()).has_table("volume_usages"):
        return
    counters = [
        sa.Column(f"{kind}_{name}", sa.BigInteger, nullable=False)
        for kind in ("current", "earlier")
        for name in ("reads", "read_bytes", "writes", "write_bytes")
    ]
    op.create_table(
        "volume_usages",
        sa.Column("volume_id", sa.String(36), primary_key=True),
        sa.Column("instance_uuid", sa.String(36), primary_key=True),
        *counters,
        sa.Column("refreshed_at", sa.BigInteger, nullable=False),
    )
    op.create_index("volume_usages_by_age", "volume_usages", ["refreshed_at"])
