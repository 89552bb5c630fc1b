"""What the DHCP server of a network tells its guests: a pure function of the desired state."""

import re
from collections.abc import Iterable

from micronova.neighbours.network.agent.state import ExtraOption, Network, Port, Subnet
from micronova.privileged import verbs as v
from micronova.privileged.names import METADATA_ADDRESS, inner_name

_HOST_NAME = re.compile(r"\A[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\Z")
_OPTION_NAME = re.compile(r"\A[0-9a-z][0-9a-z-]{0,63}\Z")
_OPTION_VALUE = re.compile(r"\A[A-Za-z0-9 ._:/@+=%-]{0,255}\Z")


def serve(namespace: str, network: Network, server: Port, ports: Iterable[Port], domain: str) -> v.StartDnsmasq:
    """Describe the server of a network for the guests of this host."""
    served = [subnet for subnet in network.subnets if subnet.enable_dhcp]
    own = {each.subnet_id: each.ip_address for each in server.fixed_ips}
    ids = {subnet.id for subnet in served}
    guests = [port for port in ports if port.network_id == network.id and port.is_guest]
    return v.StartDnsmasq(
        namespace=namespace,
        device=inner_name(server.id),
        mtu=network.mtu,
        domain=network.dns_domain or domain,
        subnets=tuple(_subnet(subnet, own.get(subnet.id)) for subnet in served),
        hosts=tuple(_host(port, ids) for port in sorted(guests, key=lambda port: port.mac_address)),
    )


def _subnet(subnet: Subnet, own: str | None) -> v.DhcpSubnet:
    if subnet.ip_version == 6:
        return v.DhcpSubnet(
            cidr=subnet.cidr,
            dns=subnet.dns_nameservers or tuple(filter(None, [own])),
            advertise=subnet.ipv6_ra_mode is not None,
            stateless=subnet.ipv6_address_mode in ("slaac", "dhcpv6-stateless"),
        )
    routes = [v.DhcpRoute(destination=each.destination, via=each.nexthop) for each in subnet.host_routes]
    if own is not None and all(route.destination != f"{METADATA_ADDRESS}/32" for route in routes):
        routes.append(v.DhcpRoute(destination=f"{METADATA_ADDRESS}/32", via=own))
    return v.DhcpSubnet(
        cidr=subnet.cidr,
        gateway=subnet.gateway_ip,
        dns=subnet.dns_nameservers or tuple(filter(None, [own])),
        routes=tuple(routes),
    )


def _host(port: Port, served: set[str]) -> v.DhcpHost:
    addresses = tuple(each.ip_address for each in port.fixed_ips if each.subnet_id in served)
    name = port.dns_name
    if not _HOST_NAME.match(name):
        first = next((each.ip_address for each in port.fixed_ips), port.mac_address)
        name = "host-" + re.sub(r"[^0-9a-z]+", "-", first.lower()).strip("-")
    options = tuple(filter(None, (_option(each) for each in port.extra_dhcp_opts)))
    return v.DhcpHost(mac=port.mac_address, addresses=addresses, name=name, options=options)


def _option(given: ExtraOption) -> v.DhcpOption | None:
    """Return an option, or None if it is not one that can be told."""
    name, value = given.opt_name.lower().replace("_", "-"), given.opt_value or ""
    if not _OPTION_NAME.match(name) or not _OPTION_VALUE.match(value):
        return None
    return v.DhcpOption(name=name, value=value, version=given.ip_version)
