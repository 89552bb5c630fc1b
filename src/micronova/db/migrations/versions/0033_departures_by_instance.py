"""Departures are found by their server: hosts that are lost leave many behind."""

from alembic import op

revision = "0033"
down_revision = "0032"


def upgrade() -> None:
    """Make the index unless the first revision, which is the metadata as it is now, has made it."""
    op.create_index("departures_by_instance", "departures", ["instance_uuid"], if_not_exists=True)
