"""The use of QoS policies by networks and ports."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.embedded.network.errors import conflict, not_found
from micronova.embedded.network.sharing import NOBODY, QOS_POLICY, Use, access_of, uses
from micronova.embedded.network.tables import minimum_bandwidth_rules, networks, ports, qos_policies
from micronova.http.request import Request
from micronova.objects.errors import Forbidden


def qos_policy_target(row: Any, shared: bool = False) -> dict[str, Any]:
    """Return the policy target of a QoS policy; its rules refer to it as parent."""
    return {"project_id": row.project_id, "shared": shared, "ext_parent:project_id": row.project_id}


def default_qos_policy(conn: sa.Connection, project: str) -> str | None:
    """Return the default policy of a project's new networks."""
    return conn.execute(_DEFAULT, {"project": project}).scalar()


_DEFAULT = sa.select(qos_policies.c.id).where(qos_policies.c.default_of == sa.bindparam("project"))


def check_enforced(conn: sa.Connection, policy_id: str | None, kind: str, id: str) -> None:
    """Raise Conflict if a network or port gets a policy with a minimum bandwidth, which nothing here guarantees.

    The lock waits for a rule that is being added; a transaction that adds one looks for networks and ports after
    locking the policy.
    """
    if policy_id is None:
        return
    conn.execute(sa.select(qos_policies.c.id).where(qos_policies.c.id == policy_id).with_for_update(read=True))
    rules = sa.select(minimum_bandwidth_rules.c.id).where(minimum_bandwidth_rules.c.policy_id == policy_id)
    if conn.execute(rules.limit(1)).first() is not None:
        raise not_enforced(kind, id)


def check_not_in_use(conn: sa.Connection, policy_id: str) -> None:
    """Raise Conflict if a network or port has the policy, to which a minimum bandwidth is being added."""
    for kind, table in (("network", networks), ("port", ports)):
        used = conn.execute(sa.select(table.c.id).where(table.c.qos_policy_id == policy_id).limit(1)).scalar()
        if used is not None:
            raise not_enforced(kind, used)


def not_enforced(kind: str, id: str) -> Exception:
    """Return the error for a minimum bandwidth that would be a promise that nobody keeps."""
    return conflict(
        f"Rule minimum_bandwidth is not supported by {kind} {id}: no host guarantees a bandwidth.",
        "QosRuleNotSupportedByNetwork" if kind == "network" else "QosRuleNotSupported",
    )


def check_use(conn: sa.Connection, request: Request, given: Mapping[str, Any], before: str | None = None) -> list[Use]:
    """Raise an error if the caller sets or removes a policy that it may not see; return what the caller relies on."""
    if "qos_policy_id" not in given or given["qos_policy_id"] == before:
        return []
    named = [id for id in (given["qos_policy_id"], before) if id is not None]
    rows = {row.id: row for row in conn.execute(sa.select(qos_policies).where(qos_policies.c.id.in_(named)))}
    caller = request.context.project_id
    access = access_of(conn, QOS_POLICY, named, [caller])
    seen = {
        id
        for id, row in rows.items()
        if request.allows("get_policy", qos_policy_target(row, access.get(id, NOBODY).is_shared(caller)))
    }
    if given["qos_policy_id"] is not None and given["qos_policy_id"] not in seen:
        raise not_found("policy", given["qos_policy_id"])
    if before in rows and before not in seen:
        raise Forbidden(
            f"Failed to remove provided policy {before} because you are not authorized.",
            type="PolicyRemoveAuthorizationError",
        )
    chosen = rows.get(given["qos_policy_id"])
    if chosen is None:
        return []
    return uses(QOS_POLICY, chosen.id, chosen.project_id, caller, access.get(chosen.id, NOBODY))
