"""The connections that os-initialize_connection has made."""

from alembic import op

from micronova.embedded.volume.tables import volume_connections

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Make what the first revision, which is the metadata as it is now, has not made."""
    volume_connections.create(op.get_bind(), checkfirst=True)
