"""`micronova ssh`: log in to a server, and before that make what is missing for it.

It acts as a plain member, by the public APIs. A server is reached by SSH if it has a key pair whose private key is
here, a floating IP, and a security group that lets TCP port 22 in. A missing floating IP or rule is a `Change`. Changes
are listed, carried out only after the person agrees, and each says how it is undone. What cannot be changed, such as a
server without a key pair or a guest that is simulated, is said before anything is changed.
"""

import asyncio
import contextlib
import ipaddress
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
from cryptography.exceptions import UnsupportedAlgorithm

from micronova.cli.connect import socket_of
from micronova.cli.own_command import own_command
from micronova.cli.state import StateDirectory, default_directory
from micronova.cli.user_session import UserSession, guests_of, session_of_environment
from micronova.objects.errors import MicronovaError, NotFound, Unavailable

PORT = 22
ANSWER_SECONDS = 90.0  # seconds until a guest must answer: one that has just been started boots first
PAUSE = 1.0
MOST_READ = 4096  # bytes of what a guest and the command that connects to it say

Found = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """Something that has to be changed before SSH works."""

    description: str
    carry_out: Callable[[], Awaitable[str]]
    """Makes the change and returns the command that undoes it."""


def ssh(
    server: str,
    command: tuple[str, ...],
    *,
    directory: Path | None,
    login: str,
    identity: Path | None,
    yes: bool,
) -> None:
    """Replace this process by ssh to a server."""
    place = StateDirectory((directory or default_directory()).absolute())
    session = session_of_environment(place)
    guests = guests_of(place)
    if guests != "real":
        raise MicronovaError(f"Guests of the cloud in {place.path} are {guests}: SSH is not possible.")
    address, key = asyncio.run(_prepare(session, server, identity, yes))
    proxy = _proxy_command(place)
    _wait_for_guest([*proxy, address, str(PORT)], server, address)
    arguments = ssh_arguments(proxy, key, login, address, command)
    try:
        os.execvp("ssh", arguments)  # noqa: S606 - the terminal is ssh's from now on
    except FileNotFoundError:
        raise MicronovaError("ssh is missing: apt-get install openssh-client") from None


def ssh_arguments(proxy: list[str], key: Path | None, login: str, address: str, command: tuple[str, ...]) -> list[str]:
    """Return the command line of ssh. It gives the guest, whose host key is not checked, neither agent nor display."""
    options = [
        f"ProxyCommand={shlex.join(proxy).replace('%', '%%')} %h %p",
        # The connection does not leave this machine, and the cloud lets no other guest use the address. The test image
        # makes a new host key at each boot, and floating IPs move between servers.
        "StrictHostKeyChecking=no",
        "UserKnownHostsFile=/dev/null",
        "LogLevel=ERROR",
        "ForwardAgent=no",
        "ForwardX11=no",
    ]
    if key is not None:
        options.append("IdentitiesOnly=yes")  # else ssh shows the guest every key of the agent
    arguments = ["ssh", *(part for option in options for part in ("-o", option))]
    if key is not None:
        arguments += ["-i", str(key)]
    return [*arguments, f"{login}@{address}", *command]


async def _prepare(session: UserSession, name: str, identity: Path | None, yes: bool) -> tuple[str, Path | None]:
    """Return the floating IP of a server and the private key, after everything that is missing was made."""
    async with session:
        server = await find_server(session, name)
        key = await find_key(session, server, identity)
        port, address = await _floating_ip(session, server, await ports_of(session, server))
        changes = []
        rule = await missing_rule(session, port)
        if rule is not None:
            changes.append(rule)
        if address is None:
            changes.append(await missing_address(session, server, port))
        await carry_out(changes, yes)
        if address is None:
            _, address = await _floating_ip(session, server, [port])
        assert address is not None
        return address, key


async def find_server(session: UserSession, name: str) -> Found:
    """Return the one server with this id or name; raise if there is none or if it does not run."""
    servers = (await session.request("compute", "GET", "/servers/detail"))["servers"]
    found = [server for server in servers if name in (server["id"], server["name"])]
    if not found:
        raise NotFound(f"The project has no server {name}; `openstack server list` shows those it has.")
    if len(found) > 1:
        raise MicronovaError(f"{len(found)} servers are called {name}: give the id of one.")
    server: Found = found[0]
    if server["status"] != "ACTIVE":
        hint = f": openstack server start {name}" if server["status"] == "SHUTOFF" else "."
        raise MicronovaError(f"Server {name} is {server['status']}, and SSH needs a server that runs{hint}")
    return server


async def ports_of(session: UserSession, server: Found) -> list[Found]:
    """Return the ports of a server: those that compute lists, and of them the project's own.

    A port's device_id alone proves nothing, because every user can create a port with any device_id.
    """
    interfaces = (await session.request("compute", "GET", f"/servers/{server['id']}/os-interface"))[
        "interfaceAttachments"
    ]
    ids = {interface["port_id"] for interface in interfaces}
    ports = (await session.request("network", "GET", f"/v2.0/ports?device_id={server['id']}"))["ports"]
    return [
        port
        for port in ports
        if port["id"] in ids
        and port["project_id"] == server["tenant_id"]
        and port["device_owner"].startswith("compute:")
    ]


# --- the key ---------------------------------------------------------------------------------------------------------


async def find_key(session: UserSession, server: Found, identity: Path | None) -> Path | None:
    """Return the private key of a server's key pair; None if only ssh-agent can have it."""
    if identity is not None:
        return identity
    name = server["key_name"]
    if name is None:
        raise MicronovaError(
            f"Server {server['name']} was created without a key pair, and a key can be given only at creation. "
            "Create it again with --key-name (`openstack keypair create --public-key FILE NAME` registers a key), or "
            "name a key that it accepts with --identity."
        )
    try:
        pair = (await session.request("compute", "GET", f"/os-keypairs/{quote(name, safe='')}"))["keypair"]
    except NotFound:
        raise MicronovaError(f"Key pair {name} is another user's: name its private key with --identity.") from None
    folder = Path.home() / ".ssh"
    key = private_key_of(pair["public_key"], sorted(folder.iterdir()) if folder.is_dir() else ())
    if key is not None and key.stat().st_mode & 0o077:
        raise MicronovaError(f"ssh does not use a private key that others can read: chmod 600 {key}")
    if key is None and "SSH_AUTH_SOCK" not in os.environ:
        raise MicronovaError(f"{folder} has no private key of key pair {name}: name the file with --identity.")
    return key


def private_key_of(public_key: str, files: Iterable[Path]) -> Path | None:
    """Return the file that has the private key of a public key."""
    wanted = public_key.split()[:2]
    for file in files:
        if file.suffix != ".pub" and _public_key_of(file).split()[:2] == wanted:
            return file
    return None


def _public_key_of(file: Path) -> str:
    """Return the public key of a private key: from the file beside it, else from the private key; "" if it is none."""
    from cryptography.hazmat.primitives import serialization

    try:
        published = file.with_name(f"{file.name}.pub")
        if published.is_file():
            return published.read_text(errors="replace")
        content = file.read_bytes()
        if b"PRIVATE KEY-----" not in content[:64]:
            return ""
        load = serialization.load_ssh_private_key if b"OPENSSH" in content[:64] else serialization.load_pem_private_key
        key = load(content, None).public_key()
        ssh_format = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        return key.public_bytes(*ssh_format).decode()
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):  # not ours to read, damaged, or with a passphrase
        return ""


# --- the security group rule -----------------------------------------------------------------------------------------


async def missing_rule(session: UserSession, port: Found) -> Change | None:
    """Return the change that lets SSH in at a port; None if a rule does so already."""
    if not port.get("port_security_enabled", True):
        return None
    groups = port["security_groups"]
    if not groups:
        raise MicronovaError(
            f"Port {port['id']} has no security group, so nothing reaches it: openstack port set --security-group "
            f"default {port['id']}"
        )
    for group in groups:
        rules = await session.request("network", "GET", f"/v2.0/security-group-rules?security_group_id={group}")
        if any(lets_ssh_in(rule) for rule in rules["security_group_rules"]):
            return None
    name = (await session.request("network", "GET", f"/v2.0/security-groups/{groups[0]}"))["security_group"]["name"]

    async def make() -> str:
        wanted = {"protocol": "tcp", "port_range_min": PORT, "port_range_max": PORT}
        body = {"security_group_id": groups[0], "direction": "ingress", "ethertype": "IPv4", **wanted}
        made = await session.request("network", "POST", "/v2.0/security-group-rules", {"security_group_rule": body})
        return f"openstack security group rule delete {made['security_group_rule']['id']}"

    return Change(f"let TCP port {PORT} in from everywhere at all servers of security group {name}", make)


def lets_ssh_in(rule: Found) -> bool:
    """Return whether a security group rule lets SSH in from everywhere by IPv4."""
    return (
        rule["direction"] == "ingress"
        and rule["ethertype"] == "IPv4"
        and rule["remote_group_id"] is None
        and rule["remote_ip_prefix"] in (None, "0.0.0.0/0")
        and str(rule["protocol"]) in ("None", "any", "0", "tcp", "6")
        and (rule["port_range_min"] or 0) <= PORT <= (rule["port_range_max"] or 65535)
    )


# --- the floating IP -------------------------------------------------------------------------------------------------


async def _floating_ip(session: UserSession, server: Found, ports: list[Found]) -> tuple[Found, str | None]:
    """Return the port of a server that SSH goes to, and its floating IP if it has one."""
    for port in ports:
        found = await session.request("network", "GET", f"/v2.0/floatingips?port_id={port['id']}")
        for floating in found["floatingips"]:
            return port, checked_address(floating)
    for port in ports:
        if any(":" not in address["ip_address"] for address in port["fixed_ips"]):
            return port, None
    raise MicronovaError(
        f"Server {server['name']} has no IPv4 address: openstack server add network {server['name']} …"
    )


def checked_address(floating: Found) -> str:
    """Return the address of a floating IP; raise unless it is an IPv4 address and so safe in a command line."""
    try:
        return str(ipaddress.IPv4Address(floating["floating_ip_address"]))
    except ValueError:
        raise MicronovaError(
            f"The network service gave a floating IP that is no IPv4 address: {floating['id']}."
        ) from None


async def missing_address(session: UserSession, server: Found, port: Found) -> Change:
    """Return the change that gives a port a floating IP: one that the project has and does not use, else a new one."""
    for floating in (await session.request("network", "GET", "/v2.0/floatingips"))["floatingips"]:
        if floating["port_id"] is None and floating["project_id"] == port["project_id"]:
            return _use_address(session, server, port, floating)
    networks = (await session.request("network", "GET", "/v2.0/networks?router:external=true"))["networks"]
    if not networks:
        raise MicronovaError("There is no external network to take a floating IP from; an admin makes one.")
    external = networks[0]

    async def make() -> str:
        body = {"floating_network_id": external["id"], "port_id": port["id"]}
        try:
            made = (await session.request("network", "POST", "/v2.0/floatingips", {"floatingip": body}))["floatingip"]
        except NotFound as error:
            raise MicronovaError(
                f"{error.message} A router must join the server's network and {external['name']}: openstack router "
                f"create --external-gateway {external['name']} R; openstack router add subnet R SUBNET"
            ) from None
        return f"openstack floating ip delete {made['floating_ip_address']}"

    return Change(f"make a floating IP in network {external['name']} for server {server['name']}", make)


def _use_address(session: UserSession, server: Found, port: Found, floating: Found) -> Change:
    address = checked_address(floating)

    async def make() -> str:
        path = f"/v2.0/floatingips/{floating['id']}"
        await session.request("network", "PUT", path, {"floatingip": {"port_id": port["id"]}})
        return f"openstack server remove floating ip {server['id']} {address}"

    return Change(f"give the unused floating IP {address} to server {server['name']}", make)


# --- asking and connecting -------------------------------------------------------------------------------------------


async def carry_out(changes: list[Change], yes: bool) -> None:
    """List the changes, ask unless `yes`, carry them out, and say how each is undone; raise if the answer is no."""
    if not changes:
        return
    if not yes:
        click.echo("SSH needs these changes:", err=True)
        for change in changes:
            click.echo(f"  {printable(change.description)}", err=True)
        if not sys.stdin.isatty():
            raise MicronovaError("Nothing was changed: there is no terminal to ask at. --yes agrees to these changes.")
        if not click.confirm("Make them?", err=True):
            raise MicronovaError("Nothing was changed.")
    for change in changes:
        undo = await change.carry_out()
        click.echo(f"done: {printable(change.description)}\n  undo: {printable(undo)}", err=True)


def printable(text: str) -> str:
    """Return a text with escapes instead of unprintable characters: names can contain commands for the terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _proxy_command(place: StateDirectory) -> list[str]:
    """Return the command that connects to guests, with sudo if the cloud is root's."""
    command = own_command("connect", "--dir", str(place.path))
    try:
        allowed = os.access(socket_of(place), os.W_OK)
    except Unavailable:
        allowed = False
    return command if allowed else ["sudo", *command]


def _first_of(command: list[str], seconds: float) -> tuple[bytes, bytes] | None:
    """Run the command to its end; return the begin of its output and of its errors, None if it does not end.

    The output is the guest's, which may send without end. What is not read fills a pipe and stops the command.
    """
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
    except FileNotFoundError:
        raise MicronovaError("The cloud belongs to root, and there is no sudo: become root.") from None
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(PermissionError):  # sudo's; it ends when nobody reads what it writes
                process.kill()
                process.wait()
            return None
        found = []
        for stream in (process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)
            found.append(stream.read(MOST_READ) or b"")
    return found[0], found[1]


def _wait_for_guest(command: list[str], server: str, address: str) -> None:
    """Wait until the guest's SSH server answers; raise with what `micronova connect` says if it does not."""
    deadline = time.monotonic() + ANSWER_SECONDS
    waiting = False
    while True:
        answer = _first_of(command, 30.0)
        if answer is None:
            return  # the guest accepts connections but sends no banner yet; ssh waits for it
        banner, errors = answer
        if banner.startswith(b"SSH-"):
            return
        said = errors.decode(errors="replace").strip().removeprefix("micronova: ")
        if time.monotonic() > deadline or "cannot be reached" not in said:
            raise MicronovaError(said or f"What answers at {address} port {PORT} is no SSH server.")
        if not waiting:
            click.echo(f"waiting until {server} answers at {address} port {PORT}", err=True)
            waiting = True
        time.sleep(PAUSE)
