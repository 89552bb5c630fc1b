"""Trusts that are made from other trusts."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the columns and their index, unless the first revision, which is the metadata as it is now, has made them."""
    if "redelegation_count" not in {column["name"] for column in sa.inspect(op.get_bind()).get_columns("trusts")}:
        op.add_column("trusts", sa.Column("redelegation_count", sa.Integer, nullable=False, server_default="0"))
        op.add_column("trusts", sa.Column("redelegated_trust_id", sa.String(64)))
        op.create_index("trusts_by_origin", "trusts", ["redelegated_trust_id"])
