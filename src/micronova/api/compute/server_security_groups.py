"""The security groups of servers, in the form that they had before Neutron."""

from typing import Any

from micronova.api.compute.server_lookup import authorized_server
from micronova.api.inputs import STRICT, NoQuery
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.servers.security_groups import ServerSecurityGroups

ANYWHERE = {"IPv4": "0.0.0.0/0", "IPv6": "::/0"}
WHOLE = {"icmp": (-1, -1), "ipv6-icmp": (-1, -1), "tcp": (1, 65535), "udp": (1, 65535)}


class SecurityGroupHandlers:
    """The handlers."""

    def __init__(self, database: Database, groups: ServerSecurityGroups) -> None:
        self._database = database
        self._groups = groups

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """List the groups of a server."""
        row = await authorized_server(self._database, request, id)
        found = await self._groups.list_(request.context, row)
        names = {group["id"]: group["name"] for group in found}
        return {"security_groups": [_shown(group, names) for group in found]}


def _shown(group: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    # This API shows only rules for incoming traffic.
    rules = [rule for rule in group["security_group_rules"] if rule["direction"] == "ingress"]
    return {
        "id": group["id"],
        "name": group["name"],
        "description": group["description"],
        "tenant_id": group["project_id"],
        "rules": [_rule(rule, names) for rule in rules],
    }


def _rule(rule: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    protocol, remote = rule["protocol"], rule["remote_group_id"]
    first, last = rule["port_range_min"], rule["port_range_max"]
    if first is None and protocol is not None:
        first, last = WHOLE.get(protocol, (None, None))
    return {
        "id": rule["id"],
        "parent_group_id": rule["security_group_id"],
        "ip_protocol": protocol,
        "from_port": first,
        "to_port": last,
        "group": {"name": names.get(remote, ""), "tenant_id": rule["project_id"]} if remote else {},
        "ip_range": {} if remote else {"cidr": rule["remote_ip_prefix"] or ANYWHERE[rule["ethertype"]]},
    }


def routes(database: Database, groups: ServerSecurityGroups) -> list[Route]:
    """Declare the routes."""
    handlers = SecurityGroupHandlers(database, groups)
    return [
        Route(
            method="GET", path="/servers/{id}/os-security-groups", handler=handlers.index,
            policy="os_compute_api:os-security-groups:list", checks_policy=True, query=NoQuery, strict_query=STRICT,
        )
    ]  # fmt: skip
