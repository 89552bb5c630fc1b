"""A dnsmasq per network: its command line and files, made from checked fields, and the process.

A router that advertises itself has one too, which does nothing else: guests take who sends an advertisement for the
router, so it must come from the router's own device.
"""

import contextlib
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

PROGRAM = "dnsmasq"
LEASE = 86400
ADVERTISE = 60  # seconds between advertisements that nobody has asked for
LIFETIME = 1800  # seconds that a router is taken for one after its last advertisement
STOP_TIMEOUT = 5.0
_DEVICE = "--interface="
_ADVERTISER = "--port=0"  # no DNS: only a router's advertiser is started so


def start(verb: v.StartDnsmasq | v.StartAdvertiser, directory: Path) -> None:
    """Run the server as the verb says; one that runs is only told to read its files again, if that is enough."""
    place = directory / verb.namespace
    place.mkdir(mode=0o755, exist_ok=True)
    if isinstance(verb, v.StartAdvertiser):
        changed, wanted = [], advertiser_command(verb, place)
    else:
        changed = [_write(place / name, text) for name, text in files(verb).items()]
        wanted = command(verb, place)
    pid = running(place)
    if pid is not None and _arguments(pid) == wanted:
        if any(changed):
            os.kill(pid, signal.SIGHUP)
        return
    if pid is not None:
        _end(pid, verb.namespace, keep=wanted)
    with inside(verb.namespace):
        run(wanted)


def stop(namespace: str, directory: Path) -> None:
    """End the server and forget its files."""
    place = directory / namespace
    pid = running(place)
    if pid is not None:
        _end(pid, namespace)
    if place.is_dir():
        for file in place.iterdir():
            file.unlink()
        place.rmdir()


def running(place: Path) -> int | None:
    """Return the process that serves; a number in a file alone may be anybody's."""
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
        f"--user={_user()}",
    ]


def command(verb: v.StartDnsmasq, place: Path) -> list[str]:
    """Return the command line: what a running server cannot be told otherwise."""
    arguments = [
        *_common(place),
        f"{_DEVICE}{verb.device}",
        f"--dhcp-hostsfile={place / 'hosts'}",
        f"--dhcp-optsfile={place / 'options'}",
        f"--addn-hosts={place / 'names'}",
        "--dhcp-authoritative",
        "--dhcp-no-override",
    ]
    if verb.domain.strip("."):
        domain = verb.domain.strip(".")
        arguments += [f"--domain={domain}", f"--local=/{domain}/"]
    arguments += [f"--dhcp-range={_range(number, subnet)}" for number, subnet in enumerate(verb.subnets)]
    if any(subnet.advertise for subnet in verb.subnets):
        # It tells guests how to make their addresses; it does not forward, so it is nobody's default router.
        arguments.append(f"--ra-param={verb.device},mtu:{verb.mtu},{ADVERTISE},0")
    if any(subnet.advertise and subnet.mode == "stateful" for subnet in verb.subnets):
        arguments.append("--enable-ra")  # the other modes say it themselves
    told = [*_search(verb.domain), *_servers(verb.device, verb.subnets)]
    arguments += [f"--dhcp-option={option}" for option in told]
    room = sum(min(network(subnet.cidr).num_addresses, 65536) for subnet in verb.subnets)
    return [*arguments, f"--dhcp-lease-max={max(1, min(room, 1_000_000))}"]


def _range(number: int, subnet: v.DhcpSubnet) -> str:
    served = network(subnet.cidr)
    if served.version == 4:
        return f"set:s{number},{served.network_address},static,{served.netmask},{LEASE}s"
    kind = _KINDS[subnet.mode] if subnet.advertise else "static"
    return f"set:s{number},{served.network_address},{kind},{served.prefixlen},{LEASE}s"


_KINDS: dict[v.Mode, str] = {"stateful": "static", "stateless": "ra-stateless", "slaac": "ra-only"}


def advertiser_command(verb: v.StartAdvertiser, place: Path) -> list[str]:
    """Return the command line of a router's advertiser. What it would answer to DHCP never reaches it (`rulesets`)."""
    arguments = [*_common(place), _ADVERTISER, "--enable-ra"]
    for link in verb.links:
        arguments += [f"{_DEVICE}{link.device}", f"--ra-param={link.device},mtu:{link.mtu},{ADVERTISE},{LIFETIME}"]
    subnets = [subnet for link in verb.links for subnet in link.subnets]
    told = [msgspec.structs.replace(subnet, advertise=True) for subnet in subnets]
    arguments += [f"--dhcp-range={_range(number, subnet)}" for number, subnet in enumerate(told)]
    options = [each for number, subnet in enumerate(told) for each in _options(number, subnet)]
    options += [each for link in verb.links for each in _servers(link.device, link.subnets)]
    return [*arguments, *(f"--dhcp-option={option}" for option in (*_search(verb.domain), *options))]


def _servers(device: str, subnets: Sequence[v.DhcpSubnet]) -> list[str]:
    """Name the DNS servers where guests hear of them by advertisements alone: those know devices, not ranges.

    On the command line, as all that is advertised: without a range to serve by DHCP, no file of options is read.
    """
    known = dict.fromkeys(each for subnet in subnets if subnet.mode == "slaac" for each in subnet.dns)
    return [f"tag:{device},option6:dns-server,{','.join(f'[{each}]' for each in known)}"] if known else []


def _search(domain: str) -> list[str]:
    return [f"option6:domain-search,{domain.strip('.')}"] if domain.strip(".") else []


def files(verb: v.StartDnsmasq) -> dict[str, str]:
    """Return the files that a running server reads again: hosts, options, names."""
    hosts, names = [], []
    options = [f"option:mtu,{verb.mtu}"]
    domain = verb.domain.strip(".")
    for number, subnet in enumerate(verb.subnets):
        options += _options(number, subnet)
    for host in verb.hosts:
        tag = "p" + host.mac.replace(":", "")
        shown = [f"[{each}]" if ":" in each else each for each in host.addresses]
        hosts += [",".join(filter(None, [host.mac, f"set:{tag}", host.name, each])) for each in shown or [""]]
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
        routes.append(f"0.0.0.0/0,{subnet.gateway}")  # whoever reads this option ignores the router's
    if routes:
        lines += [f"{tag},option:classless-static-route,{','.join(routes)}", f"{tag},249,{','.join(routes)}"]
    return lines


def _write(file: Path, text: str) -> bool:
    """Write a file whole, if it says something else so far."""
    try:
        if file.read_text() == text:
            return False
    except FileNotFoundError:
        pass
    fresh = file.with_name(f".{file.name}.new")
    fresh.write_text(text)
    fresh.chmod(0o644)  # the server reads it as a user of its own
    fresh.replace(file)
    return True


def _user() -> str:
    for name in ("dnsmasq", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    return "root"


def _arguments(pid: int) -> list[str]:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [part.decode(errors="replace") for part in raw.split(b"\0")[:-1]]


def _end(pid: int, namespace: str, keep: Sequence[str] = ()) -> None:
    """End a server; guests hear at once that a router which it advertised, and whoever comes next does not, is none."""
    before = _arguments(pid)
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT
    while _arguments(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    if _ADVERTISER in before:
        gone = [each for each in before if each.startswith(_DEVICE) and each not in keep]
        with contextlib.suppress(Failed), inside(namespace):
            for each in gone:
                withdraw(each.removeprefix(_DEVICE))
