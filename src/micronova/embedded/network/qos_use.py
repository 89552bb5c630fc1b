"""The use of QoS policies by networks and ports."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.embedded.network.errors import not_found
from micronova.embedded.network.tables import qos_policies
from micronova.http.request import Request
from micronova.objects.errors import Forbidden


def policy_target(row: Any) -> dict[str, Any]:
    """Return the policy target of a QoS policy; its rules refer to it as parent."""
    return {"project_id": row.project_id, "shared": row.shared, "ext_parent:project_id": row.project_id}


def default_policy(conn: sa.Connection, project: str) -> str | None:
    """Return the default policy of a project's new networks."""
    return conn.execute(_DEFAULT, {"project": project}).scalar()


_DEFAULT = sa.select(qos_policies.c.id).where(qos_policies.c.default_of == sa.bindparam("project"))


def check_use(conn: sa.Connection, request: Request, given: Mapping[str, Any], before: str | None = None) -> None:
    """Raise an error if the caller sets or removes a policy that it may not see."""
    if "qos_policy_id" not in given or given["qos_policy_id"] == before:
        return
    named = [id for id in (given["qos_policy_id"], before) if id is not None]
    rows = {row.id: row for row in conn.execute(sa.select(qos_policies).where(qos_policies.c.id.in_(named)))}
    seen = {id for id, row in rows.items() if request.allows("get_policy", policy_target(row))}
    if given["qos_policy_id"] is not None and given["qos_policy_id"] not in seen:
        raise not_found("policy", given["qos_policy_id"])
    if before in rows and before not in seen:
        raise Forbidden(
            f"Failed to remove provided policy {before} because you are not authorized.",
            type="PolicyRemoveAuthorizationError",
        )
