"""Schedulers find services that operators have changed by an index."""

from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Make it unless the first revision, which is the metadata as it is now, has made it."""
    op.create_index("services_by_updated", "services", ["updated_at"], if_not_exists=True)
