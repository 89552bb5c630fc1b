"""Servers know who created them: their images have it among their properties."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Add the column unless the first revision, which is the metadata as it is now, has made it."""
    for table in ("instances", "deleted_instances"):
        present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)}
        if "system_metadata" not in present:
            op.add_column(table, sa.Column("system_metadata", sa.JSON))
