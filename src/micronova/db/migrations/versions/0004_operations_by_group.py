"""Drop an index that no query uses."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Drop the index if the first revision made it."""
    op.drop_index("operations_by_group", "operations", if_exists=True)
