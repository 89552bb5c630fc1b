"""Rule sets on a real kernel: whatever users may ask for is loaded, and one port's rules do not affect the others."""

import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from micronova.privileged import firewall, kernel, rulesets
from micronova.privileged import verbs as v
from micronova.privileged.checks import check, network
from micronova.privileged.firewall import FirewallLoader
from micronova.privileged.kernel import Failed, TimedOut
from tests.e2e.agent_world import NEEDS, AgentWorld, Guest, agent_world, arun, remains, run
from tests.unit.embedded.network.world import SERVICE

pytestmark = NEEDS

CONNECTIONS = 20
GROUPS = [f"{number}1111111-0000-4000-8000-000000000001" for number in range(3)]


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[AgentWorld]:
    async with agent_world(tmp_path, connections=CONNECTIONS) as made:
        yield made
    assert remains(made.prefix) == []


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    name = f"mnrules-{secrets.token_hex(4)}"
    run("ip", "netns", "add", name)
    yield name
    run("ip", "netns", "delete", name)


# --- fuzzing ---


def _prefixes(version: int) -> st.SearchStrategy[str]:
    """Return ranges of addresses, many of which contain others or are adjacent."""
    bits = 32 if version == 4 else 128
    bases = [0, 0x0A000000, 0xC0A80000, 2**32 - 1] if version == 4 else [0, 0xFD << 120, 0xFE80 << 112, 2**128 - 1]
    near = st.builds(lambda base, more: min(base + more, 2**bits - 1), st.sampled_from(bases), st.integers(0, 9))
    number = near | st.integers(0, 2**bits - 1)
    lengths = st.sampled_from([0, 1, 8, 24, bits - 2, bits - 1, bits]) | st.integers(0, bits)

    def shown(number: int, length: int) -> str:
        first = number >> (bits - length) << (bits - length)
        made = network(f"{_address(first, version)}/{length}")
        return str(made)

    return st.builds(shown, number, lengths)


def _address(number: int, version: int) -> str:
    if version == 4:
        return ".".join(str(number >> shift & 255) for shift in (24, 16, 8, 0))
    return ":".join(f"{number >> shift & 0xFFFF:x}" for shift in range(112, -1, -16))


MACS = st.sampled_from(["fa:16:3e:00:00:01", "fa:16:3e:00:00:02", "00:00:00:00:00:00", "fe:ff:ff:ff:ff:ff"])
ANY_PREFIX = _prefixes(4) | _prefixes(6)
DSCP = st.none() | st.integers(0, 63)
PAIRS = st.lists(st.builds(v.Pair, mac=MACS, prefix=ANY_PREFIX), max_size=12).map(tuple)
NUMBERS = st.none() | st.sampled_from([0, 1, 22, 255, 256, 65535]) | st.integers(0, 65535)
PROTOCOLS = st.none() | st.sampled_from([1, 6, 17, 58, 132]) | st.integers(0, 255)
REMOTES = st.none() | ANY_PREFIX
RULES = st.lists(
    st.builds(
        v.FilterRule, ingress=st.booleans(), version=st.sampled_from([4, 6]), protocol=PROTOCOLS, low=NUMBERS,
        high=NUMBERS, remote=REMOTES, remote_group=st.none() | st.sampled_from(GROUPS),
    ),
    max_size=10,
).map(tuple)  # fmt: skip


def _acceptable(verb: v.LoadFirewall) -> bool:
    try:
        check(verb, "mn-1a2b3c4d")
    except Exception:
        return False
    return True


@st.composite
def firewalls(draw: st.DrawFn) -> v.LoadFirewall:
    """Return firewalls that the helper accepts."""
    groups = tuple(v.Group(id=id, addresses=tuple(draw(st.lists(ANY_PREFIX, max_size=8)))) for id in GROUPS)

    def valid(rule: v.FilterRule) -> bool:
        return _acceptable(
            v.LoadFirewall(filtered=(v.FilteredPort(tap="tap00000000-00", zone=1, rules=(rule,)),), groups=groups)
        )

    filtered = tuple(
        v.FilteredPort(
            tap=f"tap00000000-{number:02x}", zone=draw(st.sampled_from([1, 2, 65535])), stateful=draw(st.booleans()),
            dscp=draw(DSCP), pairs=draw(PAIRS), rules=tuple(filter(valid, draw(RULES))),
        )
        for number in range(draw(st.integers(0, 4)))
    )  # fmt: skip
    unfiltered = tuple(
        v.UnfilteredDevice(device=f"vth00000000-{n:02x}", zone=3) for n in range(draw(st.integers(0, 2)))
    )
    return v.LoadFirewall(
        filtered=filtered,
        unfiltered=unfiltered,
        groups=groups,
        connections=draw(st.sampled_from([0, 1, CONNECTIONS, 1 << 24])),
    )


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(verb=firewalls())
def test_the_kernel_loads_every_firewall_that_the_helper_accepts(namespace: str, verb: v.LoadFirewall) -> None:
    assert _acceptable(verb)
    assert FirewallLoader(namespace).load(verb) == {}


# --- one port's rules and the others ---


def _port(number: int, *rules: v.FilterRule) -> v.FilteredPort:
    pair = v.Pair(mac=f"fa:16:3e:00:00:{number:02x}", prefix=f"10.0.0.{number}/32")
    return v.FilteredPort(tap=f"tap00000000-{number:02x}", zone=1, pairs=(pair,), rules=rules)


FAULTY = v.FilterRule(ingress=True, protocol=1, low=300)  # the helper's checks do not let it come so far


@pytest.mark.parametrize("bad", [(), (3,), (0, 7), tuple(range(8))])
def test_only_the_ports_with_faulty_rules_are_closed(namespace: str, bad: tuple[int, ...]) -> None:
    ports = tuple(
        _port(number, v.FilterRule(ingress=True, protocol=6, low=4000 + number, high=4000 + number),
              *([FAULTY] if number in bad else []))
        for number in range(8)
    )  # fmt: skip
    closed = FirewallLoader(namespace).load(v.LoadFirewall(filtered=ports))
    assert sorted(closed) == [ports[number].tap for number in bad]
    assert all("exceeds valid range" in reason for reason in closed.values())
    loaded = run("ip", "netns", "exec", namespace, "nft", "list", "ruleset").stdout
    for number in range(8):
        assert (f"dport {4000 + number} " in loaded) is (number not in bad)
        assert f'"tap00000000-{number:02x}"' in loaded, "a closed port is known, and everything is dropped there"


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the size of each rule set that is checked in a search for faulty ports."""
    sizes: list[int] = []
    check = kernel.run

    def counted(command: Sequence[str], text: str) -> str:
        sizes.append(len(text))
        return check(command, text)

    monkeypatch.setattr(firewall, "run", counted)
    return sizes


def test_a_search_costs_no_more_than_a_few_rule_sets(namespace: str, checked: list[int]) -> None:
    """With 1,000 ports, one of them faulty, it took nearly as long as the helper's answer is waited for."""
    ports = [_port(number, v.FilterRule(ingress=True, protocol=6)) for number in range(128)]
    ports[77] = _port(77, FAULTY)
    verb = v.LoadFirewall(filtered=tuple(ports))
    rules = FirewallLoader(namespace)
    assert list(rules.load(verb)) == [ports[77].tap]
    assert sum(checked) < 2 * len(rulesets.firewall(verb))
    checked.clear()
    changed = v.LoadFirewall(filtered=(*ports[:-1], _port(127)))
    assert list(rules.load(changed)) == [ports[77].tap]
    assert not checked, "what was found is remembered while other ports change"
    ports[77] = _port(77)
    assert rules.load(v.LoadFirewall(filtered=tuple(ports))) == {}


def test_a_search_that_takes_too_long_is_continued(
    namespace: str, checked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firewall, "SEARCH_SECONDS", 0.0)
    ports = tuple(_port(number, *([FAULTY] if number in (2, 3, 9) else [])) for number in range(16))
    rules = FirewallLoader(namespace)
    attempts = 0
    for _ in range(10):
        attempts += 1
        try:
            closed = rules.load(v.LoadFirewall(filtered=ports))
            break
        except Failed as error:
            assert "the search goes on" in str(error)
    assert sorted(closed) == [ports[number].tap for number in (2, 3, 9)]
    assert attempts <= 4, "each attempt finds one at least"


def test_a_program_that_does_not_end_in_time_closes_no_port(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = tuple(_port(number, *([FAULTY] if number == 2 else [])) for number in range(4))

    def overloaded(*_: object) -> str:
        raise TimedOut("nft did not end within 30 s.")

    rules = FirewallLoader(namespace)
    with monkeypatch.context() as busy, pytest.raises(TimedOut):
        busy.setattr(firewall, "run", overloaded)
        rules.load(v.LoadFirewall(filtered=ports))
    assert list(rules.load(v.LoadFirewall(filtered=ports))) == [ports[2].tap]


def test_a_failure_that_no_port_causes_leaves_the_former_rules(namespace: str) -> None:
    FirewallLoader(namespace).load(v.LoadFirewall(filtered=(_port(1), _port(2))))
    before = run("ip", "netns", "exec", namespace, "nft", "list", "ruleset").stdout
    unfiltered = (
        v.UnfilteredDevice(device="vth00000000-01", zone=1 << 20),
    )  # the helper's checks do not let it come so far
    with pytest.raises(Failed, match="nft"):
        FirewallLoader(namespace).load(v.LoadFirewall(filtered=(_port(1),), unfiltered=unfiltered))
    assert run("ip", "netns", "exec", namespace, "nft", "list", "ruleset").stdout == before


@pytest.mark.parametrize("pair", ["10.1.0.0/24", "0.0.0.0/0"])
async def test_an_address_pair_that_contains_the_ports_own_address(cloud: AgentWorld, pair: str) -> None:
    net, _ = await cloud.network.network("10.1.0.0/24")
    group = (await cloud.network.make("security_group", name="other"))["id"]
    a, b = await cloud.guest(net), await cloud.guest(net, security_groups=[group])
    for guest in (a, b):
        await guest.dhcp()
    allow = {"security_group_id": group, "direction": "ingress", "ethertype": "IPv4", "protocol": "icmp"}
    rule = await cloud.network.make("security_group_rule", **allow)
    await cloud.settled()
    assert await a.pings(b.address)
    await a.do("ip", "address", "add", "10.1.0.77/24", "dev", "eth0")
    from_further = ("ping", "-c", "1", "-W", "1", "-I", "10.1.0.77", b.address)
    assert (await a.do(*from_further, check=False)).returncode != 0
    pairs = [{"ip_address": pair}, {"ip_address": "2001:db8::/32"}, {"ip_address": "::/0"}]
    await cloud.network.change("port", a.port["id"], allowed_address_pairs=pairs)
    await cloud.settled()
    assert (await a.do(*from_further)).returncode == 0
    await cloud.network.delete("security_group_rule", rule["id"])
    await cloud.settled()
    assert not await a.pings(b.address), "a removed rule has an effect"
    for guest in (a, b):
        assert (await cloud.network.show("port", guest.port["id"], SERVICE))["status"] == "ACTIVE"


# --- connections ---

_COUNT = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
    made.bind(("", 5000))
    print("listening", flush=True)
    sources = set()
    while (message := made.recvfrom(100))[0] != b"end":
        sources.add(message[1])
    print(len(sources))
"""
_FLOWS = """
import socket, sys
made = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(int(sys.argv[2]))]
for each in (*made, made[0]):
    each.connect((sys.argv[1], 5000))
    each.send(b"one")
made[0].send(b"end")
"""


async def _flows(source: Guest, destination: Guest, count: int) -> int:
    """Return how many of so many flows of datagrams arrive."""
    receiver = await asyncio.create_subprocess_exec(
        "ip", "netns", "exec", destination.namespace, sys.executable, "-c", _COUNT, stdout=asyncio.subprocess.PIPE
    )
    assert receiver.stdout is not None
    try:
        async with asyncio.timeout(30):
            assert await receiver.stdout.readline() == b"listening\n"
            await source.do(sys.executable, "-c", _FLOWS, destination.address, str(count))
            return int(await receiver.stdout.readline())
    finally:
        with contextlib.suppress(ProcessLookupError):
            receiver.kill()
        await receiver.wait()


async def test_a_guest_has_a_limited_number_of_connections(cloud: AgentWorld) -> None:
    net, _ = await cloud.network.network("10.1.0.0/24")
    group = (await cloud.network.make("security_group", name="open"))["id"]
    rule = {"security_group_id": group, "direction": "ingress", "ethertype": "IPv4"}
    await cloud.network.make("security_group_rule", **rule, protocol="udp")
    greedy, other, one, two = [await cloud.guest(net, security_groups=[group]) for _ in range(4)]
    for guest in (greedy, other, one, two):
        await guest.dhcp()
    await cloud.settled()
    assert await _flows(greedy, one, 10) == 10
    assert await _flows(greedy, two, 3 * CONNECTIONS) <= CONNECTIONS - 10, "the connections to both are counted"
    assert await _flows(other, two, 5) == 5, "other guests have their own"
    # A change of the rules replaces the rule set; the connections of before count.
    await cloud.network.make("security_group_rule", **rule, protocol="tcp", port_range_min=1, port_range_max=1)
    await cloud.settled()
    await greedy.do(sys.executable, "-c", _FLOWS, one.address, str(3 * CONNECTIONS))
    tracked = (await arun("ip", "netns", "exec", cloud.prefix, "cat", "/proc/net/nf_conntrack")).stdout.splitlines()
    assert 0 < sum(f"src={greedy.address} dst=" in line for line in tracked) <= CONNECTIONS


@pytest.mark.parametrize("secure", [True, False])
async def test_a_guest_has_no_more_connections_with_another_mac_address(cloud: AgentWorld, secure: bool) -> None:
    """The limit is the port's, with port security and without."""
    net, _ = await cloud.network.network("10.1.0.0/24")
    group = (await cloud.network.make("security_group", name="open"))["id"]
    rule = {"security_group_id": group, "direction": "ingress", "ethertype": "IPv4", "protocol": "udp"}
    await cloud.network.make("security_group_rule", **rule)
    free = {"port_security_enabled": False, "security_groups": []}
    greedy = await cloud.guest(net, **({"security_groups": [group]} if secure else free))
    one, two = [await cloud.guest(net, security_groups=[group]) for _ in range(2)]
    for guest in (greedy, one, two):
        await guest.dhcp()
    other = "fa:16:3e:99:99:99"
    if secure:
        pair = {"ip_address": greedy.address, "mac_address": other}
        await cloud.network.change("port", greedy.port["id"], allowed_address_pairs=[pair])
    await cloud.settled()
    assert await _flows(greedy, one, 10) == 10
    await greedy.do("ip", "link", "set", "dev", "eth0", "address", other)
    assert 0 < await _flows(greedy, two, 3 * CONNECTIONS) <= CONNECTIONS - 10
