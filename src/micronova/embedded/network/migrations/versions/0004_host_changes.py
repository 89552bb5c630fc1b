"""Changes that concern hosts, for the processes in which network agents wait for them."""

from alembic import op

from micronova.embedded.network.tables import host_changes, metadata

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Make the table unless the first revision, which is the metadata as it is now, has made it."""
    metadata.create_all(op.get_bind(), tables=[host_changes])
