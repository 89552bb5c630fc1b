"""Which quality-of-service policy a network or a port may be given, and which it gets by default."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.http.request import Request
from micronova.neighbours.network.collection import chunks
from micronova.neighbours.network.errors import not_found
from micronova.neighbours.network.tables import bandwidth_limit_rules, networks, qos_policies
from micronova.objects.errors import Forbidden


def target(row: Any) -> dict[str, Any]:
    """A policy as access rules see it; what is below it calls it its parent."""
    return {"project_id": row.project_id, "shared": row.shared, "ext_parent:project_id": row.project_id}


def default_policy(conn: sa.Connection, project: str) -> str | None:
    """Return the policy that a project's new networks get."""
    return conn.execute(_DEFAULT, {"project": project}).scalar()


_DEFAULT = sa.select(qos_policies.c.id).where(qos_policies.c.default_of == sa.bindparam("project"))


def check_use(
    conn: sa.Connection, request: Request, given: Mapping[str, Any], before: str | None = None
) -> None:
    """Refuse a policy that the caller may not see, and to take one away that it may not see."""
    if "qos_policy_id" not in given or given["qos_policy_id"] == before:
        return
    named = [id for id in (given["qos_policy_id"], before) if id is not None]
    rows = {row.id: row for row in conn.execute(sa.select(qos_policies).where(qos_policies.c.id.in_(named)))}
    seen = {id for id, row in rows.items() if request.allows("get_policy", target(row))}
    if given["qos_policy_id"] is not None and given["qos_policy_id"] not in seen:
        raise not_found("policy", given["qos_policy_id"])
    if before in rows and before not in seen:
        raise Forbidden(
            f"Failed to remove provided policy {before} because you are not authorized.",
            type="PolicyRemoveAuthorizationError",
        )


def limits_of(conn: sa.Connection, ports: Sequence[Any]) -> dict[str, dict[str, dict[str, int]]]:
    """Return how fast guests' ports may be, by direction: their own policy says so, or else their network's."""
    guests = [row for row in ports if not row.device_owner.startswith("network:")]
    of_network: dict[str, str | None] = {}
    for part in chunks(sorted({row.network_id for row in guests if row.qos_policy_id is None})):
        n = networks.c
        found = conn.execute(sa.select(n.id, n.qos_policy_id).where(n.id.in_(part)))
        of_network |= {row.id: row.qos_policy_id for row in found}
    policy_of = {row.id: row.qos_policy_id or of_network.get(row.network_id) for row in guests}
    limits: dict[str, dict[str, dict[str, int]]] = {}
    for part in chunks(sorted({policy for policy in policy_of.values() if policy is not None})):
        r = bandwidth_limit_rules.c
        for rule in conn.execute(sa.select(bandwidth_limit_rules).where(r.policy_id.in_(part))):
            shown = {"max_kbps": rule.max_kbps, "max_burst_kbps": rule.max_burst_kbps}
            limits.setdefault(rule.policy_id, {})[rule.direction] = shown
    return {id: limits[policy] for id, policy in policy_of.items() if policy in limits}
