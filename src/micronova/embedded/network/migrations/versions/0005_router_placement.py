"""Which host has the routers."""

from alembic import op

from micronova.embedded.network.tables import metadata, router_placement

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Make the table unless the first revision, which is the metadata as it is now, has made it."""
    metadata.create_all(op.get_bind(), tables=[router_placement])
