"""Metadata definitions."""

from alembic import op

from micronova.embedded.image.tables import (
    metadef_associations,
    metadef_items,
    metadef_namespaces,
    metadef_resource_types,
)

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the tables unless the first revision, which is the metadata as it is now, has made them."""
    for table in (metadef_namespaces, metadef_items, metadef_resource_types, metadef_associations):
        table.create(op.get_bind(), checkfirst=True)
