"""The dnsmasq processes of networks and routers: command lines and files from checked fields, start and stop.

A network has one as DHCP and DNS server. A router that advertises itself has one that does nothing else, because
guests take the sender of an advertisement as their router, so it must come from the router's own device.
"""

import contextlib
import grp
import os
import pwd
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from micronova.privileged import verbs as v
from micronova.privileged.announce import withdraw
from micronova.privileged.checks import network
from micronova.privileged.kernel import Failed, inside, run
from micronova.privileged.rulesets import server

PROGRAM = "dnsmasq"
LEASE = 86400
ADVERTISE = 60  # seconds between unsolicited router advertisements
LIFETIME = 1800  # seconds for which guests use a router after its last advertisement
STOP_TIMEOUT = 5.0
_DEVICE = "--interface="
_SET_TAG = "set:"
_ADVERTISER = "--port=0"  # no DNS; only a router's advertiser has this argument


def start(verb: v.StartDnsmasq | v.StartAdvertiser, directory: Path) -> int:
    """Start the server and return its process id; one with the same command line only reads its changed files again.

    dnsmasq 2.90 crashes if it reads its hosts again after it served one that sets a tag: it follows the tag's pointer
    to the next one, which the request has left in a stack frame. So a server with such hosts is replaced.
    """
    place = directory / verb.namespace
    place.mkdir(mode=0o755, exist_ok=True)
    tagged = _sets_tags(place / "hosts")
    if isinstance(verb, v.StartAdvertiser):
        changed, wanted = [], advertiser_command(verb, place)
    else:
        changed = [_write(place / name, text) for name, text in files(verb).items()]
        wanted = command(verb, place)
    pid = running(place)
    if pid is not None and _arguments(pid) == wanted:
        if not any(changed):
            return pid
        if not tagged:
            os.kill(pid, signal.SIGHUP)
            return pid
    if pid is not None:
        _end(pid, verb.namespace, keep=wanted)
    with inside(verb.namespace):
        if isinstance(verb, v.StartDnsmasq):
            run(["nft", "-f", "-"], server())
        run(wanted)
    pid = running(place)
    if pid is None:
        raise Failed(f"dnsmasq ended as soon as it had started in {verb.namespace}.")
    return pid


def stop(namespace: str, directory: Path) -> None:
    """End the server and delete its files."""
    place = directory / namespace
    pid = running(place)
    if pid is not None:
        _end(pid, namespace)
    if place.is_dir():
        for file in place.iterdir():
            file.unlink()
        place.rmdir()


def running(place: Path) -> int | None:
    """Return the id of the server's process; its command line is checked, because ids are reused."""
    try:
        pid = int((place / "pid").read_text())
    except (OSError, ValueError):
        return None
    return pid if f"--pid-file={place / 'pid'}" in _arguments(pid) else None


def _common(place: Path) -> list[str]:
    return [
        PROGRAM,
        "--conf-file=/dev/null",
        "--no-hosts",
        "--no-resolv",
        "--bind-dynamic",
        "--except-interface=lo",
        f"--pid-file={place / 'pid'}",
        "--leasefile-ro",
        "--log-facility=/dev/null",
        f"--user={_user().pw_name}",
        f"--group={grp.getgrgid(_user().pw_gid).gr_name}",
    ]


def command(verb: v.StartDnsmasq, place: Path) -> list[str]:
    """Return the command line; a change of it needs a restart."""
    arguments = [
        *_common(place),
        f"{_DEVICE}{verb.device}",
        f"--dhcp-hostsfile={place / 'hosts'}",
        f"--dhcp-optsfile={place / 'options'}",
        f"--addn-hosts={place / 'names'}",
        "--dhcp-authoritative",
        "--dhcp-no-override",
        # There is no other server to ask about names without a domain and about private addresses.
        "--domain-needed",
        "--bogus-priv",
    ]
    if verb.domain.strip("."):
        domain = verb.domain.strip(".")
        arguments += [f"--domain={domain}", f"--local=/{domain}/"]
    arguments += [f"--dhcp-range={_range(number, subnet)}" for number, subnet in enumerate(verb.subnets)]
    if any(subnet.advertise for subnet in verb.subnets):
        # It tells guests how to get addresses. It does not forward, so its lifetime as a router is 0.
        arguments.append(f"--ra-param={verb.device},mtu:{verb.mtu},{ADVERTISE},0")
    if any(subnet.advertise and subnet.mode == "stateful" for subnet in verb.subnets):
        arguments.append("--enable-ra")  # the other modes imply it
    options = [*_search(verb.domain), *_servers(verb.device, verb.subnets)]
    arguments += [f"--dhcp-option={option}" for option in options]
    leases = sum(min(network(subnet.cidr).num_addresses, 65536) for subnet in verb.subnets)
    return [*arguments, f"--dhcp-lease-max={max(1, min(leases, 1_000_000))}"]


def _range(number: int, subnet: v.DhcpSubnet) -> str:
    served = network(subnet.cidr)
    if served.version == 4:
        return f"set:s{number},{served.network_address},static,{served.netmask},{LEASE}s"
    kind = _KINDS[subnet.mode] if subnet.advertise else "static"
    return f"set:s{number},{served.network_address},{kind},{served.prefixlen},{LEASE}s"


_KINDS: dict[v.Mode, str] = {"stateful": "static", "stateless": "ra-stateless", "slaac": "ra-only"}


def advertiser_command(verb: v.StartAdvertiser, place: Path) -> list[str]:
    """Return the command line of a router's advertiser; the router's rule set keeps DHCP requests from it."""
    arguments = [*_common(place), _ADVERTISER, "--enable-ra"]
    for link in verb.links:
        arguments += [f"{_DEVICE}{link.device}", f"--ra-param={link.device},mtu:{link.mtu},{ADVERTISE},{LIFETIME}"]
    subnets = [subnet for link in verb.links for subnet in link.subnets]
    advertised = [msgspec.structs.replace(subnet, advertise=True) for subnet in subnets]
    arguments += [f"--dhcp-range={_range(number, subnet)}" for number, subnet in enumerate(advertised)]
    options = [each for number, subnet in enumerate(advertised) for each in _options(number, subnet)]
    options += [each for link in verb.links for each in _servers(link.device, link.subnets)]
    return [*arguments, *(f"--dhcp-option={option}" for option in (*_search(verb.domain), *options))]


def _servers(device: str, subnets: Sequence[v.DhcpSubnet]) -> list[str]:
    """Return the options for DNS servers that only advertisements carry; these are per device, not per range.

    They stand on the command line, because dnsmasq reads no options file if it serves no range by DHCP.
    """
    known = dict.fromkeys(each for subnet in subnets if subnet.mode == "slaac" for each in subnet.dns)
    return [f"tag:{device},option6:dns-server,{','.join(f'[{each}]' for each in known)}"] if known else []


def _search(domain: str) -> list[str]:
    return [f"option6:domain-search,{domain.strip('.')}"] if domain.strip(".") else []


def files(verb: v.StartDnsmasq) -> dict[str, str]:
    """Return the files that a running server can read again: hosts, options, names."""
    hosts, names = [], []
    options = [f"option:mtu,{verb.mtu}"]
    domain = verb.domain.strip(".")
    for number, subnet in enumerate(verb.subnets):
        options += _options(number, subnet)
    for host in verb.hosts:
        tag = "p" + host.mac.replace(":", "")
        tags = f"{_SET_TAG}{tag}" if host.options else ""
        shown = [f"[{each}]" if ":" in each else each for each in host.addresses]
        hosts += [",".join(filter(None, [host.mac, tags, host.name, each])) for each in shown or [""]]
        for option in host.options:
            kind = "option6" if option.version == 6 else "option"
            named = option.name if option.name.isdecimal() else f"{kind}:{option.name}"
            options.append(f"tag:{tag},{named},{option.value}")
        fqdn = f" {host.name}.{domain}" if domain else ""
        names += [f"{each} {host.name}{fqdn}" for each in (*host.addresses, *host.own)]
    return {name: "".join(f"{line}\n" for line in lines) for name, lines in
            {"hosts": hosts, "options": options, "names": names}.items()}  # fmt: skip


def _options(number: int, subnet: v.DhcpSubnet) -> list[str]:
    tag = f"tag:s{number}"
    if network(subnet.cidr).version == 6:
        asked = subnet.dns and subnet.mode != "slaac"
        return [f"{tag},option6:dns-server,{','.join(f'[{each}]' for each in subnet.dns)}"] if asked else []
    lines = [f"{tag},option:router,{subnet.gateway}" if subnet.gateway else f"{tag},option:router"]
    if subnet.dns:
        lines.append(f"{tag},option:dns-server,{','.join(subnet.dns)}")
    routes = [f"{route.destination},{route.via}" for route in subnet.routes]
    if subnet.gateway and routes:
        routes.append(f"0.0.0.0/0,{subnet.gateway}")  # this option overrides the router option (RFC 3442)
    if routes:
        lines += [f"{tag},option:classless-static-route,{','.join(routes)}", f"{tag},249,{','.join(routes)}"]
    return lines


def _sets_tags(hosts: Path) -> bool:
    """Return whether a host of the file that the running server has read sets a tag."""
    try:
        return f",{_SET_TAG}" in hosts.read_text()
    except FileNotFoundError:
        return False


def _write(file: Path, text: str) -> bool:
    """Replace a file atomically if its text differs; return whether it did."""
    try:
        if file.read_text() == text:
            return False
    except FileNotFoundError:
        pass
    fresh = file.with_name(f".{file.name}.new")
    fresh.write_text(text)
    fresh.chmod(0o644)  # the server runs as another user
    fresh.replace(file)
    return True


def prepare(directory: Path) -> None:
    """Make the directory of the servers' files, which name tenants' hosts: only root and the servers may read it."""
    directory.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    os.chown(directory, -1, _user().pw_gid)
    directory.chmod(0o750)


def _user() -> pwd.struct_passwd:
    """Return the user that servers run as."""
    for name in ("dnsmasq", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return pwd.getpwuid(0)


def _arguments(pid: int) -> list[str]:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [part.decode(errors="replace") for part in raw.split(b"\0")[:-1]]


def _end(pid: int, namespace: str, keep: Sequence[str] = ()) -> None:
    """End a server; withdraw the routers that it advertised, except on the devices in the next command line."""
    before = _arguments(pid)
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT
    while _arguments(pid):
        if time.monotonic() > deadline + STOP_TIMEOUT:
            raise Failed(f"dnsmasq (process {pid}) does not end: the kernel does not let go of it.")
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    if _ADVERTISER in before:
        gone = [each for each in before if each.startswith(_DEVICE) and each not in keep]
        with contextlib.suppress(Failed), inside(namespace):
            for each in gone:
                withdraw(each.removeprefix(_DEVICE))
