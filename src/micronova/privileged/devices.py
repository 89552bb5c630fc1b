"""Devices, addresses, routes and bandwidth limits, by iproute2. Each function may be repeated."""

import json
from collections.abc import Sequence
from typing import Any

from micronova.privileged import verbs as v
from micronova.privileged.announce import announce
from micronova.privileged.kernel import (
    NAMESPACES,
    Failed,
    check_bridge_filter,
    ensure_bridge_filter,
    has_namespace,
    inside,
    run,
    sysctl,
)
from micronova.privileged.names import IN_CLOUD_NAMESPACE, ifb_name


def namespaces(prefix: str) -> list[str]:
    """Return the namespaces of a cloud."""
    if not NAMESPACES.is_dir():
        return []
    return sorted(e.name for e in NAMESPACES.iterdir() if e.name == prefix or e.name.startswith(f"{prefix}-"))


def ensure_namespace(verb: v.EnsureNamespace, prefix: str) -> None:
    """Create a namespace and set its kernel parameters."""
    if not has_namespace(verb.namespace):
        run(["ip", "netns", "add", verb.namespace])
    with inside(verb.namespace):
        if verb.namespace == prefix:
            ensure_bridge_filter()
        run(["ip", "link", "set", "lo", "up"])
        for family in ("ipv4", "ipv6"):
            sysctl(f"{family}/conf/all/forwarding", "1" if verb.forward else "0")
        # A router may have several devices on one network: each answers ARP for its own addresses only.
        sysctl("ipv4/conf/all/arp_ignore", "1")
        sysctl("ipv4/conf/all/arp_announce", "2")
        sysctl("ipv6/conf/default/accept_dad", "0")
        sysctl("ipv6/conf/default/accept_ra", "0")


def delete_namespace(namespace: str) -> None:
    """Delete a namespace and its devices, even if a process still runs in it."""
    if not has_namespace(namespace):
        return
    with inside(namespace):
        for name in links():
            if name.startswith((*IN_CLOUD_NAMESPACE, "dev")):
                run(["ip", "link", "delete", name], quiet=True)
    run(["ip", "netns", "delete", namespace])


def links() -> dict[str, dict[str, Any]]:
    """Return the devices of this thread's namespace by name."""
    found = json.loads(run(["ip", "-json", "-details", "link", "show"]) or "[]")
    return {link["ifname"]: link for link in found if "ifname" in link}


def link_of(name: str) -> dict[str, Any] | None:
    """Return one device of this thread's namespace; among hundreds this is faster than `links`."""
    found = json.loads(run(["ip", "-json", "link", "show", "dev", name], quiet=True) or "[]")
    return found[0] if found else None


def ensure_bridge(verb: v.EnsureBridge, namespace: str) -> None:
    """Create a bridge without multicast snooping, forward delay and IPv6 addresses of its own."""
    with inside(namespace):
        link = link_of(verb.bridge)
        if link is None:
            run(["ip", "link", "add", verb.bridge, "type", "bridge", "mcast_snooping", "0", "forward_delay", "0"])
            sysctl(f"ipv6/conf/{verb.bridge}/disable_ipv6", "1")
        if link is None or link.get("mtu") != verb.mtu or "UP" not in link.get("flags", ()):
            run(["ip", "link", "set", verb.bridge, "mtu", str(verb.mtu), "up"])


def ensure_tap(verb: v.EnsureTap, namespace: str) -> bool:
    """Plug a tap into its bridge; return False if there is no such tap.

    Raise Failed if the kernel would not filter its packets.
    """
    with inside(namespace):
        check_bridge_filter()
        link = link_of(verb.tap)
        if link is None:
            if not verb.create:
                return False
            run(["ip", "tuntap", "add", "dev", verb.tap, "mode", "tap"])
            link = {}
        _on_bridge(verb.tap, verb.bridge, verb.mtu, link)
    return True


def _on_bridge(device: str, bridge: str, mtu: int, link: dict[str, Any]) -> None:
    if link.get("master") == bridge and link.get("mtu") == mtu and "UP" in link.get("flags", ()):
        return
    sysctl(f"ipv6/conf/{device}/disable_ipv6", "1")
    run(["ip", "link", "set", device, "mtu", str(mtu), "master", bridge, "up"])


def ensure_veth(verb: v.EnsureVeth, namespace: str) -> None:
    """Connect a namespace to a bridge by a veth pair."""
    with inside(verb.namespace):
        inner = link_of(verb.inner)
    with inside(namespace):
        outer = link_of(verb.outer)
        if (inner is None) != (outer is None):  # one end is missing: create the pair anew
            if outer is not None:
                run(["ip", "link", "delete", verb.outer], quiet=True)
            outer = inner = None
        if outer is None:
            pair = ["type", "veth", "peer", "name", verb.inner, "netns", verb.namespace, "address", verb.mac]
            run(["ip", "link", "add", verb.outer, *pair])
            outer = {}
        _on_bridge(verb.outer, verb.bridge, verb.mtu, outer)
    inner = inner or {}
    same = inner.get("mtu") == verb.mtu and inner.get("address") == verb.mac and "UP" in inner.get("flags", ())
    if not same:
        with inside(verb.namespace):
            run(["ip", "link", "set", verb.inner, "address", verb.mac, "mtu", str(verb.mtu), "up"])


def delete_link(device: str, namespace: str) -> None:
    """Delete a device."""
    with inside(namespace):
        if link_of(device) is not None:
            run(["ip", "link", "delete", device])


def set_addresses(verb: v.SetAddresses) -> None:
    """Add and remove addresses of a device; those that it keeps are not touched."""
    with inside(verb.namespace):
        found = json.loads(run(["ip", "-json", "address", "show", "dev", verb.device]) or "[]")
        held = {
            f"{each['local']}/{each['prefixlen']}"
            for link in found
            for each in link.get("addr_info", ())
            if each.get("scope") != "link" or each.get("family") == "inet"
        }
        fresh = sorted(set(verb.addresses) - held)
        for address in fresh:
            if ":" in address:
                sysctl(f"ipv6/conf/{verb.device}/disable_ipv6", "0")
                run(["ip", "address", "replace", address, "dev", verb.device, "nodad"])
            else:
                run(["ip", "address", "replace", address, "dev", verb.device])
        for address in sorted(held - set(verb.addresses)):
            run(["ip", "address", "delete", address, "dev", verb.device], quiet=True)
        if fresh and any("UP" in link.get("flags", ()) for link in found):
            announce(verb.device, [address.partition("/")[0] for address in fresh])


def set_routes(verb: v.SetRoutes) -> None:
    """Set the static routes of a namespace."""
    with inside(verb.namespace):
        for family in ("-4", "-6"):
            routes = [r for r in verb.routes if (":" in r.destination) == (family == "-6")]
            _set_routes(family, routes)


def _set_routes(family: str, routes: Sequence[v.Route]) -> None:
    shown = json.loads(run(["ip", "-json", family, "route", "show", "proto", "static"]) or "[]")
    held = {(_full(r["dst"], family), r.get("gateway"), r.get("dev")) for r in shown}
    wanted = {(route.destination, route.via): route for route in routes}
    for (destination, via), route in wanted.items():
        if any((destination, via) == (d, g) and route.device in (None, dev) for d, g, dev in held):
            continue
        where = [*(["via", via] if via else []), *(["dev", route.device] if route.device else [])]
        onlink = ["onlink"] if via and route.device else []
        run(["ip", family, "route", "replace", destination, *where, *onlink, "proto", "static"])
    for destination, via, device in held:
        if destination not in {each for each, _ in wanted}:
            where = [*(["via", via] if via else []), *(["dev", device] if device else [])]
            run(["ip", family, "route", "delete", destination, *where, "proto", "static"], quiet=True)


def _full(destination: str, family: str) -> str:
    if destination == "default":
        return "0.0.0.0/0" if family == "-4" else "::/0"
    return destination if "/" in destination else f"{destination}/{32 if family == '-4' else 128}"


def set_bandwidth(verb: v.SetBandwidth, namespace: str) -> None:
    """Limit a guest's bandwidth: what it receives at its tap, what it sends at an ifb device."""
    ifb = ifb_name(verb.tap)
    with inside(namespace):
        tap, ifb_link = link_of(verb.tap), link_of(ifb)
        if tap is None:
            return
        if verb.receive:
            run(["tc", "qdisc", "replace", "dev", verb.tap, "root", *_bucket(verb.receive, verb.receive_burst)])
        elif tap.get("qdisc") == "tbf":
            run(["tc", "qdisc", "delete", "dev", verb.tap, "root"])
        if verb.send:
            if ifb_link is None:
                run(["ip", "link", "add", ifb, "type", "ifb"])
            run(["tc", "qdisc", "replace", "dev", ifb, "root", *_bucket(verb.send, verb.send_burst)])
            run(["ip", "link", "set", ifb, "up"])
            run(["tc", "qdisc", "add", "dev", verb.tap, "ingress"], quiet=True)
            run(["tc", "filter", "delete", "dev", verb.tap, *_REDIRECTION], quiet=True)
            everything = ["protocol", "all", "u32", "match", "u32", "0", "0"]
            redirect = ["action", "mirred", "egress", "redirect", "dev", ifb]
            run(["tc", "filter", "add", "dev", verb.tap, *_REDIRECTION, *everything, *redirect])
        elif ifb_link is not None:
            run(["tc", "filter", "delete", "dev", verb.tap, *_REDIRECTION], quiet=True)
            run(["ip", "link", "delete", ifb])


# The filter that redirects what a guest sends; the program of a trunk (`vlans.py`) comes before it.
_REDIRECTION = ("parent", "ffff:", "pref", "49152")


def _bucket(rate: int, burst: int) -> list[str]:
    """Return a token bucket for the burst or a tenth of a second of traffic, and at least for some full frames."""
    held = max((burst or rate // 10) * 1000 // 8, 32_768)
    return ["tbf", "rate", f"{rate}kbit", "burst", str(held), "latency", "100ms"]


def load_ruleset(namespace: str, ruleset: str) -> None:
    """Load an nftables rule set in one transaction."""
    with inside(namespace):
        run(["nft", "-f", "-"], ruleset)


def inventory(prefix: str) -> tuple[list[str], dict[str, v.Link]]:
    """Return a cloud's namespaces, and the devices in the namespace with its bridges."""
    present = namespaces(prefix)
    found: dict[str, v.Link] = {}
    if prefix in present:
        try:
            with inside(prefix):
                listed = links()
            found = {
                name: v.Link(
                    index=link["ifindex"],
                    bridge=link.get("master", ""),
                    up="UP" in link.get("flags", ()),
                    limited=link.get("qdisc") == "tbf" or ifb_name(name) in listed,
                    trunk=link.get("ifalias") == "trunk",
                )
                for name, link in listed.items()
                if name.startswith(IN_CLOUD_NAMESPACE)
            }
        except Failed:
            found = {}
    return present, found
