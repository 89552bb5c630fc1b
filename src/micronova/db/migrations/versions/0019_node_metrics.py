"""What the monitors of a host measured last, for the scheduler."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    """Add the column unless the first revision, which is the metadata as it is now, has made it."""
    if "metrics" not in {column["name"] for column in sa.inspect(op.get_bind()).get_columns("compute_nodes")}:
        op.add_column("compute_nodes", sa.Column("metrics", sa.JSON))
