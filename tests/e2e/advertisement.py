"""Asks for router advertisements on a device and prints what each router says, one JSON object a line."""

import ipaddress
import json
import socket
import struct
import sys
import time
from typing import Any

SOLICIT, ADVERT = 133, 134
PREFIX, MTU, DNS = 3, 5, 25
TIMEOUT = 10.0
SILENCE = 1.5  # seconds after an answer in which others may follow


def parsed(data: bytes, source: str) -> dict[str, Any]:
    """Return what an advertisement says."""
    flags, lifetime = data[5], struct.unpack_from("!H", data, 6)[0]
    found: dict[str, Any] = {
        "source": source.partition("%")[0], "managed": bool(flags & 0x80), "other": bool(flags & 0x40),
        "lifetime": lifetime, "mtu": None, "dns": [], "prefixes": {},
    }  # fmt: skip
    at = 16
    while at + 2 <= len(data):
        kind, length = data[at], data[at + 1] * 8
        body = data[at : at + length]
        if kind == PREFIX:
            shown = f"{ipaddress.IPv6Address(body[16:32])}/{body[2]}"
            found["prefixes"][shown] = bool(body[3] & 0x40)
        elif kind == MTU:
            found["mtu"] = struct.unpack_from("!I", body, 4)[0]
        elif kind == DNS:
            found["dns"] += [str(ipaddress.IPv6Address(body[n : n + 16])) for n in range(8, length, 16)]
        at += length
    return found


def main(device: str) -> None:
    index = socket.if_nametoindex(device)
    made = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
    made.settimeout(SILENCE)
    routers: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + TIMEOUT
    while not routers and time.monotonic() < deadline:
        try:
            made.sendto(struct.pack("!BBHI", SOLICIT, 0, 0, 0), ("ff02::2", 0, 0, index))
            while True:
                data, (source, *_) = made.recvfrom(4096)
                if data[0] == ADVERT:
                    routers[source] = parsed(data, source)
        except OSError:  # nobody answered any more, or the device's own address is not settled
            time.sleep(0.1)
    for each in routers.values():
        print(json.dumps(each))


if __name__ == "__main__":
    main(*sys.argv[1:])
