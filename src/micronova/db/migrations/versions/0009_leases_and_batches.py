"""Columns of operations have the names of what they hold: the number of leases, and the batch of one request."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Rename the columns unless the first revision, which is the metadata as it is now, has made them."""
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("operations")}
    for old, new in (("attempts", "leases"), ("group_id", "batch_id")):
        if old in present:
            op.execute(f"ALTER TABLE operations RENAME COLUMN {old} TO {new}")
