"""The use of QoS policies by networks and ports.

A minimum bandwidth is a guarantee that compute claims for a port when a server gets the port. So it does not change
while a port is bound.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from micronova.embedded.network.errors import conflict, not_found
from micronova.embedded.network.row_types import PortRow
from micronova.embedded.network.sharing import NOBODY, QOS_POLICY, Use, access_of, uses
from micronova.embedded.network.tables import minimum_bandwidth_rules, networks, ports, qos_policies, subports
from micronova.http.request import Request
from micronova.objects.errors import Forbidden


def qos_policy_target(row: Any, shared: bool = False) -> dict[str, Any]:
    """Return the policy target of a QoS policy; its rules refer to it as parent."""
    return {"project_id": row.project_id, "shared": shared, "ext_parent:project_id": row.project_id}


def default_qos_policy(conn: sa.Connection, project: str) -> str | None:
    """Return the default policy of a project's new networks."""
    return conn.execute(_DEFAULT, {"project": project}).scalar()


_DEFAULT = sa.select(qos_policies.c.id).where(qos_policies.c.default_of == sa.bindparam("project"))


_BOUND = sa.and_(
    ports.c.host != "",
    ports.c.project_id != "",
    ~sa.exists().where(subports.c.port_id == ports.c.id),
)
"""The ports that compute, or whoever binds them, has given a host, where it claims what they ask for.

Nothing of it is for users to change, as the device owner is. The service's own ports belong to no project, and compute
knows no subports.
"""
_LOCK_NETWORKS = (
    sa.select(networks.c.id, networks.c.qos_policy_id)
    .where(networks.c.id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(networks.c.id)
    .with_for_update(read=True, key_share=True)
)
_LOCK_POLICIES = (
    sa.select(qos_policies.c.id)
    .where(qos_policies.c.id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(qos_policies.c.id)
    .with_for_update(read=True)
)


def hold_guarantees(conn: sa.Connection, rows: Iterable[PortRow]) -> dict[str, str | None]:
    """Let nobody change what new bound ports ask for until the transaction ends; return the policies of their networks.

    A transaction that changes the policy of a network, or a rule, locks it and then looks for bound ports. So one that
    comes before is seen here, and one that comes later finds the ports.
    """
    bound = [row for row in rows if row["host"] and row["project_id"]]
    if not bound:
        return {}
    found = _policies_of_networks(conn, {row["network_id"] for row in bound})
    _lock_policies(conn, {row["qos_policy_id"] or found[row["network_id"]] for row in bound})
    return found


def check_port_change(conn: sa.Connection, before: PortRow, after: PortRow) -> None:
    """Raise Conflict if a bound port would ask for another bandwidth: compute claims it when it binds a port.

    Of a port that is being bound, nobody changes what it asks for until the transaction ends, as in `hold_guarantees`.
    """
    if not after["host"] or (before["host"] and before["qos_policy_id"] == after["qos_policy_id"]):
        return
    of_network = _policies_of_networks(conn, {after["network_id"]})[after["network_id"]]
    policies = {before["qos_policy_id"] or of_network, after["qos_policy_id"] or of_network}
    _lock_policies(conn, policies)
    if before["host"]:
        _check_bound(conn, policies, ports.c.id == before["id"])


def check_network_change(conn: sa.Connection, network: str, before: str | None, after: str | None) -> None:
    """Raise Conflict if bound ports of a network, which is locked, would ask for another bandwidth."""
    _lock_policies(conn, {before, after})
    _check_bound(conn, {before, after}, sa.and_(ports.c.network_id == network, ports.c.qos_policy_id.is_(None)))


def _policies_of_networks(conn: sa.Connection, ids: Collection[str]) -> dict[str, str | None]:
    return {row.id: row.qos_policy_id for row in conn.execute(_LOCK_NETWORKS, {"ids": sorted(ids)})}


def _lock_policies(conn: sa.Connection, policies: Collection[str | None]) -> None:
    """Wait for changes of rules under way: a transaction that changes one looks for ports after locking the policy."""
    if named := sorted({id for id in policies if id is not None}):
        conn.execute(_LOCK_POLICIES, {"ids": named}).all()


def _check_bound(conn: sa.Connection, policies: Collection[str | None], own: sa.ColumnElement[bool]) -> None:
    """Raise Conflict if bound ports get one of these policies in place of another one, and one guarantees something."""
    named = sorted({id for id in policies if id is not None})
    if len(policies) < 2 or not named:
        return
    m = minimum_bandwidth_rules.c
    if conn.execute(sa.select(m.id).where(m.policy_id.in_(named), m.min_kbps > 0).limit(1)).first() is None:
        return
    found = conn.execute(sa.select(ports.c.id).where(_BOUND, own).limit(1)).scalar()
    if found is not None:
        raise _is_claimed(found)


def check_rule_change(conn: sa.Connection, policy: str) -> None:
    """Raise Conflict if bound ports have a policy of which a minimum bandwidth is being changed."""
    of_network = ports.c.network_id.in_(sa.select(networks.c.id).where(networks.c.qos_policy_id == policy))
    # Not in one condition: an OR would make PostgreSQL read all ports.
    for own in (ports.c.qos_policy_id == policy, sa.and_(ports.c.qos_policy_id.is_(None), of_network)):
        found = conn.execute(sa.select(ports.c.id).where(_BOUND, own).limit(1)).scalar()
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
