"""The verbs that bring a host from its present to its desired state: pure functions.

A plan names everything that should exist, in an order in which it can be created, and then removes what should not.
Each verb may be repeated.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from micronova.embedded.network import device_owners
from micronova.embedded.network.agent.desired_state import DesiredState, Limit, Network, Port, Router, Subnet
from micronova.embedded.network.agent.dhcp import advertiser, dhcp_server
from micronova.embedded.network.agent.firewall import Firewall, firewall_of
from micronova.privileged import verbs as v
from micronova.privileged.names import (
    MADE_BY_HELPER,
    METADATA_ADDRESS,
    bridge_name,
    ifb_name,
    inner_name,
    network_namespace,
    outer_name,
    router_namespace,
    tap_name,
    trunk_end_name,
)


@dataclass
class Plan:
    """The verbs for a host, its firewall, and the namespaces that serve metadata."""

    firewall: Firewall
    verbs: list[v.Verb] = field(default_factory=list)
    served: dict[str, str] = field(default_factory=dict)  # namespace that serves metadata -> network


def plan_of(
    prefix: str,
    host: str,
    state: DesiredState,
    found: v.Found,
    domain: str = "",
    *,
    connections: int = 0,
    firewall: Firewall | None = None,
) -> Plan:
    """Return the plan that brings the host to the desired state; `connections` limits those of each port.

    `firewall` is that of an earlier plan for the same state.
    """
    by_id = {port.id: port for port in state.ports}
    networks = {network.id: network for network in state.networks}
    made = Plan(firewall or firewall_of(state, connections))
    made.verbs += [v.EnsureNamespace(namespace=prefix), made.firewall.verb]
    for network in state.networks:
        made.verbs.append(v.EnsureBridge(bridge=bridge_name(network.id), mtu=network.mtu))
        made.verbs += _external_gateway(prefix, network, state.ports)
    below = _subports(host, state.ports)
    for port in state.ports:
        if port.is_guest and not port.parent and port.host == host and tap_name(port.id) in found.outside:
            made.verbs.append(v.AdoptTap(tap=tap_name(port.id), mac=port.mac_address, guest=port.device_id))
        if port.is_guest and port.host == host and tap_name(port.id) in found.links:
            mtu = networks[port.network_id].mtu
            made.verbs.append(v.EnsureTap(tap=tap_name(port.id), bridge=bridge_name(port.network_id), mtu=mtu))
            if port.ingress or port.egress or found.links[tap_name(port.id)].limited:
                made.verbs.append(_bandwidth(port))
            if port.id in below or found.links[tap_name(port.id)].trunk:
                made.verbs.append(_trunk(port, below.get(port.id, ()), networks))
    for port in state.ports:
        if port.device_owner == device_owners.DHCP and port.host == host:
            _add_dhcp_server(made, prefix, networks[port.network_id], port, state, domain)
    for router in state.routers:
        _add_router(made, prefix, networks, router, by_id, domain)
    made.verbs += leftovers(made.verbs, found)
    return made


def _subports(host: str, ports: Iterable[Port]) -> dict[str, list[Port]]:
    """Return the subports of trunks on this host, by parent."""
    found: dict[str, list[Port]] = {}
    for port in ports:
        if port.parent and port.vlan and port.host == host:
            found.setdefault(port.parent, []).append(port)
    return found


def _trunk(parent: Port, below: Iterable[Port], networks: Mapping[str, Network]) -> v.EnsureTrunk:
    """Return the verb that gives a guest its subports; their taps are there afterwards, and wired the next time."""
    return v.EnsureTrunk(
        tap=tap_name(parent.id),
        subports=tuple(
            v.Subport(tap=tap_name(port.id), vlan=port.vlan or 0, mtu=networks[port.network_id].mtu) for port in below
        ),
    )


def _bandwidth(port: Port) -> v.SetBandwidth:
    receive, send = port.ingress or Limit(max_kbps=0), port.egress or Limit(max_kbps=0)
    return v.SetBandwidth(
        tap=tap_name(port.id),
        receive=min(receive.max_kbps, v.MAX_KILOBITS),
        send=min(send.max_kbps, v.MAX_KILOBITS),
        receive_burst=min(receive.max_burst_kbps, v.MAX_KILOBITS),
        send_burst=min(send.max_burst_kbps, v.MAX_KILOBITS),
    )


def _external_gateway(prefix: str, network: Network, ports: Iterable[Port]) -> list[v.Verb]:
    """Return the verb that gives an external network's gateway address to the bridge, unless a port has it."""
    if not network.external:
        return []
    held = {each.ip_address for port in ports if port.network_id == network.id for each in port.fixed_ips}
    addresses = tuple(
        _with_length(subnet.gateway_ip, subnet)
        for subnet in network.subnets
        if subnet.gateway_ip and subnet.gateway_ip not in held
    )
    return [v.SetAddresses(namespace=prefix, device=bridge_name(network.id), addresses=addresses)]


def _with_length(address: str, subnet: Subnet) -> str:
    return f"{address}/{ipaddress.ip_network(subnet.cidr).prefixlen}"


def _addresses(port: Port, network: Network) -> tuple[str, ...]:
    subnets = {subnet.id: subnet for subnet in network.subnets}
    return tuple(
        _with_length(each.ip_address, subnets[each.subnet_id]) for each in port.fixed_ips if each.subnet_id in subnets
    )


def _veth(namespace: str, port: Port, network: Network) -> v.Verb:
    """Return the verb that connects a namespace with the bridge of a network."""
    return v.EnsureVeth(
        outer=outer_name(port.id),
        bridge=bridge_name(network.id),
        namespace=namespace,
        inner=inner_name(port.id),
        mac=port.mac_address,
        mtu=network.mtu,
    )


def _add_dhcp_server(made: Plan, prefix: str, network: Network, port: Port, state: DesiredState, domain: str) -> None:
    namespace = network_namespace(prefix, network.id)
    device = inner_name(port.id)
    addresses = (*_addresses(port, network), f"{METADATA_ADDRESS}/32")
    gateways = {subnet.gateway_ip for subnet in network.subnets if subnet.ip_version == 4} - {None}
    default = [v.Route(destination="0.0.0.0/0", via=min(filter(None, gateways)), device=device)] if gateways else []
    made.verbs += [
        v.EnsureNamespace(namespace=namespace),
        _veth(namespace, port, network),
        v.SetAddresses(namespace=namespace, device=device, addresses=addresses),
        v.SetRoutes(namespace=namespace, routes=tuple(default)),
        dhcp_server(namespace, network, port, state.ports, domain),
    ]
    made.served[namespace] = network.id


def _add_router(
    made: Plan, prefix: str, networks: Mapping[str, Network], router: Router, ports: Mapping[str, Port], domain: str
) -> None:
    if not router.admin_state_up:
        return
    namespace = router_namespace(prefix, router.id)
    made.verbs.append(v.EnsureNamespace(namespace=namespace, forward=True))
    routes: list[v.Route] = []
    joined = [(ports[id], networks[ports[id].network_id]) for id in router.ports if id in ports]
    for port, network in joined:
        made.verbs.append(_veth(namespace, port, network))
        made.verbs.append(
            v.SetAddresses(namespace=namespace, device=inner_name(port.id), addresses=_addresses(port, network))
        )
    gateway = ports.get(router.gateway_port or "")
    source = None
    outside: list[tuple[Port, Network]] = []
    if gateway is not None and gateway.network_id in networks:
        network, device = networks[gateway.network_id], inner_name(gateway.id)
        outside.append((gateway, network))
        own = _addresses(gateway, network)
        made.verbs.append(_veth(namespace, gateway, network))
        floating = tuple(f"{each.floating}/32" for each in router.floating)
        made.verbs.append(v.SetAddresses(namespace=namespace, device=device, addresses=(*own, *floating)))
        reached = {each.subnet_id for each in gateway.fixed_ips}
        for subnet in network.subnets:
            if subnet.id in reached and subnet.gateway_ip:
                everywhere = "0.0.0.0/0" if subnet.ip_version == 4 else "::/0"
                routes.append(v.Route(destination=everywhere, via=subnet.gateway_ip, device=device))
        if router.enable_snat:
            source = next((each.ip_address for each in gateway.fixed_ips if ":" not in each.ip_address), None)
    routes += [v.Route(destination=each.destination, via=each.nexthop) for each in router.routes]
    made.verbs.append(v.SetRoutes(namespace=namespace, routes=tuple(routes)))
    made.verbs.append(
        v.LoadRouter(
            namespace=namespace,
            gateway=inner_name(gateway.id) if gateway is not None else None,
            source=source,
            floating=tuple(v.Floating(floating=each.floating, fixed=each.fixed) for each in router.floating)
            if gateway is not None
            else (),
            scopes=_scopes([*joined, *outside]),
        )
    )
    advertisements = advertiser(namespace, joined, ports.values(), domain)
    if advertisements is not None:
        made.verbs.append(advertisements)


def _scopes(joined: Iterable[tuple[Port, Network]]) -> tuple[v.Scoped, ...]:
    """Return the address scopes of a router's devices as numbers; nothing if none has one."""
    held: dict[str, dict[int, str]] = {}
    for port, network in joined:
        subnets = {subnet.id: subnet for subnet in network.subnets}
        own = [subnets[each.subnet_id] for each in port.fixed_ips if each.subnet_id in subnets]
        held[inner_name(port.id)] = {each.ip_version: each.address_scope for each in own if each.address_scope}
    numbers = {id: n for n, id in enumerate(sorted({id for of in held.values() for id in of.values()}), 1)}
    if not numbers:
        return ()
    return tuple(
        v.Scoped(device=device, four=numbers.get(of.get(4, ""), 0), six=numbers.get(of.get(6, ""), 0))
        for device, of in sorted(held.items())
    )


def leftovers(wanted: Iterable[v.Verb], found: v.Found) -> list[v.Verb]:
    """Return the verbs that remove what should not exist.

    Taps are not removed, because they belong to QEMU; that of a subport goes with the other end of its pair.
    """
    names: set[str] = set()
    for verb in wanted:
        match verb:
            case v.EnsureNamespace():
                names.add(verb.namespace)
            case v.EnsureBridge():
                names.add(verb.bridge)
            case v.EnsureVeth():
                names.add(verb.outer)
            case v.EnsureTrunk():
                names.update(trunk_end_name(each.tap) for each in verb.subports)
            case v.SetBandwidth(send=send) if send:
                names.add(ifb_name(verb.tap))
            case v.StartDnsmasq() | v.StartAdvertiser():
                names.add(f"dnsmasq {verb.namespace}")
            case _:
                pass
    gone: list[v.Verb] = [v.DeleteNamespace(namespace=each) for each in found.namespaces if each not in names]
    gone += [
        v.StopDnsmasq(namespace=each) for each in found.dnsmasq if each in names and f"dnsmasq {each}" not in names
    ]
    # A bridge is removed when no tap is plugged into it any more.
    used = {link.bridge for name, link in found.links.items() if name.startswith("tap")}
    for name in sorted(found.links, key=lambda each: (each.startswith("brq"), each)):
        if name.startswith(MADE_BY_HELPER) and name not in names and name not in used:
            gone.append(v.DeleteLink(device=name))
    return gone
