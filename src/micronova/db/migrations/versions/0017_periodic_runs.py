"""The last run of each periodic job: when it began and ended, and why it failed."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Add the columns unless the first revision, which is the metadata as it is now, has made them."""
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("periodic_jobs")}
    for column in (
        sa.Column("began_at", sa.BigInteger),
        sa.Column("ended_at", sa.BigInteger),
        sa.Column("error", sa.Text),
    ):
        if column.name not in present:
            op.add_column("periodic_jobs", column)
