"""A DHCPv6 client for guests of tests: `dhcp6.py DEVICE address|options` prints what the server says, as JSON."""

import ipaddress
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path

SOLICIT, ADVERTISE, REQUEST, REPLY, INFORM = 1, 2, 3, 7, 11
CLIENT, SERVER, IA, ADDRESS, WANTED, ELAPSED, STATUS, DNS, SEARCH = 1, 2, 3, 5, 6, 8, 13, 23, 24
TIMEOUT = 15.0


def option(kind: int, body: bytes) -> bytes:
    return struct.pack("!HH", kind, len(body)) + body


def options(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= 4:
        kind, length = struct.unpack_from("!HH", data)
        found[kind], data = data[4 : 4 + length], data[4 + length :]
    return found


def ask(made: socket.socket, kind: int, expected: int, body: bytes) -> dict[int, bytes]:
    """Send a message until it is answered by one of the expected kind."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        number = os.urandom(3)
        try:
            made.sendto(bytes([kind]) + number + body, ("ff02::1:2", 547, 0, made.getsockname()[3]))
            while True:
                answer, _ = made.recvfrom(4096)
                if answer[0] == expected and answer[1:4] == number:
                    return options(answer[4:])
        except OSError:  # nobody answered yet, or the device's own address is not settled
            time.sleep(0.2)
    raise SystemExit("nobody answers")


def main(device: str, what: str) -> None:
    mac = bytes.fromhex(Path(f"/sys/class/net/{device}/address").read_text().strip().replace(":", ""))
    made = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    index = socket.if_nametoindex(device)
    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
    made.bind(("::", 546, 0, index))
    made.settimeout(1.0)
    me = option(CLIENT, struct.pack("!HH", 3, 1) + mac)
    common = me + option(WANTED, struct.pack("!HH", DNS, SEARCH)) + option(ELAPSED, bytes(2))
    if what == "options":
        found = ask(made, INFORM, REPLY, common)
        address = None
    else:
        lease = option(IA, mac[2:] + bytes(8))
        offered = ask(made, SOLICIT, ADVERTISE, common + lease)
        found = ask(made, REQUEST, REPLY, common + option(SERVER, offered[SERVER]) + option(IA, offered[IA]))
        inside = options(found[IA][12:])
        if ADDRESS not in inside:
            raise SystemExit(f"no address: {inside.get(STATUS, b'')!r}")
        address = str(ipaddress.IPv6Address(inside[ADDRESS][:16]))
    servers = found.get(DNS, b"")
    dns = [str(ipaddress.IPv6Address(servers[at : at + 16])) for at in range(0, len(servers), 16)]
    print(json.dumps({"address": address, "dns": dns}))


if __name__ == "__main__":
    main(*sys.argv[1:])
