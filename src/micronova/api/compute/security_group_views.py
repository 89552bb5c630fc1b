"""Security groups and their rules in the form that they had before Neutron."""

from collections.abc import Iterable, Mapping
from typing import Any

from micronova.clients.network.as_user import AsUser

ANYWHERE = {"IPv4": "0.0.0.0/0", "IPv6": "::/0"}
_PORTS = (1, 65535)  # of TCP and UDP, where a rule names none
_ICMP = (-1, -1)

Sources = Mapping[str, dict[str, str]]  # id of a group -> its name and project

RULE = {
    "id": str,
    "parent_group_id": str,
    "ip_protocol": str | None,
    "from_port": int | None,
    "to_port": int | None,
    "group": {"name?": str, "tenant_id?": str},
    "ip_range": {"cidr?": str},
}
GROUP = {"id": str, "name": str, "description": str | None, "tenant_id": str, "rules": [RULE]}


def incoming(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rules for incoming traffic: this API knows no others."""
    return [rule for rule in group["security_group_rules"] if rule["direction"] == "ingress"]


async def sources(network: AsUser, groups: Iterable[Mapping[str, Any]]) -> Sources:
    """Return the groups that rules of some groups name as a source, and these groups themselves."""
    known = list(groups)
    named = {rule["remote_group_id"] for group in known for rule in incoming(group) if rule["remote_group_id"]}
    missing = sorted(named - {group["id"] for group in known})
    if missing:
        known += await network.list_("security_groups", *(("id", id) for id in missing))
    return {group["id"]: {"name": group["name"], "tenant_id": group["project_id"]} for group in known}


def shown(group: Mapping[str, Any], known: Sources) -> dict[str, Any]:
    """Return a group; a rule whose source the user cannot see is left out."""
    rules = [rule for rule in incoming(group) if rule["remote_group_id"] is None or rule["remote_group_id"] in known]
    return {
        "id": group["id"],
        "name": group["name"],
        "description": group["description"],
        "tenant_id": group["project_id"],
        "rules": [shown_rule(rule, known) for rule in rules],
    }


def shown_rule(rule: Mapping[str, Any], known: Sources) -> dict[str, Any]:
    """Return a rule."""
    protocol, source = rule["protocol"], rule["remote_group_id"]
    first, last = rule["port_range_min"], rule["port_range_max"]
    if protocol and first is None and last is None:
        first, last = _PORTS if protocol.lower() in ("tcp", "udp") else _ICMP
    return {
        "id": rule["id"],
        "parent_group_id": rule["security_group_id"],
        "ip_protocol": protocol,
        "from_port": first,
        "to_port": last,
        "group": known[source] if source else {},
        "ip_range": {} if source else {"cidr": rule["remote_ip_prefix"] or ANYWHERE[rule["ethertype"]]},
    }
