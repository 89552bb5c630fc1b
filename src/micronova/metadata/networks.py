"""network_data.json: a guest's links, the networks on them, and name servers."""

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any, Final

from micronova.objects.network import VIF, tap_name

# Guests reject a link of an unknown type, so all other types are shown as physical.
_KNOWN_TYPES: Final = frozenset({"bridge", "dvs", "hw_veb", "hyperv", "ovs", "tap", "vhostuser", "vif"})


def network_data(vifs: Iterable[VIF]) -> dict[str, Any]:
    """Return the content of network_data.json."""
    links: list[dict[str, Any]] = []
    networks: list[dict[str, Any]] = []
    services: list[dict[str, Any]] = []
    for vif in vifs:
        link = tap_name(vif.port_id)
        links.append(
            {
                "id": link,
                "vif_id": vif.port_id,
                "type": vif.vif_type if vif.vif_type in _KNOWN_TYPES else "phy",
                "mtu": vif.mtu,
                "ethernet_mac_address": vif.mac_address,
            }
        )
        for subnet in vif.subnets:
            network = _network(vif, subnet, link, f"network{len(networks)}")
            networks.append(network)
            services += [service for service in network["services"] if service not in services]
    return {"links": links, "networks": networks, "services": services}


def _network(vif: VIF, subnet: Mapping[str, Any], link: str, name: str) -> dict[str, Any]:
    version = int(subnet.get("ip_version") or 4)
    cidr = ipaddress.ip_network(str(subnet["cidr"]), strict=False)
    address = next((fixed.address for fixed in vif.fixed_ips if fixed.subnet_id == subnet["id"]), None)
    name_servers = [{"type": "dns", "address": server} for server in subnet.get("dns_nameservers") or ()]
    found: dict[str, Any] = {
        "id": name,
        "link": link,
        "network_id": vif.network_id,
        "type": _kind(subnet, version),
        "services": name_servers,
    }
    if found["type"].endswith("_dhcp"):
        return found
    routes = []
    if subnet.get("gateway_ip"):
        everything = ("0.0.0.0", "0.0.0.0") if version == 4 else ("::", "::")  # noqa: S104
        routes.append({"network": everything[0], "netmask": everything[1], "gateway": subnet["gateway_ip"]})
    for route in subnet.get("host_routes") or ():
        target = ipaddress.ip_network(str(route["destination"]), strict=False)
        routes.append(
            {"network": str(target.network_address), "netmask": str(target.netmask), "gateway": route["nexthop"]}
        )
    return found | {"ip_address": address, "netmask": str(cidr.netmask), "routes": routes}


def _kind(subnet: Mapping[str, Any], version: int) -> str:
    if version == 4:
        return "ipv4_dhcp" if subnet.get("enable_dhcp") else "ipv4"
    mode = subnet.get("ipv6_address_mode")
    if mode:
        return f"ipv6_{mode}"
    return "ipv6_dhcp" if subnet.get("enable_dhcp") else "ipv6"
