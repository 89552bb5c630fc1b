"""Quality of service: policies, their bandwidth limits, and which networks and ports have one.

A database that was made by revision 0001 of this version has all of it already: that is made from the metadata.
"""

import sqlalchemy as sa
from alembic import op

from micronova.embedded.network.tables import bandwidth_limit_rules, metadata, qos_policies

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add what is missing."""
    conn = op.get_bind()
    metadata.create_all(conn, tables=[qos_policies, bandwidth_limit_rules])
    for table in ("networks", "ports"):
        if "qos_policy_id" not in {column["name"] for column in sa.inspect(conn).get_columns(table)}:
            # As text: SQLite takes a reference only together with its column, and Alembic would add it afterwards.
            op.execute(f"ALTER TABLE {table} ADD COLUMN qos_policy_id VARCHAR(36) REFERENCES qos_policies (id)")
            op.create_index(f"ix_{table}_qos_policy_id", table, ["qos_policy_id"])
