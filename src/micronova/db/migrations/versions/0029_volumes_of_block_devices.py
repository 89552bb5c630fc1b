"""Block devices name their volumes in a column: lists of servers show volumes, and not all disks."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"


def upgrade() -> None:
    """Add the column unless the first revision has made it; no block device of earlier versions is a volume."""
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("block_devices")}
    if "volume_id" in present:
        return
    op.add_column("block_devices", sa.Column("volume_id", sa.String(36), nullable=True))
    op.create_index("block_devices_by_volume", "block_devices", ["volume_id"])
