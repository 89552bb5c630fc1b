"""Nodes have NUMA cells and PCI devices, and instances hold named parts of them."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0022"


def upgrade() -> None:
    """Make them unless the first revision, which is the metadata as it is now, has made them."""
    op.create_table(
        "node_topologies",
        sa.Column("node_uuid", sa.String(36), primary_key=True),
        sa.Column("topology", sa.Text, nullable=False),
        sa.Column("held", sa.Text, nullable=False),
        sa.Column("changed_at", sa.BigInteger, nullable=False),
        if_not_exists=True,
    )
    op.create_index("node_topologies_by_change", "node_topologies", ["changed_at"], if_not_exists=True)
    op.create_table(
        "topology_claims",
        sa.Column("consumer_uuid", sa.String(36), primary_key=True),
        sa.Column("node_uuid", sa.String(36), nullable=False),
        sa.Column("assignment", sa.Text, nullable=False),
        if_not_exists=True,
    )
    op.create_index("topology_claims_by_node", "topology_claims", ["node_uuid"], if_not_exists=True)
