"""The index by which a volume is found by an item of its metadata."""

from alembic import op

from micronova.embedded.volume.tables import volume_metadata

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Make what the first revision, which is the metadata as it is now, has not made."""
    [index] = volume_metadata.indexes
    index.create(op.get_bind(), checkfirst=True)
