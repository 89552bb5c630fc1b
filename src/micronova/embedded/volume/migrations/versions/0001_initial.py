"""The first schema.

Until the first release a change of the schema changes it here too, by changing the metadata. From then on, a change
is a new revision that expands first and contracts a release later.
"""

from alembic import op

from micronova.embedded.volume.tables import metadata

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make all tables."""
    metadata.create_all(op.get_bind())
