"""From what a host should be like to what is to be done: nothing here touches a kernel."""

from typing import Any, TypeVar

import msgspec
import pytest

from micronova.embedded.network.agent.desired_state import (
    AddressPair,
    DesiredState,
    FixedIP,
    FloatingIP,
    Limit,
    Network,
    Port,
    Router,
    Rule,
    Subnet,
)
from micronova.embedded.network.agent.plan import plan_of
from micronova.privileged import verbs as v
from micronova.privileged.checks import check

PREFIX = "mn-1a2b3c4d"
NET, EXT = "aaaaaaaa-0000-4000-8000-000000000001", "bbbbbbbb-0000-4000-8000-000000000001"
SUB, OUT = "cccccccc-0000-4000-8000-000000000001", "dddddddd-0000-4000-8000-000000000001"
GUEST, DHCP = "11111111-0000-4000-8000-000000000001", "22222222-0000-4000-8000-000000000001"
INSIDE, GATE = "33333333-0000-4000-8000-000000000001", "44444444-0000-4000-8000-000000000001"
GROUP, ROUTER = "55555555-0000-4000-8000-000000000001", "66666666-0000-4000-8000-000000000001"

NETWORK = Network(id=NET, mtu=1450, subnets=(Subnet(id=SUB, cidr="10.0.0.0/24", gateway_ip="10.0.0.1"),))
OUTSIDE = Network(
    id=EXT, external=True,
    subnets=(Subnet(id=OUT, cidr="203.0.113.0/24", gateway_ip="203.0.113.1", enable_dhcp=False),),
)  # fmt: skip


def port(id: str, network: str, address: str, subnet: str, mac: int, **more: Any) -> Port:
    return Port(
        id=id, network_id=network, mac_address=f"fa:16:3e:00:00:{mac:02x}", host="h",
        fixed_ips=(FixedIP(subnet_id=subnet, ip_address=address),), **more,
    )  # fmt: skip


STATE = DesiredState(
    networks=(NETWORK, OUTSIDE),
    ports=(
        port(GUEST, NET, "10.0.0.5", SUB, 1, device_owner="compute:nova", security_groups=(GROUP,), dns_name="web"),
        port(DHCP, NET, "10.0.0.2", SUB, 2, device_owner="network:dhcp"),
        port(INSIDE, NET, "10.0.0.1", SUB, 3, device_owner="network:router_interface"),
        port(GATE, EXT, "203.0.113.7", OUT, 4, device_owner="network:router_gateway"),
    ),
    rules={GROUP: (Rule(direction="egress", ethertype="IPv4"),
                   Rule(direction="ingress", ethertype="IPv4", remote_group_id=GROUP))},
    members={GROUP: ("10.0.0.5",)},
    routers=(Router(id=ROUTER, gateway_port=GATE, ports=(INSIDE,),
                    floating=(FloatingIP(floating="203.0.113.9", fixed="10.0.0.5"),)),),
)  # fmt: skip


T = TypeVar("T")


def of(kind: type[T], verbs: list[v.Verb]) -> list[T]:
    return [verb for verb in verbs if isinstance(verb, kind)]


def test_every_verb_of_a_plan_is_one_that_the_helper_takes() -> None:
    for verb in plan_of(PREFIX, "h", STATE, v.Found()).verbs:
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(verb), type=v.AnyVerb)
        assert again == verb
        check(verb, PREFIX)


def test_a_network_gets_a_bridge_and_a_server() -> None:
    made = plan_of(PREFIX, "h", STATE, v.Found(), "example.org")
    assert {b.bridge: b.mtu for b in of(v.EnsureBridge, made.verbs)} == {"brqaaaaaaaa-00": 1450, "brqbbbbbbbb-00": 1500}
    [server] = of(v.StartDnsmasq, made.verbs)
    assert server.namespace == f"{PREFIX}-n-aaaaaaaa-00"
    assert [(h.mac, h.addresses, h.name) for h in server.hosts] == [("fa:16:3e:00:00:01", ("10.0.0.5",), "web")]
    assert server.subnets[0].routes == (v.DhcpRoute(destination="169.254.169.254/32", via="10.0.0.2"),)
    assert made.served == {f"{PREFIX}-n-aaaaaaaa-00": NET}


def test_of_two_addresses_on_one_subnet_the_first_is_leased() -> None:
    more = (FixedIP(subnet_id=SUB, ip_address="10.0.0.5"), FixedIP(subnet_id=SUB, ip_address="10.0.0.30"))
    ports = (msgspec.structs.replace(STATE.ports[0], fixed_ips=more), *STATE.ports[1:])
    made = plan_of(PREFIX, "h", msgspec.structs.replace(STATE, ports=ports), v.Found())
    [server] = of(v.StartDnsmasq, made.verbs)
    assert [(h.addresses, h.own) for h in server.hosts] == [(("10.0.0.5",), ("10.0.0.30",))]


def test_a_router_translates_for_its_networks() -> None:
    made = plan_of(PREFIX, "h", STATE, v.Found()).verbs
    [router] = of(v.LoadRouter, made)
    assert (router.source, router.gateway) == ("203.0.113.7", "dev44444444-00")
    assert router.floating == (v.Floating(floating="203.0.113.9", fixed="10.0.0.5"),)
    addresses = {(a.namespace, a.device): a.addresses for a in of(v.SetAddresses, made)}
    assert addresses[f"{PREFIX}-r-66666666-00", "dev44444444-00"] == ("203.0.113.7/24", "203.0.113.9/32")
    assert addresses[PREFIX, "brqbbbbbbbb-00"] == ("203.0.113.1/24",), "the world beyond is the namespace of bridges"
    off = msgspec.structs.replace(STATE, routers=(msgspec.structs.replace(STATE.routers[0], admin_state_up=False),))
    assert of(v.LoadRouter, plan_of(PREFIX, "h", off, v.Found()).verbs) == []


def test_a_port_with_port_security_may_send_only_from_what_is_its_own() -> None:
    pairs = (AddressPair(ip_address="10.9.0.0/16"), AddressPair(ip_address="10.0.0.9", mac_address="fa:16:3e:00:00:99"))
    guest = msgspec.structs.replace(STATE.ports[0], allowed_address_pairs=pairs)
    state = msgspec.structs.replace(STATE, ports=(guest,), routers=())
    [firewall] = of(v.LoadFirewall, plan_of(PREFIX, "h", state, v.Found()).verbs)
    [filtered] = firewall.filtered
    assert {(p.mac[-2:], p.prefix) for p in filtered.pairs} == {
        ("01", "10.0.0.5/32"), ("01", "10.9.0.0/16"), ("99", "10.0.0.9/32"),
        ("01", "fe80::f816:3eff:fe00:1/128"), ("99", "fe80::f816:3eff:fe00:99/128"),
    }  # fmt: skip
    assert firewall.groups == (v.Group(id=GROUP, addresses=("10.0.0.5/32",)),)


def test_port_security_and_admin_state() -> None:
    def firewall(**changes: object) -> v.LoadFirewall:
        guest = msgspec.structs.replace(STATE.ports[0], **changes)
        [found] = of(
            v.LoadFirewall, plan_of(PREFIX, "h", DesiredState(networks=(NETWORK,), ports=(guest,)), v.Found()).verbs
        )
        return found

    open_ = firewall(port_security_enabled=False)
    assert (open_.filtered, [each.device for each in open_.unfiltered]) == ((), ["tap11111111-00"])
    down = firewall(admin_state_up=False)
    assert [(each.pairs, each.rules) for each in down.filtered] == [((), ())], "nothing passes"


def test_what_is_there_and_should_not_be_goes_but_a_bridge_in_use_stays() -> None:
    found = v.Found(
        namespaces=(PREFIX, f"{PREFIX}-n-99999999-99", f"{PREFIX}-r-99999999-99"),
        dnsmasq={f"{PREFIX}-n-99999999-99": 1234},
        links={
            "brq99999999-99": v.Link(index=1), "vth99999999-99": v.Link(index=2, bridge="brq99999999-99"),
            "brq88888888-88": v.Link(index=3), "tap88888888-88": v.Link(index=4, bridge="brq88888888-88"),
        },
    )  # fmt: skip
    made = plan_of(PREFIX, "h", DesiredState(), found).verbs
    assert [n.namespace for n in of(v.DeleteNamespace, made)] == [
        f"{PREFIX}-n-99999999-99", f"{PREFIX}-r-99999999-99"
    ]  # fmt: skip
    assert [d.device for d in of(v.DeleteLink, made)] == ["vth99999999-99", "brq99999999-99"]


def six(mode: str | None, address_mode: str | None, *, routed: bool) -> DesiredState:
    """Return a state with one IPv6 subnet, a guest and a server on it, and a router if it is routed."""
    subnet = Subnet(
        id=SUB, cidr="fd00::/64", ip_version=6, gateway_ip="fd00::1", ipv6_ra_mode=mode,
        ipv6_address_mode=address_mode, routed=routed, dns_nameservers=("fd00:53::1",),
    )  # fmt: skip
    ports = (
        port(GUEST, NET, "fd00::5", SUB, 1, device_owner="compute:nova"),
        port(DHCP, NET, "fd00::2", SUB, 2, device_owner="network:dhcp"),
        port(INSIDE, NET, "fd00::1", SUB, 3, device_owner="network:router_interface"),
    )
    routers = (Router(id=ROUTER, ports=(INSIDE,)),) if routed else ()
    return DesiredState(networks=(Network(id=NET, mtu=1450, subnets=(subnet,)),), ports=ports, routers=routers)


@pytest.mark.parametrize(
    ("mode", "address_mode", "routed", "served", "announced"),
    [
        ("slaac", "slaac", True, None, "slaac"),
        ("slaac", "slaac", False, ("slaac", True), None),
        ("dhcpv6-stateless", "dhcpv6-stateless", True, ("stateless", False), "stateless"),
        ("dhcpv6-stateless", "dhcpv6-stateless", False, ("stateless", True), None),
        ("dhcpv6-stateful", "dhcpv6-stateful", True, ("stateful", False), "stateful"),
        ("dhcpv6-stateful", "dhcpv6-stateful", False, ("stateful", True), None),
        (None, "dhcpv6-stateful", True, ("stateful", False), None),
        (None, "slaac", True, None, None),
        ("slaac", None, True, None, "slaac"),
        (None, None, True, ("stateful", False), None),
    ],
)
def test_who_tells_guests_what_in_ipv6(
    mode: str | None, address_mode: str | None, routed: bool, served: tuple[str, bool] | None, announced: str | None
) -> None:
    made = plan_of(PREFIX, "h", six(mode, address_mode, routed=routed), v.Found(), "example.org").verbs
    for verb in made:
        check(verb, PREFIX)
    [server] = of(v.StartDnsmasq, made)
    assert [(each.mode, each.advertise) for each in server.subnets] == ([served] if served else [])
    given = served is not None and served[0] == "stateful"
    [host] = server.hosts
    assert (host.addresses, host.own) == ((("fd00::5",), ()) if given else ((), ("fd00::5",)))
    told = [(link.device, link.mtu, each.mode) for a in of(v.StartAdvertiser, made) for link in a.links
            for each in link.subnets]  # fmt: skip
    assert told == ([("dev33333333-00", 1450, announced)] if announced else [])


def test_a_trunk_goes_with_its_tap_and_its_subports() -> None:
    parent = STATE.ports[0]
    subport = msgspec.structs.replace(
        parent, id="22222222-0000-4000-8000-000000000000", device_id="", device_owner="trunk:subport", parent=parent.id,
        vlan=7,
    )  # fmt: skip
    tap, below, end = "tap11111111-00", "tap22222222-00", "vlp22222222-00"

    def verbs(*ports: Port, **links: v.Link) -> list[v.Verb]:
        found = v.Found(links={name.replace("_", "-"): link for name, link in links.items()})
        made = plan_of(PREFIX, parent.host, DesiredState(networks=(NETWORK,), ports=ports), found).verbs
        return [each for each in made if isinstance(each, v.EnsureTrunk | v.DeleteLink)]

    there = {"tap11111111_00": v.Link(index=1)}
    known = {"tap11111111_00": v.Link(index=1, trunk=True), end.replace("-", "_"): v.Link(index=2)}
    trunk = v.EnsureTrunk(tap=tap, subports=(v.Subport(tap=below, vlan=7, mtu=NETWORK.mtu),))
    assert verbs(parent, subport) == []
    assert verbs(parent, **there) == []
    assert verbs(parent, subport, **there) == [trunk]
    assert verbs(parent, subport, **known) == [trunk]
    assert verbs(parent, **known) == [v.EnsureTrunk(tap=tap), v.DeleteLink(device=end)]
    assert verbs(parent, subport, vlp22222222_00=v.Link(index=2)) == [v.DeleteLink(device=end)], "its tap is gone"
    elsewhere = msgspec.structs.replace(subport, host="elsewhere")
    assert verbs(parent, elsewhere, **there) == []


def test_limits_go_to_taps_that_are_there_and_leave_nothing_behind() -> None:
    limited = msgspec.structs.replace(STATE.ports[0], egress=Limit(max_kbps=2**31 - 1, max_burst_kbps=7))
    tap, detour = "tap11111111-00", "ifb11111111-00"

    def verbs(guest: Port, **links: v.Link) -> list[v.Verb]:
        found = v.Found(links={name.replace("_", "-"): link for name, link in links.items()})
        state = DesiredState(networks=(NETWORK,), ports=(guest,))
        made = plan_of(PREFIX, "h", state, found).verbs
        return [each for each in made if isinstance(each, v.SetBandwidth | v.DeleteLink)]

    there = {"tap11111111_00": v.Link(index=1)}
    known = {"tap11111111_00": v.Link(index=1, limited=True), "ifb11111111_00": v.Link(index=2)}
    slowed = v.SetBandwidth(tap=tap, send=v.MAX_KILOBITS, send_burst=7)
    assert verbs(limited) == []
    assert verbs(limited, **there) == [slowed]
    assert verbs(limited, **known) == [slowed]
    assert verbs(STATE.ports[0], **there) == []
    assert verbs(STATE.ports[0], **known) == [v.SetBandwidth(tap=tap), v.DeleteLink(device=detour)]
    assert verbs(limited, ifb11111111_00=v.Link(index=2)) == [v.DeleteLink(device=detour)], "its tap is gone"


def test_a_tap_that_was_made_outside_is_taken_in_for_its_own_guest_before_it_is_wired() -> None:
    server = "77777777-0000-4000-8000-000000000001"
    guest = port(GUEST, NET, "10.0.0.5", SUB, 1, device_owner="compute:nova", device_id=server)
    state = msgspec.structs.replace(STATE, ports=(guest, *STATE.ports[1:]))
    tap = f"tap{GUEST[:11]}"
    found = v.Found(adopts=True, outside=(tap, "tap99999999-99"))
    verbs = plan_of(PREFIX, "h", state, found).verbs
    adopted = [verb for verb in verbs if isinstance(verb, v.AdoptTap)]
    assert adopted == [v.AdoptTap(tap=tap, mac="fa:16:3e:00:00:01", guest=server)]
    check(adopted[0], PREFIX)
    assert not any(isinstance(verb, v.EnsureTap) for verb in verbs)
    assert not [verb for verb in plan_of(PREFIX, "other", state, found).verbs if isinstance(verb, v.AdoptTap)]
