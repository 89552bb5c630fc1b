"""Parsing of netlink messages about devices."""

import struct

from micronova.embedded.network.agent.links import appeared

NEW, GONE = 16, 17
NAME, ADDRESS = 3, 1


def attribute(kind: int, value: bytes) -> bytes:
    return (struct.pack("=HH", 4 + len(value), kind) + value).ljust((4 + len(value) + 3) & ~3, b"\0")


def message(kind: int, *attributes: bytes) -> bytes:
    body = bytes(16) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def test_the_names_of_devices_that_came() -> None:
    mac = attribute(ADDRESS, bytes(6))
    told = (
        message(NEW, mac, attribute(NAME, b"tap11111111-11\0"))
        + message(GONE, attribute(NAME, b"eth9\0"))
        + message(NEW, attribute(NAME, b"eth0\0"), mac)
        + message(NEW, mac)
    )
    assert list(appeared(told)) == ["tap11111111-11", "eth0"]


def test_what_is_cut_off_or_makes_no_sense_says_nothing() -> None:
    whole = message(NEW, attribute(NAME, b"tap11111111-11\0"))
    for told in (b"", b"\0" * 64, whole[:20], whole[:10], struct.pack("=IHHII", 4, NEW, 0, 0, 0)):
        assert list(appeared(told)) == []
    assert list(appeared(message(NEW, struct.pack("=HH", 0, NAME)))) == []
