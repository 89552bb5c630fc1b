"""Changes that concern hosts, for the processes in which network agents wait; an index of events by their port."""

from alembic import op

from micronova.embedded.network.tables import host_changes, metadata

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Make them unless the first revision, which is the metadata as it is now, has made them."""
    metadata.create_all(op.get_bind(), tables=[host_changes])
    op.create_index("events_by_port", "events", ["tag", "server_id"], if_not_exists=True)
