"""The keys of encrypted volumes, and the types of the volumes that backups were made of."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add what the first revision, which is the metadata as it is now, has not made."""
    for name in ("volumes", "snapshots", "backups"):
        wanted: dict[str, sa.types.TypeEngine[Any]] = {
            "encryption_key_id": sa.String(36),
            "sealed_key": sa.LargeBinary(),
        }
        if name == "backups":
            wanted["volume_type_id"] = sa.String(36)
        present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns(name)}
        with op.batch_alter_table(name) as table:
            for column, kind in wanted.items():
                if column not in present:
                    table.add_column(sa.Column(column, kind))
