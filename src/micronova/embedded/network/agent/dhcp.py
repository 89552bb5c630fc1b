"""The configuration of DHCP servers and router advertisements: pure functions of the desired state."""

import re
from collections.abc import Iterable

from micronova.embedded.network import device_owners
from micronova.embedded.network.agent.desired_state import DesiredState, ExtraOption, Network, Port, Subnet
from micronova.privileged import verbs as v
from micronova.privileged.names import METADATA_ADDRESS, inner_name

DNS_DOMAIN = "openstacklocal"  # of networks that name none
_HOST_NAME = re.compile(r"\A[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\Z")
_OPTION_NAME = re.compile(r"\A[0-9a-z][0-9a-z-]{0,63}\Z")
_OPTION_VALUE = re.compile(r"\A[A-Za-z0-9 ._:/@+=%-]{0,255}\Z")
_MODES: dict[str, v.Mode] = {"dhcpv6-stateful": "stateful", "dhcpv6-stateless": "stateless", "slaac": "slaac"}


def lacks_dhcp_ports(host: str, state: DesiredState) -> bool:
    """Return whether the port of a DHCP server is missing, has the wrong subnets, or is no longer needed."""
    servers = {p.network_id: p for p in state.ports if p.device_owner == device_owners.DHCP and p.host == host}
    used = {p.network_id for p in state.ports if p.is_guest and p.host == host}
    for network in state.networks:
        served = {subnet.id for subnet in network.subnets if subnet.enable_dhcp} if network.id in used else set()
        server = servers.get(network.id)
        if server is None:
            if served:
                return True
            continue
        held = {each.subnet_id for each in server.fixed_ips}
        own = {subnet.id for subnet in network.subnets if subnet.uses_slaac}  # every port has an address there
        if not served or served - held or held - served - own:
            return True
    return False


def dhcp_server(namespace: str, network: Network, server: Port, ports: Iterable[Port], domain: str) -> v.StartDnsmasq:
    """Return the verb that starts the DHCP server of a network for the guests of this host."""
    own = {each.subnet_id: each.ip_address for each in server.fixed_ips}
    served = {subnet.id: _subnet(subnet, own.get(subnet.id)) for subnet in network.subnets if subnet.enable_dhcp}
    given = {id for id, subnet in served.items() if subnet is not None and subnet.mode == "stateful"}
    guests = [port for port in ports if port.network_id == network.id and port.is_guest]
    return v.StartDnsmasq(
        namespace=namespace,
        device=inner_name(server.id),
        mtu=network.mtu,
        domain=network.dns_domain or domain,
        subnets=tuple(filter(None, served.values())),
        hosts=tuple(_host(port, given) for port in sorted(guests, key=lambda port: port.mac_address)),
    )


def advertiser(
    namespace: str, joined: Iterable[tuple[Port, Network]], ports: Iterable[Port], domain: str
) -> v.StartAdvertiser | None:
    """Return the verb that starts a router's advertisements; None if it has no subnet to advertise."""
    servers = {f.subnet_id: f.ip_address for p in ports if p.device_owner == device_owners.DHCP for f in p.fixed_ips}
    links = []
    for port, network in joined:
        mine = {each.subnet_id for each in port.fixed_ips}
        advertised = tuple(
            v.DhcpSubnet(
                cidr=subnet.cidr,
                dns=subnet.dns_nameservers or tuple(filter(None, [servers.get(subnet.id)])),
                advertise=True,
                mode=_MODES[subnet.ipv6_ra_mode],
            )
            for subnet in network.subnets
            if subnet.ip_version == 6 and subnet.id in mine and subnet.ipv6_ra_mode is not None
        )
        if advertised:
            links.append(v.Advertised(device=inner_name(port.id), mtu=network.mtu, subnets=advertised))
    return v.StartAdvertiser(namespace=namespace, domain=domain, links=tuple(links)) if links else None


def _subnet(subnet: Subnet, own: str | None) -> v.DhcpSubnet | None:
    """Describe a subnet; None if the server has nothing to do with it."""
    if subnet.ip_version == 6:
        return _subnet6(subnet, own)
    routes = [v.DhcpRoute(destination=each.destination, via=each.nexthop) for each in subnet.host_routes]
    if own is not None and all(route.destination != f"{METADATA_ADDRESS}/32" for route in routes):
        routes.append(v.DhcpRoute(destination=f"{METADATA_ADDRESS}/32", via=own))
    return v.DhcpSubnet(
        cidr=subnet.cidr,
        gateway=subnet.gateway_ip,
        dns=subnet.dns_nameservers or tuple(filter(None, [own])),
        routes=tuple(routes),
    )


def _subnet6(subnet: Subnet, own: str | None) -> v.DhcpSubnet | None:
    """Return what is served of an IPv6 subnet; without a router the DHCP server sends the advertisements."""
    mode = subnet.ipv6_address_mode or ("dhcpv6-stateful" if subnet.ipv6_ra_mode is None else None)
    alone = subnet.ipv6_ra_mode is not None and not subnet.routed
    if mode is None or (mode == "slaac" and not alone):
        return None
    dns = subnet.dns_nameservers or tuple(filter(None, [own]))
    return v.DhcpSubnet(cidr=subnet.cidr, dns=dns, advertise=alone, mode=_MODES[mode])


def _host(port: Port, given: set[str]) -> v.DhcpHost:
    # DHCP leases one address per subnet, the first one, which metadata shows, too. The guest sets the others itself.
    leased: dict[str, str] = {}
    for each in port.fixed_ips:
        if each.subnet_id in given:
            leased.setdefault(each.subnet_id, each.ip_address)
    addresses = tuple(leased.values())
    own = tuple(each.ip_address for each in port.fixed_ips if each.ip_address not in addresses)
    name = port.dns_name
    if not _HOST_NAME.match(name):
        first = next((each.ip_address for each in port.fixed_ips), port.mac_address)
        name = "host-" + re.sub(r"[^0-9a-z]+", "-", first.lower()).strip("-")
    options = tuple(filter(None, (_option(each) for each in port.extra_dhcp_opts)))
    return v.DhcpHost(mac=port.mac_address, addresses=addresses, own=own, name=name, options=options)


def _option(given: ExtraOption) -> v.DhcpOption | None:
    """Return an option; None if its name or value cannot be passed to dnsmasq."""
    name, value = given.opt_name.lower().replace("_", "-"), given.opt_value or ""
    if not _OPTION_NAME.match(name) or not _OPTION_VALUE.match(value):
        return None
    return v.DhcpOption(name=name, value=value, version=given.ip_version)
