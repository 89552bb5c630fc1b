"""Address scopes, and which subnet pools are in one."""

import sqlalchemy as sa
from alembic import op

from micronova.embedded.network.tables import address_scopes, metadata

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add what is missing: the first revision is made from the metadata as it is now."""
    conn = op.get_bind()
    metadata.create_all(conn, tables=[address_scopes])
    if "address_scope_id" not in {column["name"] for column in sa.inspect(conn).get_columns("subnetpools")}:
        # As text: SQLite takes a reference only together with its column, and Alembic would add it afterwards.
        op.execute("ALTER TABLE subnetpools ADD COLUMN address_scope_id VARCHAR(36) REFERENCES address_scopes (id)")
        op.create_index("ix_subnetpools_address_scope_id", "subnetpools", ["address_scope_id"])
