"""Root's process on a machine with real guests: it starts and supervises what the cloud may not do itself.

    root: micronova up ──┬── privileged helper (namespaces, bridges, firewall, DHCP)
                         ├── private libvirtd, in the cloud's network namespace; its guests
                         ├── the cloud, as a user who may use neither of them: HTTP, conductor, scheduler, …
                         ├── the agents of this host, as a user who may (cli/agent.py)
                         └── the exporter of volumes, as a third user, and its storage daemons (cli/exporter.py)

Root's process holds no data and listens nowhere. It starts the other processes and restarts those that die, except the
cloud, which ends with an error. When a cloud of `up` is told to stop, guests are powered off, and everything but files
in DIR is removed; disks stay. `micronova run` leaves guests, their libvirtd and their networks as they are: an agent is
stopped when its settings or its version change, and the next one takes them over. `micronova down` ends them.
`micronova run` with nothing but the agents of a host has no other cloud process.

The cloud can use an existing libvirt (libvirt.connection_uri) instead of a private one. That libvirt is neither
started nor stopped. The cloud's guests on it are powered off alike, and the helper moves their taps into the cloud's
network namespace.
"""

import contextlib
import logging
import math
import os
import select
import signal
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from micronova.cli import root_records
from micronova.cli.agent import HOST_ROLES, AgentLink, AgentProcess
from micronova.cli.exporter import ExporterProcess, access_socket, end_daemons
from micronova.cli.exporter import missing as missing_exporter
from micronova.cli.notify_systemd import Notifications
from micronova.cli.reload import ends_with_its_terminal
from micronova.cli.service_user import (
    ServiceUser,
    become,
    claim,
    end_with,
    hand_over,
    keep_private,
    let_through,
    service_user,
    take_over,
)
from micronova.cli.state import StateDirectory
from micronova.cli.supervised import SupervisedProcess
from micronova.conf.settings import Settings, SettingsError
from micronova.objects.errors import MicronovaError, resource_exhausted
from micronova.privileged.client import (
    HelperProcess,
    helper_socket,
    listens,
    make_sockets_directory,
    remove_sockets_directory,
    runtime_directory,
)
from micronova.privileged.names import prefix_of
from micronova.privileged.verbs import EnsureNamespace

if TYPE_CHECKING:
    from micronova.virt.libvirt.daemon.existing import ExistingLibvirt

log = logging.getLogger(__name__)

CHECK_INTERVAL = 5.0  # seconds between checks that the helper and libvirtd run
HELPER_END = 5.0  # seconds in which a helper ends when root's process was killed
STOP_MARGIN = 60.0  # seconds beyond compute.shutdown_grace after which a child that was told to stop is killed
END_MARGIN = 60.0  # seconds after that in which guests, daemons and the helper end


def probe(settings: Settings) -> str | None:
    """Return why this machine cannot run real guests, in one line with what to do; None if it can."""
    if os.geteuid() != 0 and not settings.libvirt.connection_uri:
        return "Real guests and their networks need root: run as root (sudo micronova up)."
    return (lack_of_networks() if runs_network_agent(settings) else None) or lack_of_guests(settings)


def lack_of_networks() -> str | None:
    """Return what this machine lacks for the networks of guests, and what to do; None if it has all."""
    from micronova.privileged.kernel import missing_programs

    packages = missing_programs()
    return f"Packages are missing: apt-get install --no-install-recommends {' '.join(packages)}" if packages else None


def lack_of_guests(settings: Settings) -> str | None:
    """Return what this machine lacks for real guests, and what to do; None if it has all."""
    from micronova.virt.libvirt.daemon.existing import obstacle
    from micronova.virt.libvirt.setup import probe as libvirt

    uri = settings.libvirt.connection_uri
    lacks = libvirt(msgspec.to_builtins(settings.libvirt))
    return obstacle(uri, _above_guests(settings)) if lacks is None and uri else lacks


def runs_qemu(settings: Settings) -> bool:
    """Return whether guests need root's process: guests of QEMU do, on a private libvirtd or an existing one."""
    uri = settings.libvirt.connection_uri
    return settings.compute.compute_driver == "libvirt" and (not uri or uri.startswith("qemu"))


def runs_network_agent(settings: Settings) -> bool:
    """Return whether a network agent connects the guests of this machine to their networks, by root's helper."""
    if not runs_qemu(settings):
        return False
    uri = settings.libvirt.connection_uri
    return not uri or (os.geteuid() == 0 and not settings.neutron.endpoint_override)


def without_links(settings: Settings) -> tuple[Settings, str]:
    """Return the settings without links of guests if no network agent would connect them, and a notice of that."""
    connected = runs_network_agent(settings) or bool(settings.neutron.endpoint_override)
    if settings.compute.compute_driver != "libvirt" or connected:
        return settings, ""
    settings = msgspec.structs.replace(
        settings, libvirt=msgspec.structs.replace(settings.libvirt, interfaces_linked=False)
    )
    lack = "Guests get addresses but no network: their interfaces have no link."
    if runs_qemu(settings):
        return settings, f"{lack} Root connects them: sudo micronova up."
    return settings, f"{lack} The embedded network service connects QEMU's guests only."


def _above_guests(settings: Settings) -> Path:
    """Return the parent of the directory of guests' files; its permissions are not changed."""
    if settings.libvirt.instances_path:
        return Path(settings.libvirt.instances_path).absolute().parent
    directory = Path(settings.default.state_path).absolute()
    return directory.parent if os.geteuid() == 0 else directory


ReadAgain = Callable[[], Settings]
"""Reads the settings again; raises SettingsError."""


class HostProcesses:
    """The privileged helper of one cloud on this machine, and the libvirt of its guests. Methods block."""

    def __init__(
        self, settings: Settings, place: StateDirectory, user: ServiceUser, owner: ServiceUser | None = None
    ) -> None:
        """`user` may use them. `owner` owns DIR, if that is another user."""
        from micronova.virt.libvirt.daemon.existing import ExistingLibvirt
        from micronova.virt.libvirt.daemon.private import SEEN_AS
        from micronova.virt.libvirt.setup import private_libvirtd, state_root

        cloud_id = root_records.cloud_id(place)
        self._user = user
        self._owner = owner
        self._prefix = prefix_of(cloud_id)
        self.root = state_root(place.path, settings.libvirt).absolute()
        self.seen_as = self.root  # what guests' QEMU calls that directory
        self.libvirtd = self.running = None
        guests = None
        if runs_qemu(settings) and settings.libvirt.connection_uri:
            guests = self.root
            self.running = ExistingLibvirt(settings.libvirt.connection_uri, cloud_id, guests)
        elif runs_qemu(settings):
            host = settings.default.host or os.uname().nodename
            self.seen_as = SEEN_AS
            self.libvirtd = private_libvirtd(place.path, cloud_id, host, settings.libvirt, client=(user.uid, user.gid))
        self.helper = HelperProcess(self._prefix, helper_socket(self._prefix), uid=user.uid, guests=guests)
        self._guests = guests
        self._former = place.path / "libvirt" if guests is not None else None
        self._elsewhere = guests if settings.libvirt.instances_path else None
        self._prepared = False  # directories, and an existing libvirt
        self._helper_prepared = False  # the cloud's namespace, and root's note
        self.groups: list[int] = []  # more groups of the service user, to use libvirt's socket

    def start(self) -> None:
        """Start the helper and libvirtd unless they run."""
        if self._owner is not None and not self._prepared:
            self._take_over(self._owner)
        make_sockets_directory(self._prefix)
        if self.running is not None and not self._prepared:
            self.running.check()
            self.groups = self.running.groups()
            self._make_folder()
        self._prepared = True
        if not self.helper.running():
            self._helper_prepared = False
            self.helper.start()
        if not self._helper_prepared:
            self.helper.do(EnsureNamespace(namespace=self.helper.prefix))
            if self.running is not None:
                _note_of(self.helper.prefix).write_text(f"{self.running.uri}\n{self._guests}\n")
            self._helper_prepared = True
        if self.libvirtd is not None:
            self.libvirtd.ensure()

    def _make_folder(self) -> None:
        """Make the directory of guests' files if it is outside of DIR; in DIR the service user makes it."""
        if self._elsewhere is not None and not self._elsewhere.exists():
            self._elsewhere.mkdir()
            self._elsewhere.chmod(0o711)  # whatever the umask is
            os.chown(self._elsewhere, self._user.uid, self._user.gid, follow_symlinks=False)
        if self._elsewhere is not None and self._owner is not None and _owner_of(self._elsewhere) != self._user.uid:
            raise MicronovaError(f"{self._elsewhere} is no directory of {self._user.name}: move it away.")

    def _take_over(self, owner: ServiceUser) -> None:
        """Give guests' files to the user; they were DIR's owner's when one process did everything."""
        if self._former is not None and not self.root.exists() and _owner_of(self._former) == owner.uid:
            try:
                self._former.rename(self.root)
            except OSError as error:
                raise MicronovaError(f"Move {self._former} to {self.root}: {error.strerror}.") from None
            log.warning("guests' files were moved from %s to %s", self._former, self.root)
        # Of root's own directories, only those of a private libvirtd are the cloud's: a takeover may have been cut off.
        owners = {owner.uid} if self.libvirtd is None else {owner.uid, 0}
        for folder in [self.root] if self.libvirtd is None else self.libvirtd.folders():
            if _owner_of(folder) in owners:
                opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    take_over(opened, owner.uid, self._user)
                finally:
                    os.close(opened)

    def open(self, place: StateDirectory) -> None:
        """Let the guests of an existing libvirt pass through DIR, if their files are in it; for DIR's owner."""
        if self.running is not None and self._elsewhere is None:
            let_through(place)
        else:
            place.path.chmod(0o700)  # an earlier start may have opened it for the guests of another libvirt

    def detach(self) -> None:
        """Forget root's means, in the child that becomes the service user."""
        self.helper.detach()
        if self.libvirtd is not None:
            self.libvirtd.detach()

    def restart_dead(self) -> None:
        """Start the helper or libvirtd again if it died, and replace a helper that hangs.

        What fails is logged, and the next call tries again. Nothing is raised: the cloud and the agents end with root's
        process.
        """
        try:
            if not self.helper.running():
                log.warning("the privileged helper of this cloud ended and is started again")
            elif self.helper.hangs():
                log.error("the privileged helper of this cloud does not answer and is replaced")
                self.helper.kill()
            if self.libvirtd is not None and not self.libvirtd.running():
                log.warning("libvirtd of this cloud ended and is started again; its guests continue to run")
            self.start()
        except MicronovaError as error:
            log.error("%s", error)
        except Exception as error:
            log.error(
                "the helper and libvirtd of this cloud cannot be checked now, which is repeated: %s",
                error,
                exc_info=resource_exhausted(error) is None,
            )

    def has_guests(self) -> bool:
        """Return whether a guest runs; True if that is not known."""
        if self.running is not None:
            try:
                return self.running.has_guests()
            except MicronovaError as error:
                log.warning("%s", error)
                return True
        return self.libvirtd is not None and self.libvirtd.has_guests()

    def leave(self) -> None:
        """End the helper; guests and what was made for them stay."""
        self.helper.stop()
        log.warning("guests that run go on, with their networks: the next start finds them, `micronova down` ends them")

    def stop(self) -> None:
        """Power off all guests and remove everything but files in DIR."""
        if self.libvirtd is not None:
            self.libvirtd.stop()
        if self.running is not None:
            _power_off(self.running)
            _note_of(self.helper.prefix).unlink(missing_ok=True)
        try:
            self.helper.stop(cleanup=True)
        finally:
            remove_sockets_directory(self._prefix)


def _owner_of(path: Path) -> int | None:
    """Return the owner of a directory; None if there is none."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_uid if stat.S_ISDIR(found.st_mode) else None


def _note_of(prefix: str) -> Path:
    """Return root's note of which libvirt has a cloud's guests, and where their files are. It is outside of DIR."""
    return runtime_directory(prefix) / "libvirt"


def _power_off(running: "ExistingLibvirt") -> None:
    try:
        running.stop()
    except MicronovaError as error:
        log.error("guests may still run: %s", error)


def in_agent_namespace(settings: Settings, place: StateDirectory) -> Settings:
    """Return the settings with the private libvirtd in the network agent's namespace."""
    if settings.libvirt.network_namespace or settings.libvirt.connection_uri:
        return settings
    namespace = prefix_of(root_records.cloud_id(place))
    return msgspec.structs.replace(
        settings, libvirt=msgspec.structs.replace(settings.libvirt, network_namespace=namespace)
    )


def guests_outside(settings: Settings, place: StateDirectory) -> Settings:
    """Return the settings with guests' files of an existing libvirt outside of DIR, unless a setting says where.

    That libvirt writes console logs as root, by their path. Who owns a directory above them could put links there.
    """
    if not settings.libvirt.connection_uri or settings.libvirt.instances_path:
        return settings
    outside = place.path.with_name(f"{place.path.name}-guests")
    return msgspec.structs.replace(
        settings, libvirt=msgspec.structs.replace(settings.libvirt, instances_path=str(outside))
    )


def clean_up(place: StateDirectory) -> bool:
    """Remove what a cloud that crashed, or a host that was stopped, left on the machine; return whether there was
    anything. For root. Raise MicronovaError if root's process of the cloud runs."""
    from micronova.privileged.devices import namespaces
    from micronova.virt.libvirt.daemon.existing import ExistingLibvirt
    from micronova.virt.libvirt.setup import teardown

    cloud_id = root_records.cloud_id(place)
    prefix = prefix_of(cloud_id)
    _await_end_of(helper_socket(prefix), place)
    left = teardown(place.path)
    note = _note_of(prefix)
    if note.exists():
        uri, guests = note.read_text().splitlines()
        _power_off(ExistingLibvirt(uri, cloud_id, Path(guests)))
        note.unlink()
        left = True
    if namespaces(prefix):
        HelperProcess(prefix, helper_socket(prefix)).stop(cleanup=True)
        left = True
    left = end_daemons(prefix) or left
    remove_sockets_directory(prefix)
    return left


def _await_end_of(helper: Path, place: StateDirectory) -> None:
    """Wait a little for the end of a helper, which ends with root's process of its cloud; raise if it goes on."""
    deadline = time.monotonic() + HELPER_END
    while listens(helper):
        if time.monotonic() > deadline:
            raise MicronovaError(
                f"The agents of a host run in {place.path}: stop them first (systemctl stop micronova-host)."
            )
        time.sleep(0.05)


def supervise(
    processes: HostProcesses,
    user: ServiceUser,
    place: StateDirectory,
    main: Callable[[AgentLink | None], None],
    agent: AgentProcess | None = None,
    exporter: ExporterProcess | None = None,
    read_again: ReadAgain | None = None,
    *,
    guests_stay: bool = False,
    stop_timeout: float = math.inf,
) -> None:
    """Run `main` in a child as the user, keep the host processes running, and remove them when told to stop.

    With `guests_stay` guests and what they need go on without this process. `agent` is the process of the host's
    agents, if `main` does not run them itself; `exporter` serves volumes. At SIGHUP `read_again` returns the settings
    whose levels of the log these get.
    """
    asked = reload = False
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    said, say = os.pipe()  # what the child has to tell systemd

    def woken(number: int, _frame: Any) -> None:
        nonlocal asked, reload
        if number == signal.SIGHUP and not ends_with_its_terminal():
            reload = True
            _signal(child, signal.SIGHUP)
        elif number != signal.SIGCHLD:
            asked = True
            _terminate(child)

    notifications = Notifications.withdraw()
    hand_over(place, user)
    processes.start()
    link = None if agent is None else agent.listen()
    if link is not None and exporter is not None:
        link = replace(link, exporter=exporter.listen())
    others: list[SupervisedProcess] = [each for each in (exporter, agent) if each is not None]
    root = os.getpid()
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until the handlers are there
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        for descriptor in (reader, writer, said):
            os.close(descriptor)
        processes.detach()
        if agent is not None:
            agent.detach()
        if exporter is not None:
            exporter.detach()
        become(user, place.path, processes.groups if agent is None else ())
        processes.open(place)
        # The next start must not find two agents.
        end_with(root, signal.SIGKILL if agent is None else signal.SIGTERM)
        notifications.take(say)
        main(link)
        return
    os.close(say)
    listening, stopping, kill_at = [reader, said], False, math.inf
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, woken)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    failed: MicronovaError | None = None
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        try:
            for each in others if failed is None and not asked else ():
                each.tend(processes.groups)
        except MicronovaError as error:
            failed = error
            _terminate(child)
        if asked and not stopping:
            stopping = True
            kill_at = time.monotonic() + stop_timeout
            notifications.say("STOPPING=1")
            if stop_timeout < math.inf:  # TimeoutStopSec of the unit knows nothing of compute.shutdown_grace
                notifications.say(f"EXTEND_TIMEOUT_USEC={int((stop_timeout + END_MARGIN) * 1e6)}")
        if time.monotonic() > kill_at:  # the next start must not find two agents
            log.error("process %d does not stop and is killed", child)
            kill_at = math.inf
            _signal(child, signal.SIGKILL)
        tended = others if failed is None and not asked else []
        pause = min([CHECK_INTERVAL, *(each.attention for each in tended)])
        found = select.select(listening, [], [], pause)[0]
        if reader in found:
            os.read(reader, 512)  # a child ended, or a signal told us to stop or to read the settings again
        if said in found:
            text = os.read(said, 512)
            notifications.forward(text)
            if not text:
                listening = [reader]
        if reload:
            reload = False
            _reload(others, read_again)
        if not asked and failed is None:
            processes.restart_dead()
    code = os.waitstatus_to_exitcode(status)
    if agent is not None:
        agent.stop(kill=code != 0)
    # Guests of a cloud that crashed keep running, too: the next start finds them.
    if not guests_stay and ((code == 0 and failed is None) or asked or not processes.has_guests()):
        processes.stop()
        if exporter is not None:
            exporter.end()
    else:
        if exporter is not None:
            exporter.stop(kill=True)  # its daemons serve these guests
        processes.leave()
    if failed is not None:
        raise failed
    if code != 0:
        raise SystemExit(code if code > 0 else 128 - code)


def _reload(others: Sequence[SupervisedProcess], read_again: ReadAgain | None) -> None:
    """Give other processes new levels of the log; the cloud's process says what is wrong with the settings."""
    if read_again is None or not others:
        return
    try:
        new = read_again().default
    except SettingsError:
        return
    for each in others:
        each.use_levels(new)


def _terminate(pid: int) -> None:
    _signal(pid, signal.SIGTERM)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


Main = Callable[[Settings, Sequence[str], AgentLink | None], None]
"""Runs roles; the agents of this host are in another process if there is a link to them."""


def run_as_service(
    settings: Settings,
    place: StateDirectory,
    roles: Sequence[str],
    main: Main,
    *,
    needs_root: bool,
    guests_stay: bool = False,
    read_again: ReadAgain | None = None,
) -> None:
    """Run `main` as the service user. If it needs root and this is root, root's process supervises it.

    Agents of real guests run in a process and as a user of their own if there are other roles. With `guests_stay`
    guests go on when it is told to stop.
    """
    user = service_user(settings.default.user)
    if user is None:
        existing = needs_root and runs_qemu(settings) and bool(settings.libvirt.connection_uri)
        keep_private(place, passable=existing)  # the guests of an existing libvirt may pass through DIR to their files
        main(settings, roles, None)
        if existing and not guests_stay:
            from micronova.virt.libvirt.daemon.existing import ExistingLibvirt
            from micronova.virt.libvirt.setup import state_root

            guests = state_root(place.path, settings.libvirt).absolute()
            _power_off(ExistingLibvirt(settings.libvirt.connection_uri, place.keys().cloud_id, guests))
        return
    if not needs_root:
        hand_over(place, user)
        become(user, place.path)
        main(settings, roles, None)
        return
    others = [role for role in roles if role not in HOST_ROLES]
    agents = [role for role in roles if role in HOST_ROLES]
    agent_user = _agent_user(settings, user) if others else None
    claim(place, user)
    cloud_id = root_records.cloud_id(place)
    settings = in_agent_namespace(settings, place)
    stop_timeout = settings.compute.shutdown_grace + STOP_MARGIN
    if agent_user is None:
        supervise(
            HostProcesses(settings, place, user),
            user,
            place,
            lambda _: main(settings, roles, None),
            guests_stay=guests_stay,
            stop_timeout=stop_timeout,
        )
        return
    settings = guests_outside(settings, place)
    processes = HostProcesses(settings, place, agent_user, user)
    exporter = None
    if "volume" in others and "compute" in agents and runs_qemu(settings):
        lack = missing_exporter()
        if lack is None:
            exporter = ExporterProcess(
                settings,
                place,
                prefix_of(cloud_id),
                cloud=user,
                agent=agent_user,
                user=_volume_user(settings, user, agent_user),
                cloud_id=cloud_id,
                root=processes.root,
                seen_as=processes.seen_as,
            )
        else:
            log.warning("guests get no volumes: %s", lack)
    agent = AgentProcess(
        settings,
        place,
        prefix_of(cloud_id),
        cloud=user,
        user=agent_user,
        cloud_id=cloud_id,
        guests=processes.root,
        roles=agents,
        volumes=None if exporter is None else access_socket(prefix_of(cloud_id)),
    )
    supervise(
        processes,
        user,
        place,
        lambda link: main(settings, others, link),
        agent,
        exporter,
        read_again,
        guests_stay=guests_stay,
        stop_timeout=stop_timeout,
    )


def _volume_user(settings: Settings, *others: ServiceUser) -> ServiceUser:
    """Return the user that serves volumes; raise SettingsError if it is one of the others."""
    found = service_user(settings.default.volume_user)
    assert found is not None
    if found.uid in (0, *(other.uid for other in others)):
        raise SettingsError(
            f"default.volume_user is {found.name}, which is root or the user of another process: volumes need a user "
            "of their own."
        )
    return found


def _agent_user(settings: Settings, user: ServiceUser) -> ServiceUser:
    """Return the user of the agents; raise SettingsError if they cannot be separated from the other roles."""
    if not settings.default.transport_url.startswith("local:"):
        raise SettingsError(
            "Agents of real guests have a process of their own, and here no broker user of their own. Leave "
            "default.transport_url empty, or run compute and network-agent apart from the other roles: docs/region.md."
        )
    found = service_user(settings.default.agent_user)
    assert found is not None
    if found.uid == user.uid and user.uid != 0:
        raise SettingsError(f"default.agent_user is {found.name}, as default.user is: agents need a user of their own.")
    return found
