"""When a host announced its stop: it is not lost for some time."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    """Make the column unless the first revision, which is the metadata as it is now, has made it."""
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("services")}
    if "stopped_at" not in present:
        op.add_column("services", sa.Column("stopped_at", sa.BigInteger))
