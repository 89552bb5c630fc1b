"""RBAC policies: what was shared with all projects, or external, has an entry that says so."""

import uuid
from collections import Counter

import sqlalchemy as sa
from alembic import op

from micronova.embedded.network.tables import metadata, rbac_policies

revision = "0006"
down_revision = "0005"

_OBJECTS = (
    ("network", "networks", "shared", "access_as_shared"),
    ("network", "networks", "external", "access_as_external"),
    ("qos_policy", "qos_policies", "shared", "access_as_shared"),
    ("subnetpool", "subnetpools", "shared", "access_as_shared"),
)


def upgrade() -> None:
    """Make the table, unless the first revision has made it, and the entries, which count against quotas."""
    conn = op.get_bind()
    metadata.create_all(conn, tables=[rbac_policies])
    entries = []
    for object_type, name, column, action in _OBJECTS:
        table = sa.table(name, sa.column("id"), sa.column("project_id"), sa.column(column, sa.Boolean))
        entries += [
            {
                "id": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{action} {row.id}")),
                "project_id": row.project_id,
                "object_type": object_type,
                "object_id": row.id,
                "action": action,
                "target": "*",
            }
            for row in conn.execute(sa.select(table).where(table.c[column]))
        ]
    if not entries:
        return
    conn.execute(rbac_policies.insert(), entries)
    used = Counter(entry["project_id"] for entry in entries if entry["project_id"])
    usages = sa.table("usages", sa.column("project_id"), sa.column("resource"), sa.column("used"))
    for project, count in used.items():
        conn.execute(usages.insert().values(project_id=project, resource="rbac_policy", used=count))
