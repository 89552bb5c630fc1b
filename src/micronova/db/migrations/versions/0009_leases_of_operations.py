"""How often a conductor has leased an operation: the column has the name of what it counts."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Rename the column unless the first revision, which is the metadata as it is now, has made it."""
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("operations")}
    if "leases" not in present:
        op.execute("ALTER TABLE operations RENAME COLUMN attempts TO leases")
