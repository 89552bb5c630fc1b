"""What ports with a guaranteed bandwidth ask of resource providers: the attribute `resource_request`.

Compute claims it on the host of the port's server, and answers with the provider in the port's binding:profile. As in
Neutron, the provider has the bandwidth as NET_BW_EGR_KILOBIT_PER_SEC and NET_BW_IGR_KILOBIT_PER_SEC, and traits that
name the physical network, or tunnels, and the type of the port.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final
from uuid import UUID, uuid5

import sqlalchemy as sa

from micronova.db.listed import one_of
from micronova.embedded.network.row_types import PortOnNetworkRow
from micronova.embedded.network.tables import minimum_bandwidth_rules, networks

_CLASSES: Final = {"egress": "NET_BW_EGR_KILOBIT_PER_SEC", "ingress": "NET_BW_IGR_KILOBIT_PER_SEC"}
_TUNNELS: Final = "CUSTOM_NETWORK_TUNNEL_PROVIDER"
_RULES = sa.select(minimum_bandwidth_rules).where(one_of(minimum_bandwidth_rules.c.policy_id, "policies"))
_PHYSICAL = sa.select(networks.c.id, networks.c.physical_network).where(one_of(networks.c.id, "ids"))


def policy_of(row: PortOnNetworkRow) -> str | None:
    """Return the QoS policy that decides what a port asks for: its own, or that of its network.

    As in Neutron, whoever owns the device: users may change that after compute has read what the port asks for.
    """
    return row.qos_policy_id or row.network_qos_policy


def resource_requests_of(conn: sa.Connection, rows: Iterable[PortOnNetworkRow]) -> dict[str, dict[str, Any]]:
    """Return what ports ask for, by port; those that ask for nothing are left out."""
    policies = {row.id: policy for row in rows if (policy := policy_of(row)) is not None}
    if not policies:
        return {}
    rules: dict[str, list[Any]] = {}
    for rule in conn.execute(_RULES.order_by(minimum_bandwidth_rules.c.id), {"policies": sorted({*policies.values()})}):
        if rule.min_kbps:
            rules.setdefault(rule.policy_id, []).append(rule)
    asking = [row for row in rows if policies.get(row.id) in rules]
    if not asking:
        return {}
    known = conn.execute(_PHYSICAL, {"ids": sorted({row.network_id for row in asking})})
    physical = {network.id: network.physical_network for network in known}
    return {row.id: _request(row, rules[policies[row.id]], physical.get(row.network_id) or "") for row in asking}


def _request(row: PortOnNetworkRow, rules: Sequence[Any], physical_network: str) -> dict[str, Any]:
    # The id changes with the rules, as in Neutron.
    id = str(uuid5(UUID(row.id), ",".join(rule.id for rule in rules)))
    network = f"CUSTOM_PHYSNET_{_trait(physical_network)}" if physical_network else _TUNNELS
    group = {
        "id": id,
        "required": [network, f"CUSTOM_VNIC_TYPE_{_trait(row.vnic_type)}"],
        "resources": {_CLASSES[rule.direction]: rule.min_kbps for rule in rules},
    }
    return {"request_groups": [group], "same_subtree": [id]}


def _trait(name: str) -> str:
    return re.sub("[^A-Z0-9]", "_", name.upper())
