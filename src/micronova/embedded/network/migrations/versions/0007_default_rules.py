"""The rules that new security groups get; the service creates the first ones when it starts."""

from alembic import op

from micronova.embedded.network.tables import default_security_group_rules, metadata

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Make the table unless the first revision, which is the metadata as it is now, has made it."""
    metadata.create_all(op.get_bind(), tables=[default_security_group_rules])
