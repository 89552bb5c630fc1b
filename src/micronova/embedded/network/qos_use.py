"""The use of QoS policies by networks and ports."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common.chunks import chunks
from micronova.embedded.network import device_owners
from micronova.embedded.network.errors import not_found
from micronova.embedded.network.tables import bandwidth_limit_rules, networks, qos_policies
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


def policies_of(conn: sa.Connection, ports: Sequence[Any]) -> dict[str, str]:
    """Return the policies of guests' ports: that of the port, or else that of its network."""
    guests = [row for row in ports if not device_owners.is_service(row.device_owner)]
    of_network: dict[str, str | None] = {}
    for part in chunks(sorted({row.network_id for row in guests if row.qos_policy_id is None})):
        n = networks.c
        found = conn.execute(sa.select(n.id, n.qos_policy_id).where(n.id.in_(part)))
        of_network |= {row.id: row.qos_policy_id for row in found}
    policies = {row.id: row.qos_policy_id or of_network.get(row.network_id) for row in guests}
    return {id: policy for id, policy in policies.items() if policy is not None}


def limits_of(conn: sa.Connection, policy_of: Mapping[str, str]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the bandwidth limits of ports by direction, from their policies."""
    limits: dict[str, dict[str, dict[str, int]]] = {}
    for part in chunks(sorted(set(policy_of.values()))):
        r = bandwidth_limit_rules.c
        for rule in conn.execute(sa.select(bandwidth_limit_rules).where(r.policy_id.in_(part))):
            shown = {"max_kbps": rule.max_kbps, "max_burst_kbps": rule.max_burst_kbps}
            limits.setdefault(rule.policy_id, {})[rule.direction] = shown
    return {id: limits[policy] for id, policy in policy_of.items() if policy in limits}
