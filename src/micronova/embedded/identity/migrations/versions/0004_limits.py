"""Registered limits and limits."""

from alembic import op

from micronova.embedded.identity.tables import limits, registered_limits

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Make the tables unless the first revision, which is the metadata as it is now, has made them."""
    registered_limits.create(op.get_bind(), checkfirst=True)
    limits.create(op.get_bind(), checkfirst=True)
