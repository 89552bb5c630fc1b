"""Trusts without a project."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Let the project be null, unless the first revision, which is the metadata as it is now, has done it."""
    [column] = [each for each in sa.inspect(op.get_bind()).get_columns("trusts") if each["name"] == "project_id"]
    if not column["nullable"]:
        with op.batch_alter_table("trusts") as batch:
            batch.alter_column("project_id", existing_type=sa.String(64), nullable=True)
