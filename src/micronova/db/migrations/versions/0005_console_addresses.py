"""The addresses at which console proxies reach the relays of hosts."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the column unless the first revision, which is the metadata as it is now, has made it."""
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("hosts")}
    if "console_address" not in present:
        op.add_column("hosts", sa.Column("console_address", sa.String(300), nullable=False, server_default=""))
