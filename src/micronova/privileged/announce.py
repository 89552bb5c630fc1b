"""Telling neighbours that an address is here now (gratuitous ARP, and its like in IPv6), or that a router goes.

Who has talked to the address before remembers where it was. Without this, an address that moved (a floating IP to
another router) would not be reached until its neighbours have forgotten it.
"""

import ipaddress
import logging
import socket
import struct
from collections.abc import Iterable

log = logging.getLogger(__name__)

_BROADCAST = b"\xff" * 6
_ARP = 0x0806
_REQUEST, _REPLY = 1, 2
_ROUTER_ADVERTISEMENT, _ADVERTISEMENT = 134, 136
_OVERRIDE = 0x20000000
_ALL_NODES = "ff02::1"


def announce(device: str, addresses: Iterable[str]) -> None:
    """Tell of addresses that a device of this thread's namespace has; neighbours that do not hear it ask later."""
    for text in addresses:
        address = ipaddress.ip_address(text)
        try:
            if address.version == 4:
                _by_arp(device, address)
            elif not address.is_link_local:
                _by_advertisement(device, address)
        except OSError as error:
            log.warning("%s was not announced on %s: %s", text, device, error)


def _by_arp(device: str, address: ipaddress.IPv4Address) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as made:
        made.bind((device, _ARP))
        mac = made.getsockname()[4]
        for kind in (_REQUEST, _REPLY):  # some listen to one, some to the other (RFC 5944, section 4.6)
            target = bytes(6) if kind == _REQUEST else _BROADCAST
            body = struct.pack("!HHBBH", 1, 0x0800, 6, 4, kind) + mac + address.packed + target + address.packed
            made.send(_BROADCAST + mac + struct.pack("!H", _ARP) + body)


def _by_advertisement(device: str, address: ipaddress.IPv6Address) -> None:
    index = socket.if_nametoindex(device)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as looked:
        looked.bind((device, 0))
        mac = looked.getsockname()[4]
    with _to_all(index) as made:
        made.bind((str(address), 0, 0, index))
        # Type, code, checksum (the kernel fills it in), flags, target, and its link-layer address as an option.
        head = struct.pack("!BBHI", _ADVERTISEMENT, 0, 0, _OVERRIDE)
        made.sendto(head + address.packed + b"\x02\x01" + mac, (_ALL_NODES, 0, 0, index))


def withdraw(device: str) -> None:
    """Tell guests on a device of this thread's namespace that it is no router any more."""
    try:
        index = socket.if_nametoindex(device)
        with _to_all(index) as made:
            # Type, code, checksum, hop limit (none said), flags, lifetime 0, two timers.
            said = struct.pack("!BBHBBHII", _ROUTER_ADVERTISEMENT, 0, 0, 0, 0, 0, 0, 0)
            made.sendto(said, (_ALL_NODES, 0, 0, index))
    except OSError as error:  # the device went first, and guests find out by themselves
        log.info("%s was not withdrawn as a router: %s", device, error)


def _to_all(index: int) -> socket.socket:
    """Return a socket for ICMPv6 to all neighbours on a link; from anywhere further away they would not believe it."""
    made = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
    return made
