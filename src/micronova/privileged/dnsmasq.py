"""A dnsmasq per network: its command line and files, made from checked fields, and the process."""

import os
import pwd
import signal
import time
from pathlib import Path

from micronova.privileged import verbs as v
from micronova.privileged.checks import network
from micronova.privileged.kernel import inside, run

PROGRAM = "dnsmasq"
LEASE = 86400
STOP_TIMEOUT = 5.0


def start(verb: v.StartDnsmasq, directory: Path) -> None:
    """Run the server as the verb says; one that runs is only told to read its files again, if that is enough."""
    place = directory / verb.namespace
    place.mkdir(mode=0o755, exist_ok=True)
    changed = [_write(place / name, text) for name, text in files(verb).items()]
    wanted = command(verb, place)
    pid = running(place)
    if pid is not None and _arguments(pid) == wanted:
        if any(changed):
            os.kill(pid, signal.SIGHUP)
        return
    if pid is not None:
        _end(pid)
    with inside(verb.namespace):
        run(wanted)


def stop(namespace: str, directory: Path) -> None:
    """End the server and forget its files."""
    place = directory / namespace
    pid = running(place)
    if pid is not None:
        _end(pid)
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


def command(verb: v.StartDnsmasq, place: Path) -> list[str]:
    """Return the command line: what a running server cannot be told otherwise."""
    arguments = [
        PROGRAM,
        "--conf-file=/dev/null",
        "--no-hosts",
        "--no-resolv",
        "--bind-dynamic",
        f"--interface={verb.device}",
        "--except-interface=lo",
        f"--pid-file={place / 'pid'}",
        f"--dhcp-hostsfile={place / 'hosts'}",
        f"--dhcp-optsfile={place / 'options'}",
        f"--addn-hosts={place / 'names'}",
        "--leasefile-ro",
        "--dhcp-authoritative",
        "--dhcp-no-override",
        "--log-facility=/dev/null",
        f"--user={_user()}",
    ]
    if verb.domain.strip("."):
        domain = verb.domain.strip(".")
        arguments += [f"--domain={domain}", f"--local=/{domain}/"]
    room = 0
    for number, subnet in enumerate(verb.subnets):
        served = network(subnet.cidr)
        room += min(served.num_addresses, 65536)
        if served.version == 4:
            arguments.append(
                f"--dhcp-range=set:s{number},{served.network_address},static,{served.netmask},{LEASE}s"
            )
        else:
            mode = "ra-stateless" if subnet.stateless else "static"
            arguments.append(
                f"--dhcp-range=set:s{number},{served.network_address},{mode},{served.prefixlen},{LEASE}s"
            )
    if any(subnet.advertise for subnet in verb.subnets):
        # It tells guests how to make their addresses; it does not forward, so it is nobody's default router.
        arguments += ["--enable-ra", f"--ra-param={verb.device},60,0"]
    return [*arguments, f"--dhcp-lease-max={min(room, 1_000_000)}"]


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
        names += [f"{each} {host.name}{fqdn}" for each in host.addresses]
    return {name: "".join(f"{line}\n" for line in lines) for name, lines in
            {"hosts": hosts, "options": options, "names": names}.items()}  # fmt: skip


def _options(number: int, subnet: v.DhcpSubnet) -> list[str]:
    tag = f"tag:s{number}"
    if network(subnet.cidr).version == 6:
        return [f"{tag},option6:dns-server,{','.join(f'[{each}]' for each in subnet.dns)}"] if subnet.dns else []
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


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT
    while _arguments(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
