"""An index of the open operations of a server."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"

_OPEN = sa.text("finished_at IS NULL")


def upgrade() -> None:
    """Make it unless the first revision, which is the metadata as it is now, has made it."""
    op.create_index(
        "operations_open_by_instance",
        "operations",
        ["instance_uuid"],
        sqlite_where=_OPEN,
        postgresql_where=_OPEN,
        if_not_exists=True,
    )
