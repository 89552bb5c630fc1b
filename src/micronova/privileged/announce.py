"""Announcements on a link: an address has moved (gratuitous ARP, unsolicited neighbour advertisement), a router goes.

Other devices on the link cache the MAC address of an address. Without an announcement they could not reach an address
that has moved, such as a floating IP on another router, until their cache entries expire.
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
    """Announce addresses of a device in this thread's namespace; a failure is logged, because caches expire anyway."""
    for text in addresses:
        address = ipaddress.ip_address(text)
        try:
            if address.version == 4:
                _by_arp(device, address)
            elif not address.is_link_local:
                _by_advertisement(device, address)
        except OSError as error:
            log.warning("cannot announce %s on %s: %s", text, device, error)


def _by_arp(device: str, address: ipaddress.IPv4Address) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as made:
        made.bind((device, _ARP))
        mac = made.getsockname()[4]
        for kind in (_REQUEST, _REPLY):  # devices may heed only one of them (RFC 5944, section 4.6)
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
    """Tell guests that a device of this thread's namespace is no longer a router."""
    try:
        index = socket.if_nametoindex(device)
        with _to_all(index) as made:
            # Type, code, checksum, hop limit (unspecified), flags, lifetime 0, two timers.
            message = struct.pack("!BBHBBHII", _ROUTER_ADVERTISEMENT, 0, 0, 0, 0, 0, 0, 0)
            made.sendto(message, (_ALL_NODES, 0, 0, index))
    except OSError as error:  # the device may be gone; guests notice when the router's lifetime ends
        log.info("cannot withdraw %s as a router: %s", device, error)


def _to_all(index: int) -> socket.socket:
    """Return a socket for ICMPv6 to all nodes on a link; they accept it only with a hop limit of 255 (RFC 4861)."""
    made = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
    return made
