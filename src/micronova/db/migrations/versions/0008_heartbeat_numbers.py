"""The number of the newest heartbeat of a host: an older one that arrives later is refused."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the column unless the first revision, which is the metadata as it is now, has made it."""
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("services")}
    if "heartbeat_number" not in present:
        op.add_column("services", sa.Column("heartbeat_number", sa.BigInteger, nullable=False, server_default="0"))
