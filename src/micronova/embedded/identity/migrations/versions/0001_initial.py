"""The first schema: the metadata itself as of the first release. Later changes are revisions of their own."""

from alembic import op

from micronova.embedded.identity.tables import metadata

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make all tables."""
    metadata.create_all(op.get_bind())
