"""Which secret key each process has, without the key, for `micronova check`."""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"


def upgrade() -> None:
    """Add the column unless the first revision, which is the metadata as it is now, has made it."""
    columns = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("processes")}
    if "secret_key_id" not in columns:
        op.add_column("processes", sa.Column("secret_key_id", sa.String(32)))
