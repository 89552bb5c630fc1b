"""Conversion of the network API's ports to a server's interfaces, and our entry in binding:profile."""

from collections.abc import Iterable, Mapping
from typing import Any

from micronova.clients.network.calls import ALLOCATION, MARK, Network, mark_of
from micronova.objects.network import VIF, FixedIP

_SUBNET_FIELDS = (
    "id",
    "name",
    "cidr",
    "ip_version",
    "gateway_ip",
    "dns_nameservers",
    "host_routes",
    "enable_dhcp",
    "ipv6_address_mode",
    "ipv6_ra_mode",
)


def vif_of(
    port: Mapping[str, Any], network: Network | None, floating: Mapping[str, Iterable[str]] | None = None
) -> VIF:
    """Return a port as an interface; `floating` maps its addresses to their floating IPs."""
    subnets = {subnet["id"]: subnet for subnet in (network.subnets if network else ())}
    used = [subnets[fixed["subnet_id"]] for fixed in port["fixed_ips"] if fixed["subnet_id"] in subnets]
    mark = mark_of(port)
    return VIF(
        port_id=port["id"],
        network_id=port["network_id"],
        network_label=network.name if network else "",
        mac_address=port["mac_address"],
        fixed_ips=tuple(
            FixedIP(
                address=fixed["ip_address"],
                version=6 if ":" in fixed["ip_address"] else 4,
                subnet_id=fixed["subnet_id"],
                floating=tuple((floating or {}).get(fixed["ip_address"], ())),
            )
            for fixed in port["fixed_ips"]
        ),
        vif_type=port.get("binding:vif_type") or "unbound",
        vnic_type=port.get("binding:vnic_type") or "normal",
        status=port["status"],
        mtu=network.mtu if network else None,
        tag=mark.get("tag"),
        preserve_on_delete=not mark.get("created", False),
        details=port.get("binding:vif_details") or {},
        subnets=tuple(
            {name: subnet.get(name) for name in _SUBNET_FIELDS}
            for subnet in {subnet["id"]: subnet for subnet in used}.values()
        ),
    )


def with_mark(
    port: Mapping[str, Any], server: str, created: bool, tag: str | None, operation: str | None = None
) -> dict[str, Any]:
    """Return a port's binding:profile with our entry."""
    mark: dict[str, Any] = {"server": server, "created": created}
    if tag:
        mark["tag"] = tag
    if operation:
        mark["operation"] = operation
    return {**(port.get("binding:profile") or {}), MARK: mark}


def with_changed_mark(port: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a port's binding:profile with changes to our entry."""
    return {**(port.get("binding:profile") or {}), MARK: {**mark_of(port), **changes}}


def without_mark(port: Mapping[str, Any]) -> dict[str, Any]:
    """Return a port's binding:profile without what compute has set there."""
    return {
        name: value for name, value in (port.get("binding:profile") or {}).items() if name not in (MARK, ALLOCATION)
    }


def with_allocation(profile: Mapping[str, Any], allocation: Any) -> dict[str, Any]:
    """Return a binding:profile with the providers that serve the port; None if none does."""
    others = {name: value for name, value in profile.items() if name != ALLOCATION}
    return others if allocation is None else {**others, ALLOCATION: allocation}
