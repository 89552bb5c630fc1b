"""Moves of servers between hosts and sizes."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Make the table; the first revision, which is the metadata as it is now, may have made it already."""
    op.create_table(
        "migrations",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("uuid", sa.String(36), nullable=False, unique=True),
        sa.Column("instance_uuid", sa.String(36), nullable=False),
        sa.Column("migration_type", sa.String(16), nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("source_compute", sa.String(255), nullable=False),
        sa.Column("source_node", sa.String(255)),
        sa.Column("source_node_uuid", sa.String(36)),
        sa.Column("source_zone", sa.String(255)),
        sa.Column("dest_compute", sa.String(255)),
        sa.Column("dest_node", sa.String(255)),
        sa.Column("dest_host", sa.String(255)),
        sa.Column("old_flavor", sa.JSON, nullable=False),
        sa.Column("new_flavor", sa.JSON, nullable=False),
        sa.Column("old_vm_state", sa.String(32), nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger),
        if_not_exists=True,
    )
    for name, columns in (
        ("migrations_by_instance", ["instance_uuid"]),
        ("migrations_by_status", ["status", "updated_at"]),
        ("migrations_by_created", ["created_at", "id"]),
        ("migrations_by_project", ["project_id", "created_at", "id"]),
    ):
        op.create_index(name, "migrations", columns, if_not_exists=True)
