"""Resource providers, their traits and aggregates, and consumers: what the Placement API shows beside inventories."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"

# The name of a provider is unique; of nodes with one name, those after the first have their uuid in it, too.
_PROVIDERS_OF_NODES = """
    INSERT INTO resource_providers (uuid, name, parent_uuid, root_uuid, generation, created_at, updated_at)
    SELECT uuid,
           CASE WHEN EXISTS (
               SELECT 1 FROM compute_nodes AS other
               WHERE other.hypervisor_hostname = compute_nodes.hypervisor_hostname AND other.uuid < compute_nodes.uuid
           ) THEN hypervisor_hostname || ' (' || uuid || ')' ELSE hypervisor_hostname END,
           NULL, uuid, 0, created_at, created_at
    FROM compute_nodes
    WHERE NOT EXISTS (SELECT 1 FROM resource_providers AS known WHERE known.uuid = compute_nodes.uuid)
"""
_AGGREGATES_OF_NODES = """
    INSERT INTO provider_aggregates (provider_uuid, aggregate_uuid)
    SELECT compute_nodes.uuid, aggregates.uuid
    FROM compute_nodes
    JOIN aggregate_hosts ON aggregate_hosts.host = compute_nodes.host
    JOIN aggregates ON aggregates.id = aggregate_hosts.aggregate_id
    WHERE NOT EXISTS (SELECT 1 FROM provider_aggregates)
"""


def upgrade() -> None:
    """Make the tables and columns, which the first revision may have made, and a provider of each compute node."""
    _make_tables()
    _add_columns()
    if op.get_bind().dialect.name == "postgresql":  # SQLite has no length of text
        for table in ("inventories", "allocations"):
            op.alter_column(table, "resource_class", type_=sa.String(255))
    op.execute(_PROVIDERS_OF_NODES)
    op.execute(_AGGREGATES_OF_NODES)


def _make_tables() -> None:
    time = sa.BigInteger
    op.create_table(
        "resource_providers",
        sa.Column("uuid", sa.String(36), primary_key=True),
        sa.Column("name", sa.String(300), nullable=False, unique=True),
        sa.Column("parent_uuid", sa.String(36)),
        sa.Column("root_uuid", sa.String(36), nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("created_at", time, nullable=False),
        sa.Column("updated_at", time, nullable=False),
        if_not_exists=True,
    )
    for table, column in (("provider_traits", "trait"), ("provider_aggregates", "aggregate_uuid")):
        op.create_table(
            table,
            sa.Column("provider_uuid", sa.String(36), primary_key=True),
            sa.Column(column, sa.String(255 if column == "trait" else 36), primary_key=True),
            if_not_exists=True,
        )
    for table in ("traits", "resource_classes"):
        op.create_table(
            table,
            sa.Column("name", sa.String(255), primary_key=True),
            sa.Column("created_at", time, nullable=False),
            if_not_exists=True,
        )
    op.create_table(
        "consumers",
        sa.Column("uuid", sa.String(36), primary_key=True),
        sa.Column("project_id", sa.String(255), nullable=False),
        sa.Column("user_id", sa.String(255), nullable=False),
        sa.Column("consumer_type", sa.String(255)),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("created_at", time, nullable=False),
        sa.Column("updated_at", time, nullable=False),
        if_not_exists=True,
    )
    for name, table, index_column in (
        ("resource_providers_by_root", "resource_providers", "root_uuid"),
        ("resource_providers_by_parent", "resource_providers", "parent_uuid"),
        ("provider_traits_by_trait", "provider_traits", "trait"),
        ("provider_aggregates_by_aggregate", "provider_aggregates", "aggregate_uuid"),
        ("consumers_by_project", "consumers", "project_id"),
    ):
        op.create_index(name, table, [index_column], if_not_exists=True)


def _add_columns() -> None:
    inspector = sa.inspect(op.get_bind())
    new = {
        "inventories": [
            sa.Column("min_unit", sa.Integer, nullable=False, server_default="1"),
            sa.Column("max_unit", sa.Integer, nullable=False, server_default="2147483647"),
            sa.Column("step_size", sa.Integer, nullable=False, server_default="1"),
        ],
        "compute_nodes": [sa.Column("traits", sa.JSON, nullable=False, server_default="[]")],
    }
    for table, columns in new.items():
        known = {column["name"] for column in inspector.get_columns(table)}
        for column in columns:
            if column.name not in known:
                op.add_column(table, column)
