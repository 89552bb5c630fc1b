"""Which ports an agent wires and reports when verbs fail."""

import socket
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from micronova.embedded.network.agent.agent import FULL_CHECK, NetworkAgent
from micronova.embedded.network.agent.client import NetworkServiceClient
from micronova.embedded.network.agent.desired_state import AddressPair, DesiredState, Network, Port, Rule
from micronova.embedded.network.agent.firewall import firewall_of
from micronova.embedded.network.agent.metadata import MetadataLimits, MetadataProxy
from micronova.embedded.network.agent.retries import LONGEST_PAUSE
from micronova.http.client import Answer, ServiceClient
from micronova.privileged import verbs as v
from micronova.privileged.client import PrivilegedError
from micronova.privileged.names import bridge_name, network_namespace, tap_name
from tests.clocks import ManualClock

PREFIX = "mn-1a2b3c4d"
NET = "aaaaaaaa-0000-4000-8000-000000000001"
IDS = [f"{number}1111111-0000-4000-8000-000000000001" for number in (1, 2)]


class Helper:
    """Stands for the privileged helper: taps are plugged as asked, and the named verbs fail."""

    def __init__(self) -> None:
        self.failing: set[type[v.Verb]] = set()
        self.unserved: set[str] = set()  # namespaces in which nothing can listen
        self.listening: list[str] = []
        self.closed: dict[str, str] = {}
        self.namespaces: tuple[str, ...] = (PREFIX,)
        self.links: dict[str, v.Link] = {}
        self.done: list[v.Verb] = []
        self.tried: list[v.Verb] = []

    async def call(self, verb: v.Verb) -> v.Reply:
        if isinstance(verb, v.Inventory):
            return v.Reply(found=v.Found(namespaces=self.namespaces, links=dict(self.links)))
        self.tried.append(verb)
        if type(verb) in self.failing:
            raise PrivilegedError("It failed.")
        self.done.append(verb)
        if isinstance(verb, v.EnsureTap):
            self.links[verb.tap] = v.Link(index=self.links[verb.tap].index, bridge=verb.bridge, up=True)
        return v.Reply(closed=self.closed if isinstance(verb, v.LoadFirewall) else {})

    async def open(self, verb: v.Verb) -> socket.socket:
        if not isinstance(verb, v.ListenMetadata):
            return socket.socketpair()[0]
        if verb.namespace in self.unserved:
            raise PrivilegedError("It failed.")
        self.listening.append(verb.namespace)
        return socket.create_server(("127.0.0.1", 0))

    async def close(self) -> None:
        pass


class Service:
    """Stands for the network service: remembers reports."""

    def __init__(self) -> None:
        self.up: list[str] = []
        self.down: list[str] = []
        self.faults: list[str] = []

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Any:
        self.up += body["up"]
        self.down += body["down"]
        self.faults = body["configurations"]["faults"]
        return Answer(204, {}, b"").json()


class World:
    def __init__(self) -> None:
        self.helper, self.service, self.clock = Helper(), Service(), ManualClock()
        self.agent = self.start()

    def start(self, metadata: MetadataProxy | None = None) -> NetworkAgent:
        client: ServiceClient = self.service  # type: ignore[assignment]
        service = NetworkServiceClient(client, "h")
        return NetworkAgent(service, self.helper, self.clock, prefix=PREFIX, metadata=metadata)

    def plug(self, port_id: str, index: int) -> None:
        self.helper.links[tap_name(port_id)] = v.Link(index=index)

    async def reconcile(self, *active: str, **rules: tuple[Rule, ...]) -> bool:
        ports = tuple(
            Port(
                id=id, network_id=NET, mac_address=f"fa:16:3e:00:00:{number:02x}", device_owner="compute:nova",
                host="h", security_groups=(id,), status="ACTIVE" if id in active else "DOWN",
            )
            for number, id in enumerate(IDS)
        )  # fmt: skip
        state = DesiredState(networks=(Network(id=NET),), ports=ports, rules=rules)
        self.service.up.clear()
        self.service.down.clear()
        self.helper.done.clear()
        await self.clock.jump(LONGEST_PAUSE)  # what failed is tried again
        return await self.agent.reconcile(state)


@pytest.fixture
async def world() -> World:
    made = World()
    made.plug(IDS[0], 7)
    return made


async def test_no_port_goes_down_because_rules_cannot_be_loaded(world: World) -> None:
    assert await world.reconcile()
    assert world.service.up == [IDS[0]]
    world.helper.failing = {v.LoadFirewall}
    world.plug(IDS[1], 8)
    rule = Rule(direction="egress", ethertype="IPv4")
    assert not await world.reconcile(IDS[0], **{IDS[0]: (rule,)})
    assert (world.service.up, world.service.down) == ([], [])
    assert world.helper.links[tap_name(IDS[1])].bridge == "", "nor is a guest wired without its rules"
    world.agent = world.start()  # an agent that was restarted meanwhile
    assert not await world.reconcile(IDS[0])
    assert (world.service.up, world.service.down) == ([], [])
    world.plug(IDS[0], 9)  # the guest was restarted, and its new tap cannot be wired
    assert not await world.reconcile(IDS[0])
    assert (world.service.up, world.service.down) == ([], [IDS[0]])
    world.helper.failing = set()
    assert await world.reconcile()
    assert sorted(world.service.up) == IDS


async def test_a_port_whose_rules_the_kernel_refuses_is_not_reported(world: World) -> None:
    world.plug(IDS[1], 8)
    world.helper.closed = {tap_name(IDS[0]): "refused"}
    await world.reconcile()
    assert (world.service.up, world.service.down) == ([IDS[1]], [])
    world.helper.closed = {}
    await world.reconcile(IDS[1], **{IDS[0]: (Rule(direction="egress", ethertype="IPv4"),)})
    assert (world.service.up, world.service.down) == ([IDS[0]], [])
    world.helper.closed = {tap_name(IDS[0]): "refused"}
    await world.reconcile(*IDS)
    assert (world.service.up, world.service.down) == ([], [])


async def test_guests_are_not_wired_in_a_namespace_that_does_not_filter(world: World) -> None:
    world.helper.failing = {v.EnsureNamespace}
    assert not await world.reconcile()
    assert not [verb for verb in world.helper.done if isinstance(verb, v.EnsureTap)]
    assert world.helper.links[tap_name(IDS[0])].bridge == ""


async def test_the_firewall_is_loaded_again_after_the_namespace_was_deleted(world: World) -> None:
    await world.reconcile()
    world.helper.namespaces = ()
    world.helper.links = {}
    await world.reconcile()
    assert [type(verb) for verb in world.helper.done] == [v.EnsureNamespace, v.LoadFirewall, v.EnsureBridge]


async def test_what_fails_is_reported_until_it_succeeds(world: World) -> None:
    assert await world.reconcile()
    assert world.service.faults == []
    world.helper.failing = {v.LoadFirewall}
    await world.reconcile(IDS[0], **{IDS[0]: (Rule(direction="egress", ethertype="IPv4"),)})
    assert world.service.faults == ["It failed."]
    world.helper.failing = set()
    world.helper.closed = {tap_name(IDS[0]): "refused"}
    await world.reconcile(IDS[0])
    assert world.service.faults == [f"The rules of {tap_name(IDS[0])} cannot be loaded: refused"]
    world.helper.closed = {}
    await world.reconcile(IDS[0], **{IDS[0]: (Rule(direction="egress", ethertype="IPv4"),)})
    assert world.service.faults == []


@pytest.mark.parametrize(
    "change",
    [
        {"mac_address": "FA:16:3E:00:00:01"},
        {"allowed_address_pairs": (AddressPair(ip_address="no address"),)},
        {"allowed_address_pairs": (AddressPair(ip_address="10.0.0.9", mac_address="01:00:00:00:00:00"),)},
    ],
)
def test_a_port_with_invalid_addresses_is_closed_and_the_others_are_not(change: dict[str, Any]) -> None:
    good = Port(id=IDS[0], network_id=NET, mac_address="fa:16:3e:00:00:01", device_owner="compute:nova", host="h")
    bad = msgspec.structs.replace(good, id=IDS[1], **change)
    made = firewall_of(DesiredState(networks=(Network(id=NET),), ports=(good, bad)))
    assert list(made.closed) == [tap_name(IDS[1])]
    assert [bool(port.pairs) for port in made.verb.filtered] == [True, False]


@pytest.mark.parametrize(
    "rule",
    [
        Rule(direction="ingress", ethertype="IPv4", protocol=6, port_range_min=1, port_range_max=70_000),
        Rule(direction="ingress", ethertype="IPv4", protocol=6, port_range_min=9, port_range_max=3),
        Rule(direction="ingress", ethertype="IPv4", protocol=1, port_range_min=256),
        Rule(direction="ingress", ethertype="IPv6", remote_ip_prefix="10.0.0.0/8"),
        Rule(direction="ingress", ethertype="IPv4", remote_group_id=IDS[0]),
    ],
)
def test_a_port_with_an_invalid_rule_is_closed_and_the_others_are_not(rule: Rule) -> None:
    good = Port(id=IDS[0], network_id=NET, mac_address="fa:16:3e:00:00:01", device_owner="compute:nova", host="h")
    bad = msgspec.structs.replace(good, id=IDS[1], security_groups=(IDS[1],))
    state = DesiredState(networks=(Network(id=NET),), ports=(good, bad), rules={IDS[1]: (rule,)})
    made = firewall_of(state)
    assert list(made.closed) == [tap_name(IDS[1])]


async def test_a_rule_that_names_a_security_group_with_too_many_addresses_is_left_out(world: World) -> None:
    large, small = IDS
    remote = [Rule(direction="ingress", ethertype="IPv4", remote_group_id=group) for group in IDS]
    port = Port(
        id=IDS[0], network_id=NET, mac_address="fa:16:3e:00:00:01", device_owner="compute:nova", host="h",
        security_groups=(small,),
    )  # fmt: skip
    state = DesiredState(
        networks=(Network(id=NET),), ports=(port,), rules={small: tuple(remote)}, members={small: ("10.0.0.1",)},
        oversized={large: 5001},
    )  # fmt: skip
    assert await world.agent.reconcile(state)
    [loaded] = [verb for verb in world.helper.done if isinstance(verb, v.LoadFirewall)]
    [filtered] = loaded.filtered
    assert [rule.remote_group for rule in filtered.rules] == [small]
    assert world.service.up == [IDS[0]], "its other rules hold"
    [fault] = world.service.faults
    assert f"{large} has too many addresses (5001 or more)" in fault
    # The firewall of a state is made once, whatever makes the agent look again.
    world.helper.namespaces = ()
    await world.agent.reconcile(state)
    assert [verb is loaded for verb in world.helper.done if isinstance(verb, v.LoadFirewall)] == [True, True]
    await world.agent.reconcile(msgspec.structs.replace(state, oversized={}, members=dict.fromkeys(IDS, ())))
    assert world.service.faults == []


async def test_what_always_fails_neither_ends_nor_delays_the_full_checks(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A network of one tenant whose bridge cannot be made: the firewall of all is still loaded again."""
    world.helper.failing = {v.EnsureBridge}
    world.agent._state = DesiredState(networks=(Network(id=NET),))

    async def loads() -> int:
        world.agent._wake.set()  # what changes all the time delays them neither
        await world.agent._reconcile_once()
        return len([verb for verb in world.helper.done if isinstance(verb, v.LoadFirewall)])

    assert await loads() == 1
    await world.clock.jump(FULL_CHECK - 1)
    assert await loads() == 1
    await world.clock.jump(1)
    assert await loads() == 2
    await world.clock.jump(FULL_CHECK)
    assert await loads() == 3
    assert caplog.text.count("It failed.") == 1, "it is said once"


async def test_what_always_fails_is_tried_less_and_less_often(world: World) -> None:
    """A network that could not be made caused a reconciliation each second for ever."""
    world.helper.failing = {v.EnsureBridge}
    state = DesiredState(networks=(Network(id=NET),))

    def attempts() -> int:
        return sum(isinstance(verb, v.EnsureBridge) for verb in world.helper.tried)

    delays = []
    for _ in range(8):
        assert not await world.agent.reconcile(state)
        delays.append(world.agent._retry_delay)
        assert world.service.faults == ["It failed."]
        await world.clock.jump(delays[-1])
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert attempts() == 8
    await world.agent.reconcile(state)
    before = attempts()
    for _ in range(100):  # whatever else wakes the agent
        await world.agent.reconcile(state)
    assert attempts() == before and world.service.faults == ["It failed."]
    changed = DesiredState(networks=(Network(id=NET, mtu=1400),))
    await world.agent.reconcile(changed)
    assert attempts() == before + 1, "another verb is tried at once"
    world.helper.failing = set()
    await world.clock.jump(1.0)
    assert await world.agent.reconcile(changed)
    assert world.service.faults == []


async def test_networks_do_not_wait_for_one_that_fails(world: World) -> None:
    """A verb may take half a minute to fail."""
    other = NET.replace("aaaaaaaa", "bbbbbbbb")
    world.helper.failing = {v.EnsureBridge}
    await world.agent.reconcile(DesiredState(networks=(Network(id=NET),)))
    await world.clock.jump(LONGEST_PAUSE)
    world.helper.tried.clear()
    await world.agent.reconcile(DesiredState(networks=(Network(id=NET), Network(id=other))))
    bridges = [verb.bridge for verb in world.helper.tried if isinstance(verb, v.EnsureBridge)]
    assert bridges == [bridge_name(other), bridge_name(NET)]


async def test_what_depends_on_a_verb_that_failed_is_tried_as_soon_as_it_succeeds(world: World) -> None:
    world.helper.failing = {v.EnsureBridge, v.EnsureTap}
    for _ in range(5):
        await world.reconcile()
    world.helper.failing = set()
    assert await world.reconcile()
    assert world.service.up == [IDS[0]]


async def test_metadata_that_cannot_be_served_in_one_network_is_served_in_the_others(world: World) -> None:
    networks = [NET, NET.replace("aaaaaaaa", "bbbbbbbb")]
    world.helper.unserved = {network_namespace(PREFIX, NET)}
    unused: Any = SimpleNamespace(close=world.helper.close)
    limits = MetadataLimits(per_guest=1, per_network=1, total=1, timeout=1.0)
    proxy = MetadataProxy(world.helper, unused, unused, limits)
    servers = [
        Port(
            id=id, network_id=network, mac_address=f"fa:16:3e:00:01:{number:02x}", device_owner="network:dhcp",
            host="h",
        )
        for number, (id, network) in enumerate(zip(("12222222-0000", "22222222-0000"), networks, strict=True))
    ]  # fmt: skip
    guest = Port(id=IDS[0], network_id=NET, mac_address="fa:16:3e:00:00:00", device_owner="compute:nova", host="h")
    state = DesiredState(networks=tuple(Network(id=id) for id in networks), ports=(*servers, guest))
    agent = world.start(proxy)
    try:
        assert not await agent.reconcile(state)
    finally:
        await proxy.close()
    assert world.helper.listening == [network_namespace(PREFIX, networks[1])]
    assert IDS[0] in world.service.up, "ports are reported nevertheless"
    assert world.service.faults == ["It failed."]
