"""Servers that are soft-deleted: since when, and an index that finds them."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Make them unless the first revision, which is the metadata as it is now, has made them."""
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("instances")}
    if "deleted_at" not in present:
        op.add_column("instances", sa.Column("deleted_at", sa.BigInteger))
    op.create_index(
        "instances_soft_deleted",
        "instances",
        ["deleted_at"],
        sqlite_where=sa.text("deleted_at IS NOT NULL"),
        postgresql_where=sa.text("deleted_at IS NOT NULL"),
        if_not_exists=True,
    )
