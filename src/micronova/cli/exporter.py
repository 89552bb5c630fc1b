"""The exporter of a machine with real guests, in a process and with a user of its own.

    root: supervisor ──┬── the cloud, user micronova: the volume service, which owns the files of volumes
                       ├── the agents, user micronova-agent: they say which guest may connect to which volume
                       └── the exporter, user micronova-volumes, and its storage daemons

Who takes over a storage daemon must get neither the cloud's files nor a guest, and who takes over the process that
answers HTTP must not get at guests. So neither of both starts daemons, and the exporter opens nothing by a path that
others give. Two sockets connect it to the others. Root makes them, each for one user, and keeps them open, so that who
asks while the exporter is started again waits:

    exports   the volume service connects
    volumes   the agents connect
"""

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from micronova.cli.service_user import ServiceUser, become, end_with
from micronova.cli.state import StateDirectory
from micronova.cli.supervised import READY, FromRoot, SupervisedProcess, tell_root
from micronova.conf.default import DefaultSettings
from micronova.conf.settings import Settings
from micronova.exporter import daemon, wire
from micronova.exporter.server import Exporter, ExporterSetup
from micronova.objects.errors import MicronovaError
from micronova.privileged.client import sockets_directory
from micronova.telemetry.logs import set_up_logging
from micronova.virt.libvirt.storage import acl, sandbox
from micronova.virt.libvirt.storage.guest_users import guest_ids

PROGRAM = "qemu-storage-daemon"
FOLDER = "volumes"
"""The directory of the sockets of volumes, beside the files of guests: guests' QEMU sees it."""


@dataclass(frozen=True)
class ExporterLink:
    """The exporter as the volume service sees it."""

    socket: Path
    uid: int  # of the exporter: it may open files of volumes
    seen_as: Path  # the directory of the sockets, as guests' QEMU sees it


def access_socket(prefix: str) -> Path:
    """Return the socket by which the agents of a host tell the exporter which guests may connect."""
    return sockets_directory(prefix) / "volumes"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What root tells the exporter's process."""

    settings: Settings
    user: str
    uid: int
    gid: int
    prefix: str
    directory: str  # DIR
    home: str  # the directory of the sockets
    service: int  # descriptors of the sockets that it listens on
    agent: int
    service_user: int
    agent_user: int
    first_guest: int
    guests: int


class ExporterProcess(SupervisedProcess):
    """The exporter's process."""

    what = "the exporter of volumes"
    consequence = "volumes are still served"

    def __init__(
        self,
        settings: Settings,
        place: StateDirectory,
        prefix: str,
        *,
        cloud: ServiceUser,
        agent: ServiceUser,
        user: ServiceUser,
        cloud_id: str,
        root: Path,
        seen_as: Path,
    ) -> None:
        """`root` is the directory of guests' files, and `seen_as` what guests' QEMU calls it."""
        self._settings = settings
        self._place = place
        self._prefix = prefix
        self._cloud = cloud
        self._agent = agent
        self._user = user
        self._ids = guest_ids(settings.libvirt.guest_uids, cloud_id)
        self._home = root / FOLDER
        self._seen_as = seen_as / FOLDER
        super().__init__("micronova.cli.exporter", place.path)

    def listen(self) -> ExporterLink:
        """Make the sockets and the directory; return what the cloud's process needs."""
        sockets = sockets_directory(self._prefix)
        self._make_home()
        self._from_service = wire.listen(sockets / "exports", self._cloud.uid)
        self._from_agent = wire.listen(access_socket(self._prefix), self._agent.uid)
        return ExporterLink(sockets / "exports", self._user.uid, self._seen_as)

    def detach(self) -> None:
        """Forget root's setup, in the child that becomes the cloud."""
        self._from_service.close()
        self._from_agent.close()

    def start_message(self, groups: Iterable[int]) -> bytes:
        """Return what the process is told."""
        default = self._settings.default
        start = Start(
            settings=Settings(
                default=DefaultSettings(
                    log_level=default.log_level,
                    default_log_levels=default.default_log_levels,
                    log_format=default.log_format,
                )
            ),
            user=self._user.name,
            uid=self._user.uid,
            gid=self._user.gid,
            prefix=self._prefix,
            directory=str(self._place.path),
            home=str(self._home),
            service=self._from_service.fileno(),
            agent=self._from_agent.fileno(),
            service_user=self._cloud.uid,
            agent_user=self._agent.uid,
            first_guest=self._ids.start,
            guests=len(self._ids),
        )
        return msgspec.json.encode(start)

    def descriptors(self) -> list[int]:
        """Return the descriptors that the process inherits."""
        return [self._from_service.fileno(), self._from_agent.fileno()]

    def end(self) -> None:
        """End the exporter and all its daemons, after the guests, and remove their sockets."""
        self.stop(kill=False)
        end_daemons(self._prefix)
        shutil.rmtree(self._home, ignore_errors=True)

    def _make_home(self) -> None:
        """Make the directory of the sockets; the owner of its parent may be another user, so links are refused."""
        parent = os.open(self._home.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            try:
                os.mkdir(FOLDER, 0o711, dir_fd=parent)
            except FileExistsError:
                pass
            made = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            try:
                os.fchown(made, self._user.uid, self._user.gid)
                os.fchmod(made, 0o711)
            finally:
                os.close(made)
        except OSError as error:
            raise MicronovaError(f"{self._home} cannot be made: {error.strerror}.") from None
        finally:
            os.close(parent)


def end_daemons(prefix: str) -> bool:
    """End the storage daemons of a cloud at once; return whether there were any. For root.

    Root believes no file of the exporter's: a daemon says itself, by its command line, which cloud's it is.
    """
    found = False
    for _, each in daemon.find(prefix):
        each.kill()
        found = True
    return found


def missing() -> str | None:
    """Return which package volumes of real guests need; None if it is there."""
    return None if shutil.which(PROGRAM) else f"{PROGRAM} is missing: install qemu-system-common"


# --- the exporter's side -------------------------------------------------------------------------------------------


def main() -> None:
    """Become the exporter's user and serve volumes until root's process stops it."""
    from_root = FromRoot()
    start = msgspec.json.decode(from_root.start_message(), type=Start)
    set_up_logging(start.settings)
    root = os.getppid()
    sockets = [socket.socket(fileno=number) for number in (start.service, start.agent)]
    try:
        program = shutil.which(PROGRAM)
        if program is None:
            raise MicronovaError(f"{missing()}.")
        become(ServiceUser(start.user, start.uid, start.gid), Path(start.home), cover=Path(start.directory))
        end_with(root, signal.SIGKILL)  # the daemons go on, and the next exporter finds them
        os.chdir(start.home)  # a path to a socket may be too long: from here on all of them are relative
        setup = ExporterSetup(
            prefix=start.prefix,
            directory=Path("."),
            sandbox=(sys.executable, "-I", "-S", sandbox.__file__),
            program=program,
            set_access=acl.share,
            users_of=acl.users,
            connect_right=acl.READ | acl.WRITE,
            guest_users=range(start.first_guest, start.first_guest + start.guests),
            service_user=start.service_user,
            agent_user=start.agent_user,
        )
        asyncio.run(_serve(setup, start.settings, from_root, *sockets))
    except MicronovaError as error:
        tell_root(error.message)
        sys.exit(1)


async def _serve(
    setup: ExporterSetup, settings: Settings, from_root: FromRoot, service: socket.socket, agent: socket.socket
) -> None:
    from_root.follow(settings)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    exporter = Exporter(setup)
    await exporter.start(service, agent)
    tell_root(READY)
    await stopped.wait()
    await exporter.stop()


if __name__ == "__main__":
    main()
