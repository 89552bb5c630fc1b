"""The time at which a host was removed, whose messages conductors refuse from then on."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the column unless the first revision, which is the metadata as it is now, has made it."""
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("hosts")}
    if "removed_at" not in present:
        op.add_column("hosts", sa.Column("removed_at", sa.BigInteger))
