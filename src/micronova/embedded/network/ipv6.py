"""SLAAC: on which subnets guests derive their addresses, and what they derive from their MAC addresses."""

import ipaddress

_LINK_LOCAL = ipaddress.IPv6Network("fe80::/64")
_MODES = ("slaac", "dhcpv6-stateless")  # in both, guests derive their addresses from the prefix of an advertisement


def uses_slaac(ipv6_ra_mode: str | None, ipv6_address_mode: str | None) -> bool:
    """Return whether the guests of a subnet with these modes derive their addresses."""
    return ipv6_ra_mode in _MODES or ipv6_address_mode in _MODES


def eui64(prefix: ipaddress.IPv6Network, mac: str) -> ipaddress.IPv6Address:
    """Return the address that a device with this MAC address derives from a prefix of 64 bits."""
    octets = [int(part, 16) for part in mac.split(":")]
    octets[0] ^= 2
    identifier = bytes([*octets[:3], 0xFF, 0xFE, *octets[3:]])
    return prefix[int.from_bytes(identifier, "big")]


def link_local(mac: str) -> ipaddress.IPv6Address:
    """Return the link-local address of a device with this MAC address."""
    return eui64(_LINK_LOCAL, mac)
