"""Tasks."""

from alembic import op

from micronova.embedded.image.tables import tasks

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Make the table unless the first revision, which is the metadata as it is now, has made it."""
    tasks.create(op.get_bind(), checkfirst=True)
