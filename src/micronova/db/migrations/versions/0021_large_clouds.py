"""Indexes for lists of migrations and for the usage of a project; where a periodic job that goes on continues."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"

INDEXES = (
    ("migrations_by_source", "migrations", ["source_compute", "created_at", "id"]),
    ("migrations_by_destination", "migrations", ["dest_compute", "created_at", "id"]),
    ("migrations_by_user", "migrations", ["user_id", "created_at", "id"]),
    ("migrations_by_updated", "migrations", ["updated_at", "created_at"]),
    ("deleted_instances_by_project_and_time", "deleted_instances", ["project_id", "deleted_at"]),
)


def upgrade() -> None:
    """Make them unless the first revision, which is the metadata as it is now, has made them."""
    for name, table, columns in INDEXES:
        op.create_index(name, table, columns, if_not_exists=True)
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("periodic_jobs")}
    if "place" not in present:
        op.add_column("periodic_jobs", sa.Column("place", sa.String(255)))
