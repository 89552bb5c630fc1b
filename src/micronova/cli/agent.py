"""The agents of a host with real guests, in a process and with a user of their own.

    root: supervisor ──┬── the cloud, user micronova: HTTP, databases, conductor, scheduler, console proxy
                       └── the agents, user micronova-agent: compute, network agent, console relay

Who may use libvirt's socket is as good as root on the machine, so the user that answers HTTP may not. The agents are to
the cloud what a host of a region is: they have no database and no key, and the cloud believes them only what concerns
this host. Three sockets connect both processes. Root makes them in a directory of its own, each for one of both users:

    bus       the cloud's bus; the agents connect (rpc/unix/gate.py)
    http      the image, network and metadata services, whatever address and TLS the cloud's clients use
    console   the relay of this host's consoles; the console proxy connects

The process is a new program, not a fork: root's process has read the settings and keys of the cloud.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from micronova.cli.exporter import ExporterLink
from micronova.cli.service_user import ServiceUser, become, end_with
from micronova.cli.state import StateDirectory
from micronova.cli.supervised import READY, FromRoot, SupervisedProcess, tell_root
from micronova.conf.api import APISettings
from micronova.conf.pci import PCISettings
from micronova.conf.services import GlanceSettings, NeutronSettings
from micronova.conf.settings import Settings
from micronova.http.sockets import listen_unix
from micronova.objects.errors import MicronovaError
from micronova.privileged.client import sockets_directory
from micronova.telemetry.logs import set_up_logging

log = logging.getLogger("micronova.cli.agent")  # also where this module is the program

HOST_ROLES = ("compute", "network-agent")
SERVICES = ("/image", "/network", "/metadata")  # what the agents use by HTTP
_SIGNALLED = 3  # exit code: stopped by a signal, and not by the cloud


def control_name(host: str) -> str:
    """Return the sender of the messages of a cloud to the agents of this host. It is not the name of a host."""
    return f"{host}:cloud"


def host_name(settings: Settings) -> str:
    """Return the name of this host."""
    return settings.default.host or socket.gethostname()


@dataclass(frozen=True)
class AgentLink:
    """The agents as the cloud's process sees them."""

    uid: int
    bus: socket.socket  # both listen
    http: socket.socket
    console: Path
    exporter: ExporterLink | None = None  # serves volumes to guests

    @property
    def url(self) -> str:
        """The URL of the cloud's services for the agents."""
        return service_url(self.console.parent)


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What root tells the agents' process."""

    settings: Settings
    roles: tuple[str, ...]
    user: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    cloud_id: str
    directory: str  # DIR
    guests: str  # the directory of guests' files
    volumes: str  # the socket of the exporter; empty if there is none
    console: int  # descriptor of the socket that the console relay listens on


def service_url(sockets: Path) -> str:
    """Return the URL of the cloud's services on a Unix socket."""
    from micronova.http.client import unix_url

    return unix_url(sockets / "http")


def agent_settings(settings: Settings, sockets: Path) -> Settings:
    """Return the settings of the agents: none of those of other roles, among which are passwords and keys."""
    host, url = host_name(settings), service_url(sockets)
    vendor_data = {
        name: getattr(settings.api, name) for name in APISettings.__struct_fields__ if name.startswith("vendordata")
    }
    return Settings(
        default=msgspec.structs.replace(
            settings.default,
            host=host,
            transport_url=f"unix://{sockets / 'bus'}",
            control_users=(control_name(host),),
            secret_key="",
        ),
        api=APISettings(**vendor_data),
        glance=GlanceSettings(endpoint_override=f"{url}/image"),
        neutron=NeutronSettings(endpoint_override=f"{url}/network", metadata_url=f"{url}/metadata"),
        network_agent=settings.network_agent,
        compute=settings.compute,
        libvirt=settings.libvirt,
        pci=PCISettings(device_spec=settings.pci.device_spec),
        devices=settings.devices,
        ssl=settings.ssl,
        telemetry=settings.telemetry,
        upgrade_levels=settings.upgrade_levels,
    )


# --- root's side ---------------------------------------------------------------------------------------------------


class AgentProcess(SupervisedProcess):
    """The agents' process."""

    what = "the process of this host's agents"
    consequence = "guests continue to run"

    def __init__(
        self,
        settings: Settings,
        place: StateDirectory,
        prefix: str,
        *,
        cloud: ServiceUser,
        user: ServiceUser,
        cloud_id: str,
        guests: Path,
        roles: Iterable[str],
        volumes: Path | None = None,
    ) -> None:
        """`volumes` is the socket by which the agents tell the exporter which guests may use which volumes."""
        self._sockets = sockets_directory(prefix)
        self._settings = settings
        self._place = place
        self._cloud = cloud
        self._user = user
        self._cloud_id = cloud_id
        self._guests = guests
        self._roles = tuple(roles)
        self._volumes = volumes
        super().__init__("micronova.cli.agent", place.path)

    def listen(self) -> AgentLink:
        """Make the sockets; return what the cloud's process needs."""
        self._console = listen_unix(self._sockets / "console", self._cloud.uid)
        return AgentLink(
            uid=self._user.uid,
            bus=listen_unix(self._sockets / "bus", self._user.uid),
            http=listen_unix(self._sockets / "http", self._user.uid),
            console=self._sockets / "console",
        )

    def detach(self) -> None:
        """Forget root's means, in the child that becomes the cloud."""
        self._console.close()

    def start_message(self, groups: Iterable[int]) -> bytes:
        """Return what the process is told; `groups` are those that share files with guests and use libvirt."""
        start = Start(
            settings=agent_settings(self._settings, self._sockets),
            roles=self._roles,
            user=self._user.name,
            uid=self._user.uid,
            gid=self._user.gid,
            groups=tuple(groups),
            cloud_id=self._cloud_id,
            directory=str(self._place.path),
            guests=str(self._guests),
            volumes="" if self._volumes is None else str(self._volumes),
            console=self._console.fileno(),
        )
        return msgspec.json.encode(start)

    def descriptors(self) -> list[int]:
        """Return the descriptors that the process inherits."""
        return [self._console.fileno()]


# --- the agents' side ----------------------------------------------------------------------------------------------


def main() -> None:
    """Become the agents' user and run the agents until the cloud stops them."""
    from_root = FromRoot()
    start = msgspec.json.decode(from_root.start_message(), type=Start)
    set_up_logging(start.settings)
    user = ServiceUser(start.user, start.uid, start.gid)
    listening = socket.socket(fileno=start.console)
    listening.setblocking(False)
    root = os.getppid()
    stop_requested = False

    def stop(stopped: asyncio.Event) -> None:
        nonlocal stop_requested
        stop_requested = True
        stopped.set()

    try:
        become(user, Path(start.guests), start.groups, cover=Path(start.directory))
        end_with(root, signal.SIGKILL)  # the next start of the cloud must not find two agents
        from micronova.cli.run import run_until_stopped

        run_until_stopped(lambda stopped: _serve(start, from_root, listening, stopped, lambda: stop(stopped)))
    except MicronovaError as error:
        tell_root(error.message)
        sys.exit(1)
    sys.exit(0 if stop_requested else _SIGNALLED)


async def _serve(
    start: Start, from_root: FromRoot, listening: socket.socket, stopped: asyncio.Event, stop: Callable[[], None]
) -> None:
    from micronova.cli.run import settle_memory, start_unless_stopped
    from micronova.cli.wiring import Process

    from_root.follow(start.settings)

    process = Process(
        start.settings,
        start.roles,
        StateDirectory(Path(start.directory)),
        cloud_id=start.cloud_id,
        volume_access=Path(start.volumes) if start.volumes else None,
        relay_socket=listening,
        on_stop=stop,
    )
    if not await start_unless_stopped(process.start(), stopped):
        return  # it waited for a cloud that does not answer, perhaps because that one stops
    settle_memory()
    process.announce_ready()
    tell_root(READY)
    log.info("%s: ready", ", ".join(start.roles))
    try:
        await stopped.wait()
    finally:
        await process.stop()


if __name__ == "__main__":
    main()
