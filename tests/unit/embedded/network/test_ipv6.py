"""Addresses that devices derive from their MAC addresses."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from micronova.embedded.network.ipv6 import eui64, link_local, uses_slaac


def test_eui64() -> None:
    prefix = ipaddress.IPv6Network("2001:db8::/64")
    assert str(eui64(prefix, "00:16:3e:33:44:55")) == "2001:db8::216:3eff:fe33:4455"


@given(st.integers(0, 2**48 - 1))
def test_link_local_addresses(number: int) -> None:
    mac = ":".join(f"{byte:02x}" for byte in number.to_bytes(6, "big"))
    assert link_local(mac).is_link_local


@pytest.mark.parametrize(
    ("ra_mode", "address_mode", "expected"),
    [
        (None, None, False),
        ("slaac", "slaac", True),
        (None, "slaac", True),
        ("dhcpv6-stateless", None, True),
        ("dhcpv6-stateful", "dhcpv6-stateful", False),
    ],
)
def test_subnets_with_slaac(ra_mode: str | None, address_mode: str | None, expected: bool) -> None:
    assert uses_slaac(ra_mode, address_mode) is expected
