"""The first schema.

Revision 0001 is the metadata itself as of the first release; until then a change of the schema changes it
here too. From the first release on, a change is a new revision that expands first and contracts a release
later.
"""

from alembic import op

from micronova.embedded.image.tables import metadata

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make all tables."""
    metadata.create_all(op.get_bind())
