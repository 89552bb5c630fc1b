"""Indexes for lists of deleted servers, purges and named nodes; the jobs that one conductor does for all."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

INDEXES = (
    ("deleted_instances_by_created", "deleted_instances", ["created_at", "uuid"], None),
    ("deleted_instances_by_updated", "deleted_instances", ["updated_at"], None),
    ("operations_finished", "operations", ["finished_at"], "finished_at IS NOT NULL"),
    ("compute_nodes_by_name", "compute_nodes", ["hypervisor_hostname"], None),
)


def upgrade() -> None:
    """Make them unless the first revision, which is the metadata as it is now, has made them."""
    for name, table, columns, condition in INDEXES:
        where = sa.text(condition) if condition else None
        op.create_index(name, table, columns, if_not_exists=True, sqlite_where=where, postgresql_where=where)
    op.create_table(
        "periodic_jobs",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("next_at", sa.BigInteger, nullable=False),
        if_not_exists=True,
    )
