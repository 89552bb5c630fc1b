"""Each verb of the privileged helper refuses what it is not made for, before anything is touched."""

import typing
from typing import Any

import msgspec
import pytest

from micronova.privileged import verbs as v
from micronova.privileged import wire
from micronova.privileged.checks import Refused, check

PREFIX = "mn-1a2b3c4d"
NETWORK = f"{PREFIX}-n-11111111-11"
ROUTER = f"{PREFIX}-r-22222222-22"
UUID = "11111111-1111-1111-1111-111111111111"
MAC = "fa:16:3e:00:00:01"

# A request for each verb that is all right.
GOOD: dict[str, dict[str, Any]] = {
    "ensure_namespace": {"namespace": NETWORK},
    "delete_namespace": {"namespace": NETWORK},
    "ensure_bridge": {"bridge": "brq11111111-11", "mtu": 1450},
    "ensure_tap": {"tap": "tap11111111-11", "bridge": "brq11111111-11"},
    "adopt_tap": {"tap": "tap11111111-11", "mac": MAC, "guest": UUID},
    "ensure_veth": {
        "outer": "vth11111111-11", "bridge": "brq11111111-11", "namespace": NETWORK, "inner": "dev11111111-11",
        "mac": MAC,
    },
    "delete_link": {"device": "tap11111111-11"},
    "set_addresses": {"namespace": NETWORK, "device": "dev11111111-11", "addresses": ["10.0.0.2/24"]},
    "set_routes": {"namespace": ROUTER, "routes": [{"destination": "0.0.0.0/0", "via": "10.0.0.1"}]},
    "load_firewall": {
        "filtered": [{
            "tap": "tap11111111-11", "zone": 7, "pairs": [{"mac": MAC, "prefix": "10.0.0.3/32"}],
            "rules": [{"ingress": True, "protocol": 6, "low": 22, "high": 22, "remote": "10.0.0.0/8"}],
        }],
        "unfiltered": [{"device": "vth11111111-11", "zone": 7}],
        "groups": [{"id": UUID, "addresses": ["10.0.0.4/32"]}],
    },
    "check_firewall": {},
    "load_router": {
        "namespace": ROUTER, "gateway": "dev11111111-11", "source": "203.0.113.5",
        "floating": [{"floating": "203.0.113.9", "fixed": "10.0.0.3"}],
    },
    "start_dnsmasq": {
        "namespace": NETWORK, "device": "dev11111111-11", "domain": "example.org",
        "subnets": [{"cidr": "10.0.0.0/24", "gateway": "10.0.0.1", "dns": ["10.0.0.2"]}],
        "hosts": [{
            "mac": MAC, "addresses": ["10.0.0.3"], "name": "web",
            "options": [{"name": "ntp-server", "value": "1.2.3.4"}],
        }],
    },
    "start_advertiser": {
        "namespace": ROUTER, "domain": "example.org",
        "links": [{"device": "dev11111111-11", "subnets": [
            {"cidr": "fd00::/64", "dns": ["fd00::2"], "advertise": True, "mode": "slaac"},
        ]}],
    },
    "stop_dnsmasq": {"namespace": NETWORK},
    "ensure_trunk": {"tap": "tap11111111-11", "subports": [{"tap": "tap22222222-22", "vlan": 7}]},
    "set_bandwidth": {"tap": "tap11111111-11", "receive": 1000},
    "inventory": {},
    "ping": {},
    "watch_links": {},
    "listen_metadata": {"namespace": NETWORK},
    "connect": {"address": "203.0.113.9", "port": 22},
    "cleanup": {},
}  # fmt: skip

# What no text of any verb may be: other places, options, other programs' languages, foreign and too long names.
HOSTILE = [
    "", "..", "../../etc/passwd", "/run/netns/other", f"{PREFIX}/../other", "-all", "--help", "eth0", "lo", "docker0",
    "mn-ffffffff", "mn-ffffffff-n-11111111-11", f"{PREFIX}\n", f"{PREFIX};reboot", "$(reboot)", "`reboot`",
    "a b", "tap11111111-11 master eth0", "brq11111111-11\n", "tap" + "1" * 64, "x" * 5000, "\0", "é", "*",
    "10.0.0.1; drop", "10.0.0.1\nadd rule", "{ drop }", 'x"', "10.0.0.1,option:router,6.6.6.6",
    "name\ndhcp-script=/bin/sh", "#", "tag:x", "conf-file=/etc/shadow",
]  # fmt: skip


def send(verb: str, fields: dict[str, Any]) -> v.Verb:
    """Take a verb the way the helper does: decode, then check."""
    decoded = wire.verb(msgspec.msgpack.encode({"verb": verb, **fields}))
    check(decoded, PREFIX)
    return decoded


def texts(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List where there is text in a request."""
    if isinstance(value, str):
        return [path]
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in pairs for found in texts(item, (*path, key))]


def changed(value: Any, path: tuple[Any, ...], text: Any) -> Any:
    if not path:
        return text
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], text)
    return copy


def test_every_verb_is_tried_here() -> None:
    tags = {kind.__struct_config__.tag for kind in typing.get_args(v.AnyVerb)}
    assert tags == set(GOOD)


@pytest.mark.parametrize("verb", GOOD)
def test_a_good_request_passes(verb: str) -> None:
    send(verb, GOOD[verb])


@pytest.mark.parametrize("verb", GOOD)
def test_hostile_text_is_refused_in_every_field(verb: str) -> None:
    for path in texts(GOOD[verb]):
        for text in HOSTILE:
            if path[-1] == "value" and _word(text):
                continue
            if path[-1] in ("name", "domain") and text in ("eth0", "lo", "docker0", "mn-ffffffff", _LIKE_OURS):
                continue  # a guest may be called so
            if path[-1] == "domain" and text == "":
                continue
            with pytest.raises((msgspec.ValidationError, Refused)):
                send(verb, changed(GOOD[verb], path, text))


_LIKE_OURS = "mn-ffffffff-n-11111111-11"


def _word(text: str) -> bool:
    """Whether a text is an ordinary word or path: a DHCP option may tell a guest one, it is never opened here."""
    return len(text) < 255 and all(c.isalnum() or c in "./=:- " for c in text) and text.isascii()


@pytest.mark.parametrize("verb", GOOD)
def test_wrong_types_and_unknown_fields_are_refused(verb: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        send(verb, {**GOOD[verb], "command": "reboot"})
    for path in texts(GOOD[verb]):
        for wrong in (None, 7, ["x"], {"a": 1}, b"x"):
            if wrong is None and path[-1] in ("via", "gateway", "source", "remote"):
                continue  # may be left out
            with pytest.raises((msgspec.ValidationError, Refused)):
                send(verb, changed(GOOD[verb], path, wrong))


def test_there_is_no_other_verb() -> None:
    for name in ("run", "exec", "shell", "", "EnsureBridge", "ensure_bridge\n"):
        with pytest.raises(msgspec.ValidationError):
            send(name, {})


@pytest.mark.parametrize(
    ("verb", "fields"),
    [
        ("set_addresses", {"addresses": ["127.0.0.1/8"]}),
        ("set_addresses", {"addresses": ["224.0.0.1/4"]}),
        ("set_addresses", {"addresses": ["10.0.0.1/33"]}),
        ("set_addresses", {"device": "eth0"}),
        ("set_routes", {"routes": [{"destination": "10.0.0.0/8"}]}),
        ("set_routes", {"routes": [{"destination": "10.0.0.0/8", "via": "fe80::1"}]}),
        ("adopt_tap", {"mac": "01:00:5e:00:00:01"}),
        ("ensure_veth", {"mac": "01:00:5e:00:00:01"}),
        ("ensure_veth", {"namespace": PREFIX}),
        ("start_dnsmasq", {"namespace": PREFIX}),
        ("listen_metadata", {"namespace": PREFIX}),
        ("load_router", {"namespace": PREFIX}),
        ("load_router", {"gateway": None}),
        ("connect", {"address": "127.0.0.1"}),
        ("connect", {"address": "169.254.1.1"}),
        ("connect", {"port": 0}),
        ("ensure_bridge", {"mtu": 1}),
        ("ensure_bridge", {"mtu": 10**9}),
        ("set_bandwidth", {"receive": -1}),
        ("ensure_trunk", {"subports": [{"tap": "tap22222222-22", "vlan": 0}]}),
        ("ensure_trunk", {"subports": [{"tap": "tap22222222-22", "vlan": 4095}]}),
        ("ensure_trunk", {"subports": [{"tap": "tap11111111-11", "vlan": 7}]}),
        ("ensure_trunk", {"subports": [{"tap": f"tap22222222-2{n}", "vlan": 7} for n in (1, 2)]}),
        ("set_bandwidth", {"send": 10**9}),
        ("start_advertiser", {"namespace": PREFIX}),
        ("start_advertiser", {"links": []}),
        ("start_advertiser", {"links": [{"device": "dev11111111-11", "subnets": [{"cidr": "10.0.0.0/24"}]}]}),
        ("start_dnsmasq", {"subnets": [{"cidr": "10.0.0.0/24", "mode": "slaac"}]}),
        ("start_dnsmasq", {"subnets": [{"cidr": "fd00::/48", "mode": "slaac"}]}),
        ("load_firewall", {"unfiltered": [{"device": "tap11111111-11", "zone": 1}]}),  # twice
        ("load_firewall", {"groups": [{"id": UUID, "addresses": ["10.0.0.4"]}]}),
    ],
)
def test_what_has_the_right_form_and_makes_no_sense_is_refused(verb: str, fields: dict[str, Any]) -> None:
    with pytest.raises((msgspec.ValidationError, Refused)):
        send(verb, {**GOOD[verb], **fields})


def test_a_rule_cannot_name_what_is_not_there() -> None:
    for rule in (
        {"ingress": True, "remote_group": "22222222-2222-2222-2222-222222222222"},
        {"ingress": True, "version": 6, "remote": "10.0.0.0/8"},
        {"ingress": True, "version": 5},
        {"ingress": True, "low": 22},
        {"ingress": True, "protocol": 256},
        {"ingress": True, "protocol": 6, "low": 70000},
    ):
        with pytest.raises((msgspec.ValidationError, Refused)):
            send("load_firewall", changed(GOOD["load_firewall"], ("filtered", 0, "rules"), [rule]))
