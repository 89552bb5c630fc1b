"""The first schema: the tables as they are now.

A change since 0.1.0 is a revision of its own, which changes only what this one has not made. It expands first and
contracts a release later.
"""

from alembic import op

from micronova.embedded.image.tables import metadata

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make all tables."""
    metadata.create_all(op.get_bind())
