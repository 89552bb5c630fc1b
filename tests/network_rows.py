"""The rows of a large cloud in the network service's tables, for `tests.plans.fill`.

Each project has a network and a default security group, whose ports are on different hosts.
"""

import hashlib
import uuid

from micronova.embedded.network.tables import AGENT_TYPE
from tests.plans import Rows


def id_of(kind: str, number: int) -> str:
    """Return the id of a row."""
    return str(uuid.UUID(hashlib.md5(f"{kind}{number}".encode(), usedforsecurity=False).hexdigest()))


def host_of(number: int) -> str:
    """Return the name of a host."""
    return f"host{number:05}"


def _id(kind: str, number: str = "n") -> str:
    return f"md5('{kind}' || {number})::uuid::text"


def large_cloud(ports: int, projects: int, hosts: int, routers: int = 0) -> Rows:
    """Return the rows of a cloud; `hosts` is a multiple of `ports / projects`."""
    project = f"(n % {projects})"
    per_group = ports // projects
    spread = hosts // per_group  # the ports of a project are that far apart
    place = f"(((n / {projects}) * {spread} + {project} * {spread} / {projects}) % {hosts})"
    time, now = "n * 1000", "1800000000000000"
    nothing = "'[]'"
    owned = {"project_id": f"'p' || {project}", "created_at": time}
    port = {
        **owned, "vif_type": "'bridge'", "vif_details": "'{}'", "profile": "'{}'", "allowed_address_pairs": nothing,
        "extra_dhcp_opts": nothing, "status": "'ACTIVE'", "admin_state_up": "true", "port_security_enabled": "true",
    }  # fmt: skip
    subnet = {
        "cidr": "'10.0.0.0/16'", "ip_version": "4", "gateway_ip": "'10.0.0.1'", "enable_dhcp": "true",
        "allocation_pools": """'[{"start": "10.0.0.2", "end": "10.0.255.254"}]'""", "dns_nameservers": nothing,
        "host_routes": nothing, "service_types": nothing,
    }  # fmt: skip
    floating = 10 * routers
    return (
        (
            "networks", projects,
            {**owned, "id": _id("network"), "network_type": "'vxlan'", "segmentation_id": "n", "mtu": "1450",
             "availability_zone_hints": nothing, "admin_state_up": "true", "port_security_enabled": "true"},
        ),
        (
            "rbac_policies", projects,
            {"id": _id("entry"), "project_id": f"'p' || {project}", "object_type": "'network'",
             "object_id": _id("network"), "action": "'access_as_shared'", "target": "'q' || n"},
        ),
        ("subnets", projects, {**owned, **subnet, "id": _id("subnet"), "network_id": _id("network")}),
        (
            "security_groups", projects,
            {**owned, "id": _id("group"), "default_of": "'p' || n", "stateful": "true", "name": "'default'"},
        ),
        (
            "security_group_rules", 4 * projects,
            {**owned, "id": _id("rule"), "security_group_id": _id("group", project),
             "direction": f"CASE WHEN n / {projects} < 2 THEN 'ingress' ELSE 'egress' END",
             "ethertype": f"CASE WHEN (n / {projects}) % 2 = 0 THEN 'IPv4' ELSE 'IPv6' END",
             "fingerprint": f"'f' || n / {projects}",
             "remote_group_id": f"CASE WHEN n / {projects} < 2 THEN {_id('group', project)} END"},
        ),
        (
            "ports", ports,
            {**port, "id": _id("port"), "network_id": _id("network", project), "mac_address": "'fa:' || n",
             "device_id": _id("device"), "device_owner": "'compute:nova'",
             "host": f"'host' || lpad({place}::text, 5, '0')"},
        ),
        (
            "addresses", ports,
            {"subnet_id": _id("subnet", project), "number": f"lpad(to_hex(167772160 + n / {projects} + 10), 8, '0')",
             "address": f"'10.0.' || (n / {projects} + 10) / 256 || '.' || (n / {projects} + 10) % 256",
             "port_id": _id("port")},
        ),
        ("port_security_groups", ports, {"port_id": _id("port"), "security_group_id": _id("group", project)}),
        (
            "agents", hosts,
            {"id": _id("agent"), "agent_type": f"'{AGENT_TYPE}'", "host": "'host' || lpad(n::text, 5, '0')",
             "configurations": "'{}'", "admin_state_up": "true", "heartbeat_at": now},
        ),
        (
            "ports", routers,
            {**port, "id": _id("joined"), "network_id": _id("network"), "mac_address": "'fb:' || n",
             "device_id": _id("router"), "device_owner": "'network:router_interface'"},
        ),
        (
            "addresses", routers,
            {"subnet_id": _id("subnet"), "number": "'0a000001'", "address": "'10.0.0.1'", "port_id": _id("joined")},
        ),
        (
            "routers", routers,
            {**owned, "id": _id("router"), "routes": nothing, "availability_zone_hints": nothing,
             "admin_state_up": "true"},
        ),
        (
            "router_interfaces", routers,
            {"port_id": _id("joined"), "router_id": _id("router"), "subnet_id": _id("subnet")},
        ),
        (
            "floatingips", floating,
            {**owned, "id": _id("floating"), "floating_network_id": _id("network", "0"),
             "floating_port_id": _id("port"), "floating_ip_address": "'203.0.' || n / 256 || '.' || n % 256",
             "port_id": _id("port"), "fixed_ip_address": "'10.0.0.9'",
             "router_id": _id("router", f"(n % {routers or 1})")},
        ),
        (
            "host_changes", ports // 10,
            {"position": "nextval(pg_get_serial_sequence('host_changes', 'position'))",
             "created_at": f"{now} - ({ports // 10} - n) * 100000", "topics": nothing},
        ),
        ("router_placement", 1, {"name": "'routers'", "host": "'host00000'"}),
    )  # fmt: skip


def trunk_rows(count: int) -> Rows:
    """Return the rows of trunks with a subport each, of the first ports of a cloud."""
    return (
        ("trunks", count, {"id": _id("trunk"), "port_id": _id("port"), "status": "'DOWN'", "admin_state_up": "true"}),
        (
            "subports", count,
            {"port_id": _id("port", f"(n + {count})"), "trunk_id": _id("trunk"), "segmentation_type": "'vlan'",
             "segmentation_id": "7"},
        ),
    )  # fmt: skip
