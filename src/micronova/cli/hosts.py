"""`micronova host`: the compute hosts of a cloud."""

import errno
import ipaddress
import os
import re
import socket
import stat
import tomllib
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from micronova.cli.files import replace_files
from micronova.cli.maintain import with_process
from micronova.cli.state import new_password
from micronova.cli.status import time_span
from micronova.conf.settings import Settings
from micronova.db.engine import Database
from micronova.objects import states
from micronova.objects.clock import micros
from micronova.objects.errors import MicronovaError, NotFound
from micronova.objects.service_names import COMPUTE

if TYPE_CHECKING:
    from micronova.cli.wiring import Process
    from micronova.db.host_contents import ServerOnHost
    from micronova.db.services import ServiceChanges, ServiceRow

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)  # it is printed into commands and settings


def list_hosts(directory: Path | None, config: Path | None, *, as_json: bool = False) -> None:
    """Print the hosts by name, with their state."""
    from micronova.db import services

    async def work(database: Database, process: "Process") -> None:
        rows = sorted(await database.read(services.list_, binary=COMPUTE), key=lambda row: _in_order(row.host))
        now, down = micros(process.clock.now()), process.settings.default.service_down_time
        if as_json:
            listed = [_as_data(row, up=services.is_up(row, now, down)) for row in rows]
            click.echo(msgspec.json.format(msgspec.json.encode(listed), indent=2).decode())
            return
        click.echo(f"{'host':<30}{'state':<10}{'status':<10}reason")
        for row in rows:
            up = services.is_up(row, now, down)
            status = "disabled" if row.disabled else "enabled"
            click.echo(f"{row.host:<30}{'up' if up else 'down':<10}{status:<10}{row.disabled_reason or ''}")

    with_process(directory, config, work)


def _as_data(row: "ServiceRow", *, up: bool) -> dict[str, Any]:
    return {
        "host": row.host,
        "state": "up" if up else "down",
        "status": "disabled" if row.disabled else "enabled",
        "reason": row.disabled_reason or "",
    }


def show(name: str, directory: Path | None, config: Path | None, *, as_json: bool) -> None:
    """Print what is recorded of a host, and its servers."""
    from micronova.db import host_contents, services

    async def work(database: Database, process: "Process") -> None:
        found = await database.read(host_contents.of_host, name)
        try:
            row = await database.read(services.find, name, COMPUTE)
        except NotFound:
            row = None
        if row is None and not found.has_user:
            raise _unknown(name)
        now = micros(process.clock.now())
        data: dict[str, Any] = {"host": name, "state": "never heard of", "status": "enabled", "reason": ""}
        if row is not None:
            data = _as_data(row, up=services.is_up(row, now, process.settings.default.service_down_time))
            data["seconds_ago"] = round((now - row.last_seen_at) / 1e6, 1)
        data |= found._asdict()
        if as_json:
            click.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())
            return
        texts = {
            "last heard of": f"{time_span(data['seconds_ago'])} ago" if row is not None else "",
            "broker user": "its own" if found.has_user else "none of its own",
            "console address": found.console_address,
            "nodes": ", ".join(found.nodes),
            "operations": f"{found.operations} open",
            "migrations": "one is open" if found.migrating else "",
            "guests to remove": str(found.departures or ""),
            "servers": str(len(found.servers)),
        }
        for label, text in ({each: data[each] for each in ("host", "state", "status", "reason")} | texts).items():
            if text:
                click.echo(f"{label:<18}{text}")
        for server in found.servers:
            click.echo(_line(server))

    with_process(directory, config, work)


def _line(server: "ServerOnHost") -> str:
    """Return a server in a list of those on a host."""
    return f"  {server['uuid']}  {server['vm_state']:<10}{server['name']}"


def _unknown(name: str) -> NotFound:
    return NotFound(f"There is no host {name}: `micronova host list` shows those that there are.")


def hosts_up(directory: Path | None, config: Path | None) -> set[str]:
    """Return the names of the hosts that are up."""
    from micronova.db import services

    async def work(database: Database, process: "Process") -> set[str]:
        now, down = micros(process.clock.now()), process.settings.default.service_down_time
        rows = await database.read(services.list_, binary=COMPUTE)
        return {row.host for row in rows if services.is_up(row, now, down)}

    return with_process(directory, config, work)


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return the key that sorts h2 before h10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def disable(name: str, reason: str, directory: Path | None, config: Path | None) -> None:
    """Give a host no new servers."""

    async def work(database: Database, process: "Process") -> None:
        await _switch(database, process, name, {"disabled": True, "disabled_reason": reason or None})

    with_process(directory, config, work)


def enable(name: str, directory: Path | None, config: Path | None) -> None:
    """Give a host new servers again."""

    async def work(database: Database, process: "Process") -> None:
        await _switch(database, process, name, {"disabled": False, "disabled_reason": None})

    with_process(directory, config, work)


async def _switch(database: Database, process: "Process", name: str, values: "ServiceChanges") -> None:
    from micronova.db import services
    from micronova.notifications import resources
    from micronova.objects.context import Context

    try:
        row = await database.read(services.find, name, COMPUTE)
    except NotFound:
        raise _unknown(name) from None
    changed = await database.write(services.update, row.uuid, values, micros(process.clock.now()))
    await process.notifier.start()
    process.notifier.announce(Context(), partial(resources.service, "update", changed))
    if values["disabled"]:
        click.echo(f"{name} gets no new servers; its servers keep running. Undo: micronova host enable {name}")
    else:
        click.echo(f"{name} gets new servers again.")


def check_host_name(name: str) -> None:
    """Raise an error unless a host may have this name."""
    if not _NAME.fullmatch(name):
        raise MicronovaError(f"{name[:64]!r} is no name for a host: use letters, digits, dots, dashes and underscores.")


def add(
    name: str,
    console_address: str,
    directory: Path | None,
    config: Path | None,
    *,
    settings_file: Path | None = None,
    driver: str | None = None,
) -> None:
    """Register a host; print the commands that make its broker user, and print or write the settings of its agent.

    A host that is known gets a new password. Its settings file keeps everything else; without the file only the lines
    that change are printed.
    """
    from micronova.db import host_contents, nodes, services
    from micronova.rpc.amqp.permissions import for_host
    from micronova.rpc.amqp.url import parse

    check_host_name(name)
    if console_address:
        _check_console_address(console_address)

    async def work(database: Database, process: "Process") -> _Registered:
        settings = process.settings
        if settings.default.transport_url.startswith("local:"):
            raise MicronovaError("This cloud's bus is local://: more hosts need default.transport_url = amqp://….")
        if name in (parse(settings.default.transport_url).user, *settings.default.control_users):
            raise MicronovaError(
                f"{name} is a broker user of the control services: a host needs a broker user of its own."
            )
        known = (await database.read(host_contents.of_host, name)).has_user
        await database.write(services.register_host_user, name, micros(process.clock.now()), console_address)
        address = await database.read(services.console_address, name) or ""
        kinds = {node.hypervisor_type for node in await database.read(nodes.list_) if node.host == name}
        return _Registered(settings, known, address, driver or ("fake" if kinds == {"fake"} else "libvirt"))

    # It is opened first: a process of root's becomes the owner of DIR, who may not be able to.
    file = None if settings_file is None else _HostFile(settings_file, name)
    try:
        found = with_process(directory, config, work)
        settings = found.settings
        broker = parse(settings.default.transport_url)
        password = new_password()
        allowed = for_host(name, name)
        url = broker.for_user(f"{name}:{password}")
        changed = _credential(url, settings)
        if file is not None and file.former:  # before anything is printed: it may not be possible
            text = _renewed(file.former, changed, settings_file)
            if console_address and f'"{console_address}"' not in text:
                click.echo(f'In {settings_file} set [console] relay_listen = "{console_address}".', err=True)
        else:
            text = _host_settings(name, changed, found.console_address, found.driver, settings)
        if file is None:
            click.echo("# On the broker:")
        else:  # before the broker is told of a password that no file has
            file.write(text)
        # The password comes by standard input: everybody on the broker's machine sees the arguments of a process.
        told = f"echo {password} | rabbitmqctl"
        click.echo(f"{f'{told} change_password {name} || ' if found.known else ''}{told} add_user {name}")
        patterns = " ".join(f"'{pattern}'" for pattern in (allowed.configure, allowed.write, allowed.read))
        click.echo(f"rabbitmqctl set_permissions -p '{broker.vhost}' {name} {patterns}")
        if file is not None:
            return
        if found.known:
            click.echo(f"\n# On {name}, in the place of these lines of its settings; the others stay:\n[default]")
            click.echo("\n".join(f"{option} = {value}" for option, value in changed.items()))
        else:
            click.echo(f"\n{text}", nl=False)
    finally:
        if file is not None:
            file.close()


class _Registered(NamedTuple):
    """A host as it is registered, and the settings of the region."""

    settings: Settings
    known: bool  # it was registered before
    console_address: str
    driver: str


class _HostFile:
    """The settings file of a host, which only its owner can read: a new one, or the one that the host has.

    A child process writes it, with the rights that this process has now, and may give up before the text is known.
    """

    def __init__(self, path: Path, host: str) -> None:
        """Read it; raise MicronovaError if it is a file of something else, or cannot be replaced."""
        self._path = path.absolute()
        try:
            self.former = _read_own(self._path)
            is_of_host = not self.former or tomllib.loads(self.former).get("default", {}).get("host") == host
        except OSError as error:
            raise self._cannot_write(error.strerror or "it cannot be read") from None
        except ValueError:
            is_of_host = False
        if not is_of_host:
            raise MicronovaError(
                f"{path} exists and is not the settings file of {host}: name another file, or remove it first."
            )
        if not os.access(self._path.parent, os.W_OK | os.X_OK):
            raise self._cannot_write("no file can be made in its directory")
        self._socket, theirs = socket.socketpair()
        self._child = os.fork()
        if self._child == 0:
            try:
                self._socket.close()
                _replace_when_told(self._path, theirs)
            finally:
                os._exit(0)
        theirs.close()

    def write(self, text: str) -> None:
        """Replace it; raise MicronovaError if that fails: then it is as it was."""
        self._socket.sendall(text.encode())
        self._socket.shutdown(socket.SHUT_WR)
        said = self._socket.recv(1024).decode()
        if said != _DONE:
            raise self._cannot_write(said or "the process that writes it has ended")

    def close(self) -> None:
        """End the child; without a text it writes nothing."""
        self._socket.close()
        os.waitpid(self._child, 0)

    def _cannot_write(self, reason: str) -> MicronovaError:
        return MicronovaError(f"Cannot write {self._path}: {reason}.")


_DONE = "done"


def _read_own(path: Path) -> str:
    """Return the text of a file that is there; raise OSError if its owner or a link leads the password elsewhere."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return ""
    with os.fdopen(descriptor, encoding="utf-8") as stream:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        if found.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
            raise OSError(errno.EPERM, "it belongs to another user")
        return stream.read()


def _replace_when_told(path: Path, told: socket.socket) -> None:
    """Replace a file by the text that comes over a socket, and answer how that ended; without a text do nothing."""
    text = b"".join(iter(partial(told.recv, 65536), b""))
    if not text:
        return
    try:
        replace_files({path: text}, private=True)
    except OSError as error:
        told.sendall((error.strerror or "it failed").encode())
    else:
        told.sendall(_DONE.encode())


def _credential(transport_url: str, settings: Settings) -> dict[str, str]:
    """Return what a new password changes in the section `default` of a host's settings, as TOML."""
    from micronova.rpc.amqp.url import parse

    users = settings.default.control_users or (parse(settings.default.transport_url).user,)
    quoted = ", ".join(f'"{user}"' for user in users)
    return {"transport_url": f'"{transport_url}"', "control_users": f"[{quoted}]"}


def _renewed(former: str, changed: Mapping[str, str], path: Path | None) -> str:
    """Return the settings of a host with other values; raise MicronovaError if a person has to change them."""
    text = former
    for option, value in changed.items():
        line = re.compile(rf"^[ \t]*{option}[ \t]*=.*$", re.MULTILINE)
        if found := line.search(text):
            text = f"{text[: found.start()]}{option} = {value}{text[found.end() :]}"
    try:
        became = tomllib.loads(text)["default"]
        right = all(became.get(option) == tomllib.loads(f"x = {value}")["x"] for option, value in changed.items())
    except ValueError:
        right = False
    if not right:
        raise MicronovaError(
            f"{path} has no line `{' = …` and `'.join(changed)} = …` in [default] that could be replaced: name a new "
            "file by --settings, and change it by hand."
        )
    return text


def _host_settings(
    name: str, credential: Mapping[str, str], console_address: str, driver: str, settings: Settings
) -> str:
    """Return the settings file of a host."""
    lines = [
        f"# On {name}, the settings of `micronova run compute network-agent --config FILE`.",
        "# The password in transport_url is the only secret of the host: let only its owner read FILE.",
        "[default]",
        f'host = "{name}"',
        *(f"{option} = {value}" for option, value in credential.items()),
        "",
        "[compute]",
        f'compute_driver = "{driver}"',
    ]
    if console_address:
        lines += ["", "[console]", f'relay_listen = "{console_address}"']
    lines += ["", "# For network-agent. Where a real Neutron has its own agents, run compute alone.", "[neutron]"]
    for option, path, role in (("endpoint_override", "/network", "network"), ("metadata_url", "/metadata", "metadata")):
        lines.append(_address(option, getattr(settings.neutron, option), settings.api.public_url, path, role))
    if settings.ssl.ca_file:
        lines += ["", "# A copy of the file of the control nodes.", "[ssl]", f'ca_file = "{settings.ssl.ca_file}"']
    return "\n".join(lines) + "\n"


def _check_console_address(address: str) -> None:
    """Raise an error unless console proxies can connect to an address."""
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        usable = not ipaddress.ip_address(bare).is_unspecified and (":" not in bare or host == f"[{bare}]")
    except ValueError:
        usable = _NAME.fullmatch(host) is not None
    if not (usable and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise MicronovaError(
            f"{address[:64]!r} is no console address: use ADDRESS:PORT with an address of the host that proxies reach, "
            "such as 192.0.2.17:6080 or [2001:db8::17]:6080."
        )


def _address(option: str, given: str, public_url: str | None, path: str, role: str) -> str:
    """Return the settings line with the URL of a service, as a comment if the URL is not known."""
    if given or public_url:
        return f'{option} = "{given or f"{public_url}{path}"}"'
    return f'# {option} = "http://…{path}"  # where `micronova run {role}` listens'


def remove(name: str, directory: Path | None, config: Path | None, *, yes: bool = False) -> None:
    """Take the rights of a host away, after a question if it has servers, which stay as they are."""
    from micronova.db import host_contents, services
    from micronova.http.host_keys import LIFETIME

    async def work(database: Database, process: "Process") -> None:
        found = await database.read(host_contents.of_host, name)
        if found.servers and found.has_user and not yes:
            # What is printed to standard output are commands for a shell.
            click.echo(f"{name} has {len(found.servers)} servers, which nobody can work on without it:", err=True)
            for server in found.servers:
                click.echo(_line(server), err=True)
            click.confirm("Take its rights away?", abort=True, err=True)
        await database.write(services.forget_host_user, name, micros(process.clock.now()))

    with_process(directory, config, work)
    click.echo("# On the broker, which accepts the host until then:")
    click.echo(f"rabbitmqctl delete_user {name}")
    click.echo(f"rabbitmqctl close_all_user_connections {name} 'removed from the cloud'")
    click.echo(
        "\n# When it has no servers any more, this removes what else belongs to it (network agent, queue, departures):"
    )
    click.echo(f"openstack compute service delete $(openstack compute service list --host {name} -f value -c ID)")
    click.echo(f"\n# {name} counts as dead. What it got from a conductor runs out within {LIFETIME / 60:g} minutes.")


def drain(name: str, directory: Path | None, config: Path | None) -> None:
    """Give a host no new servers, and print how those that it still has get to other hosts."""
    from micronova.db import host_contents, services

    async def work(database: Database, process: "Process") -> tuple[list[tuple["ServerOnHost", frozenset[str]]], bool]:
        await _switch(database, process, name, {"disabled": True, "disabled_reason": "draining"})
        service = await database.read(services.find, name, COMPUTE)
        up = services.is_up(service, micros(process.clock.now()), process.settings.default.service_down_time)
        return await database.read(host_contents.movable_servers, name), up

    found, up = with_process(directory, config, work)
    if not found:
        click.echo(f"{name} has no servers.")
        return
    left = "1 server is" if len(found) == 1 else f"{len(found)} servers are"
    click.echo(f"{left} left on {name}. Nothing moves by itself:")
    for server, able in found:
        click.echo(_line(server))
        uuid, vm_state = server["uuid"], server["vm_state"]
        click.echo(f"    {_way_out(uuid, vm_state, able) if up else _way_off_dead_host(uuid, vm_state)}")


def _way_out(uuid: str, vm_state: str, able: Collection[str]) -> str:
    """Return the commands that bring a server to another host, as far as the driver of its own can do that."""
    if vm_state == states.RESIZED:
        return f"first: openstack server migration confirm {uuid} (or revert)"
    if "live_migrate" in able and vm_state in states.ACTIONS["live_migrate"].starts_from:
        return f"openstack server migrate --live-migration {uuid}"
    if "migrate" in able and vm_state in states.ACTIONS["migrate"].starts_from:
        return f"openstack server migrate {uuid}; then openstack server migration confirm {uuid}"
    if vm_state == states.SHELVED or ("snapshot" in able and vm_state in states.ACTIONS["shelve"].starts_from):
        return f"openstack server shelve --offload {uuid}; then openstack server unshelve {uuid} (it is off meanwhile)"
    return f"nothing moves a server from this state: end the state, or openstack server delete {uuid}"


def _way_off_dead_host(uuid: str, vm_state: str) -> str:
    evacuate = f"openstack server evacuate {uuid}"
    if vm_state in states.ACTIONS["evacuate"].starts_from:
        return f"the host is down: {evacuate}"
    return f"the host is down: openstack server set --state error {uuid}; then {evacuate}"
