"""What running uploads have reserved of the limits of their projects."""

from alembic import op

from micronova.embedded.image.tables import reservations

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make the table unless the first revision, which is the metadata as it is now, has made it."""
    reservations.create(op.get_bind(), checkfirst=True)
