"""Trunks and their subports."""

from alembic import op

from micronova.embedded.network.tables import metadata, subports, trunks

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Make the tables unless the first revision, which is the metadata as it is now, has made them."""
    metadata.create_all(op.get_bind(), tables=[trunks, subports])
