"""The use of QoS policies by networks and ports.

A minimum bandwidth is a guarantee that compute claims for a port when a server gets the port. So it does not change
while a port is bound.
"""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.embedded.network import device_owners
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


_BOUND = sa.and_(ports.c.host != "", ~ports.c.device_owner.startswith(device_owners.SERVICE, autoescape=True))
"""The ports of servers that have a host: what these ask of it is claimed."""


def check_policy_change(
    conn: sa.Connection, before: str | None, after: str | None, *, network: str | None = None, port: str | None = None
) -> None:
    """Raise Conflict if bound ports would ask for another bandwidth: compute claims it when it binds a port.

    The lock waits for a rule that is being changed; a transaction that changes one looks for ports after locking the
    policy.
    """
    named = sorted({id for id in (before, after) if id is not None})
    if before == after or not named:
        return
    locked = sa.select(qos_policies.c.id).where(qos_policies.c.id.in_(named)).order_by(qos_policies.c.id)
    conn.execute(locked.with_for_update(read=True))
    rules = sa.select(minimum_bandwidth_rules.c.id).where(minimum_bandwidth_rules.c.policy_id.in_(named))
    if conn.execute(rules.limit(1)).first() is None:
        return
    own = ports.c.id == port
    if network is not None:
        own = sa.and_(ports.c.network_id == network, ports.c.qos_policy_id.is_(None))
    found = conn.execute(sa.select(ports.c.id).where(_BOUND, own).limit(1)).scalar()
    if found is not None:
        raise _is_claimed(found)


def check_rule_change(conn: sa.Connection, policy: str) -> None:
    """Raise Conflict if bound ports have a policy of which a minimum bandwidth is being changed."""
    own = ports.c.qos_policy_id == policy
    of_network = sa.and_(
        ports.c.qos_policy_id.is_(None),
        ports.c.network_id.in_(sa.select(networks.c.id).where(networks.c.qos_policy_id == policy)),
    )
    found = conn.execute(sa.select(ports.c.id).where(_BOUND, own | of_network).limit(1)).scalar()
    if found is not None:
        raise _is_claimed(found)


def _is_claimed(port: str) -> Exception:
    return conflict(
        f"The minimum bandwidth of port {port} cannot change: its server holds what was claimed on the host. Detach "
        "the port first.",
        "QosRuleNotSupported",
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
        if request.allows(qos_policy_target(row, access.get(id, NOBODY).is_shared(caller)), "get_policy")
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
