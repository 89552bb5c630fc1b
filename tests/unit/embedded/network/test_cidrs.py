import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from micronova.embedded.network import cidrs
from micronova.objects.errors import MicronovaError
from micronova.privileged import checks
from micronova.privileged import verbs as v

V4 = ipaddress.ip_network


def test_addresses_sort_as_text_like_numbers() -> None:
    texts = ["10.0.0.2", "10.0.0.10", "9.255.255.255", "192.168.0.1", "0.0.0.0", "255.255.255.255"]
    addresses = [ipaddress.ip_address(text) for text in texts]
    assert sorted(addresses, key=int) == sorted(addresses, key=cidrs.number_of)
    wide = [ipaddress.ip_address(text) for text in ("::1", "fd00::", "fd00::ffff:1", "2001:db8::1")]
    assert sorted(wide, key=int) == sorted(wide, key=cidrs.number_of)


SPECIAL = (
    "0.0.0.0",
    "127.0.0.5",
    "169.254.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "ff02::1",
    "::ffff:a00:1",
)


@given(st.sampled_from(SPECIAL) | st.ip_addresses().map(str), st.integers(1, 128), st.data())
def test_hosts_can_configure_every_address_of_a_subnet_that_is_accepted(
    text: str, length: int, data: st.DataObject
) -> None:
    inside = ipaddress.ip_address(text)
    network = ipaddress.ip_network((inside, min(length, inside.max_prefixlen)), strict=False)
    try:
        cidrs.check_range(network)
    except MicronovaError:
        return
    assert text not in SPECIAL
    number = data.draw(st.integers(int(network.network_address), int(network.broadcast_address)))
    address = f"{cidrs.address_of(number, network.version)}/{network.prefixlen}"
    checks.check(v.SetAddresses(namespace="mn-1-n-1", device="dev1", addresses=(address,)), "mn-1")


@given(st.integers(8, 32), st.integers(0, 2**32 - 1), st.data())
def test_default_pools_are_everything_usable_but_the_gateway(length: int, base: int, data: st.DataObject) -> None:
    network = V4((base, length), strict=False)
    first, last = cidrs.usable(network)
    gateway = data.draw(st.one_of(st.none(), st.integers(first, last)))
    text = None if gateway is None else str(cidrs.address_of(gateway, 4))
    pools = cidrs.parse_pools(cidrs.default_pools(network, text))
    assert sum(b - a + 1 for a, b in pools) == last - first + 1 - (gateway is not None)
    assert all(not a <= (gateway or -1) <= b for a, b in pools)
    assert cidrs.check_pools(network, cidrs.default_pools(network, text), text) == cidrs.default_pools(network, text)


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 20)), max_size=6),
    st.one_of(st.none(), st.integers(0, 250)),
)
def test_a_search_from_a_hint_covers_the_pools_once(raw: list[tuple[int, int]], hint: int | None) -> None:
    pools, end = [], -1
    for gap, size in raw:
        start = end + 1 + gap % 7
        end = start + size
        pools.append((start, end))
    seen = [number for a, b in cidrs.from_hint(pools, hint) for number in range(a, b + 1)]
    assert sorted(seen) == [number for a, b in pools for number in range(a, b + 1)]
    if hint is not None and any(number >= hint for number in seen):
        assert seen[0] >= hint


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(24, 28)), max_size=12), st.integers(24, 30))
def test_a_free_prefix_overlaps_nothing_and_is_found_if_there_is_one(taken: list[tuple[int, int]], length: int) -> None:
    whole = V4("10.0.0.0/24")
    held = [V4((int(whole.network_address) + offset, size), strict=False) for offset, size in taken]
    found = cidrs.free_prefix([str(whole)], held, length)
    candidates = [each for each in whole.subnets(new_prefix=length) if not any(each.overlaps(h) for h in held)]
    assert found == (candidates[0] if candidates else None)


def test_a_free_prefix_may_be_in_a_later_range() -> None:
    found = cidrs.free_prefix(["10.0.0.0/30", "10.1.0.0/24"], [], 25)
    assert found == V4("10.1.0.0/25")


@pytest.mark.parametrize(
    ("pools", "type_"),
    [
        ([{"start": "10.0.0.9", "end": "10.0.0.2"}], "InvalidAllocationPool"),
        ([{"start": "10.0.0.9", "end": "fd00::1"}], "InvalidAllocationPool"),
        ([{"start": "10.0.0.0", "end": "10.0.0.9"}], "OutOfBoundsAllocationPool"),
        ([{"start": "10.0.0.9", "end": "10.0.0.255"}], "OutOfBoundsAllocationPool"),
        ([{"start": "10.0.0.2", "end": "10.0.0.9"}, {"start": "10.0.0.5", "end": "10.0.0.6"}],
         "OverlappingAllocationPools"),
        ([{"start": "10.0.0.1", "end": "10.0.0.9"}], "GatewayConflictWithAllocationPools"),
    ],
)  # fmt: skip
def test_pools_that_cannot_be(pools: list[dict[str, str]], type_: str) -> None:
    with pytest.raises(MicronovaError) as error:
        cidrs.check_pools(V4("10.0.0.0/24"), pools, "10.0.0.1")
    assert error.value.details["type"] == type_
