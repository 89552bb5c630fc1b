"""When a host is known to have been alive: its heartbeats tell of the last reply that it has got."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"


def upgrade() -> None:
    """Make the column unless the first revision, which is the metadata as it is now, has made it."""
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("services")}
    if "alive_at" not in present:
        op.add_column("services", sa.Column("alive_at", sa.BigInteger, nullable=False, server_default="0"))
