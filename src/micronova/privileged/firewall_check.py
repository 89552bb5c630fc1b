"""The check that this kernel filters bridged packets.

Two taps on a bridge in a namespace of its own have the rule set of two ports. A closed port must not receive a packet,
a forged source address must not pass, and an open port must receive. So a kernel without the features on which
security groups rely is found before a guest is wired.
"""

import fcntl
import ipaddress
import os
import select
import struct
import time
from collections.abc import Sequence

from micronova.privileged import verbs as v
from micronova.privileged.kernel import Failed, ensure_bridge_filter, fresh_namespace, run
from micronova.privileged.rulesets import firewall

TIMEOUT = 10.0  # seconds within which the open port must have received
RESEND = 0.1  # seconds after which the packets are sent again
_BRIDGE = "brq00000000-00"
_TAPS = ("tap00000000-01", "tap00000000-02")
_MACS = ("fa:16:3e:00:00:01", "fa:16:3e:00:00:02")
_ADDRESSES = {4: ("192.0.2.1", "192.0.2.2", "192.0.2.3"), 6: ("2001:db8::1", "2001:db8::2", "2001:db8::3")}
_OPEN, _CLOSED = 7001, 7002
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 2, 0x1000
_UDP = 17


def check_firewall() -> None:
    """Raise Failed unless the firewall of guests works on this kernel."""
    with fresh_namespace():
        ensure_bridge_filter()
        run(["ip", "link", "add", _BRIDGE, "type", "bridge", "mcast_snooping", "0", "forward_delay", "0"])
        run(["ip", "link", "set", _BRIDGE, "up"])
        taps: list[int] = []
        try:
            for name in _TAPS:
                taps.append(_open_tap(name))
                run(["ip", "link", "set", name, "master", _BRIDGE, "up"])
            run(["nft", "-f", "-"], firewall(_rules()))
            for version in _ADDRESSES:
                _try(taps, version)
        finally:
            for each in taps:
                os.close(each)


def _rules() -> v.LoadFirewall:
    pairs = [
        tuple(v.Pair(mac=mac, prefix=_whole(addresses[number])) for addresses in _ADDRESSES.values())
        for number, mac in enumerate(_MACS)
    ]
    sends = tuple(v.FilterRule(ingress=False, version=version) for version in _ADDRESSES)
    receives = tuple(
        v.FilterRule(ingress=True, version=version, protocol=_UDP, low=_OPEN, high=_OPEN) for version in _ADDRESSES
    )
    return v.LoadFirewall(
        filtered=(
            v.FilteredPort(tap=_TAPS[0], zone=1, pairs=pairs[0], rules=sends),
            v.FilteredPort(tap=_TAPS[1], zone=1, pairs=pairs[1], rules=receives),
        )
    )


def _whole(address: str) -> str:
    return str(ipaddress.ip_network(address))


def _try(taps: Sequence[int], version: int) -> None:
    source, destination, forged = _ADDRESSES[version]
    closed = datagram(source, destination, _CLOSED)
    spoofed = datagram(forged, destination, _OPEN)
    opened = datagram(source, destination, _OPEN)
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        # The bridge keeps the order: when the last one has arrived, the others would have arrived before.
        for each in (closed, spoofed, opened):
            os.write(taps[0], each)
        resend = time.monotonic() + RESEND
        while (left := resend - time.monotonic()) > 0 and select.select([taps[1]], [], [], left)[0]:
            received = os.read(taps[1], 1 << 16)
            if received == closed:
                raise Failed(f"The kernel does not filter bridged packets: a closed port received IPv{version}.")
            if received == spoofed:
                raise Failed(f"The kernel does not filter bridged packets: a forged IPv{version} address passed.")
            if received == opened:
                return
    raise Failed(f"The firewall does not work on this kernel: an open port received no IPv{version} packet.")


def _open_tap(name: str) -> int:
    try:
        made = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Failed(f"Guests need /dev/net/tun: {error.strerror}.") from None
    try:
        fcntl.ioctl(made, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    except BaseException:
        os.close(made)
        raise
    return made


def datagram(source: str, destination: str, port: int) -> bytes:
    """Return an Ethernet frame with an empty UDP datagram from the first tap to the second."""
    ours, theirs = ipaddress.ip_address(source), ipaddress.ip_address(destination)
    ends = ours.packed + theirs.packed
    udp = struct.pack("!4H", port, port, 8, 0)
    pseudo = ends + struct.pack("!xBH", _UDP, len(udp))  # with a length of 16 bits it has the same sum in IPv6
    udp = udp[:6] + struct.pack("!H", _checksum(pseudo + udp))
    if ours.version == 4:
        head = struct.pack("!BBHHHBBH", 0x45, 0, 28, 0, 0, 64, _UDP, 0) + ends
        head = head[:10] + struct.pack("!H", _checksum(head)) + head[12:]
        kind = 0x0800
    else:
        head = struct.pack("!IHBB", 6 << 28, 8, _UDP, 64) + ends
        kind = 0x86DD
    macs = b"".join(bytes.fromhex(mac.replace(":", "")) for mac in reversed(_MACS))
    return macs + struct.pack("!H", kind) + head + udp


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
