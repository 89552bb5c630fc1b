"""The cells of hosts and nodes are removed: nothing set or read them."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Drop the columns unless the first revision, which is the metadata as it is now, has made none."""
    for table in ("hosts", "compute_nodes"):
        if "cell" in {column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)}:
            op.execute(f"ALTER TABLE {table} DROP COLUMN cell")
