"""Encryption of volume types, and services that are frozen."""

import sqlalchemy as sa
from alembic import op

from micronova.embedded.volume.tables import type_encryptions

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make what the first revision, which is the metadata as it is now, has not made."""
    type_encryptions.create(op.get_bind(), checkfirst=True)
    columns = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("services")}
    if "frozen" not in columns:
        with op.batch_alter_table("services") as table:
            table.add_column(sa.Column("frozen", sa.Boolean, nullable=False, server_default=sa.false()))
        with op.batch_alter_table("services") as table:
            table.alter_column("frozen", server_default=None)
