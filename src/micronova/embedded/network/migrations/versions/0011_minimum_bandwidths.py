"""QoS rules for a minimum bandwidth."""

from alembic import op

from micronova.embedded.network.tables import metadata, minimum_bandwidth_rules

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Make the table unless the first revision, which is the metadata as it is now, has made it."""
    metadata.create_all(op.get_bind(), tables=[minimum_bandwidth_rules])
