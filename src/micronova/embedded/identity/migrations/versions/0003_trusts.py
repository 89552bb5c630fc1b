"""Trusts."""

from alembic import op

from micronova.embedded.identity.tables import trusts

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the table unless the first revision, which is the metadata as it is now, has made it."""
    trusts.create(op.get_bind(), checkfirst=True)
