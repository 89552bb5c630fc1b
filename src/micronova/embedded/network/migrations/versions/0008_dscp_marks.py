"""QoS rules that mark what a port sends."""

from alembic import op

from micronova.embedded.network.tables import dscp_marking_rules, metadata

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Make the table unless the first revision, which is the metadata as it is now, has made it."""
    metadata.create_all(op.get_bind(), tables=[dscp_marking_rules])
