"""Credentials."""

from alembic import op

from micronova.embedded.identity.tables import credentials

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make the table unless the first revision, which is the metadata as it is now, has made it."""
    credentials.create(op.get_bind(), checkfirst=True)
