"""The outbox of events for compute."""

from alembic import op

from micronova.embedded.volume.tables import events

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make what the first revision, which is the metadata as it is now, has not made."""
    events.create(op.get_bind(), checkfirst=True)
