"""What a machine with real guests needs of root, and who looks after it.

    root: micronova up ──┬── privileged helper (namespaces, bridges, firewall, DHCP)
                         ├── private libvirtd, in the cloud's network namespace; its guests
                         └── the cloud: every role, as a user who is not root

Root's process holds no data and answers nobody. It starts the others, starts those again that die, and when the cloud
is told to stop, takes everything off the machine: guests are switched off, their disks stay.

Instead of the private libvirtd there may be one that runs already. It is not ours to start or stop; the cloud's guests
on it are treated alike, and the helper takes their taps into the cloud's network namespace.
"""

import contextlib
import logging
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from micronova.cli.privilege import ServiceUser, become, claim, end_with, hand_over, let_through, service_user
from micronova.cli.state import StateDirectory
from micronova.conf.settings import Settings
from micronova.objects.errors import MicronovaError
from micronova.privileged.client import HelperProcess, runtime_directory
from micronova.privileged.names import prefix_of
from micronova.privileged.verbs import EnsureNamespace

if TYPE_CHECKING:
    from micronova.virt.libvirt.running import RunningLibvirt

log = logging.getLogger(__name__)

LOOK = 5.0  # seconds between looks whether all lives


def helper_socket(place: StateDirectory) -> Path:
    """Return where the privileged helper of a cloud listens."""
    return place.path / "privileged.sock"


def probe(settings: Settings) -> str | None:
    """Say why this machine cannot have real guests, in one line with what to do; None when it can."""
    from micronova.privileged.kernel import missing_programs
    from micronova.virt.libvirt.running import obstacle
    from micronova.virt.libvirt.setup import probe as libvirt

    uri = settings.libvirt.connection_uri
    if os.geteuid() != 0 and not uri:
        return "Real guests and their networks are made by root: run as root (sudo micronova up)."
    packages = missing_programs()
    if packages and wires(settings):
        return f"Packages are missing: apt-get install --no-install-recommends {' '.join(packages)}"
    lacks = libvirt(msgspec.to_builtins(settings.libvirt))
    return obstacle(uri, _above_guests(settings)) if lacks is None and uri else lacks


def uses_machine(settings: Settings) -> bool:
    """Say whether guests are such as root has to see to: QEMU's, by a private libvirtd or one that runs already."""
    uri = settings.libvirt.connection_uri
    return settings.compute.compute_driver == "libvirt" and (not uri or uri.startswith("qemu"))


def wires(settings: Settings) -> bool:
    """Say whether a network agent of ours wires the guests here; root's helper does it for it."""
    if not uses_machine(settings):
        return False
    uri = settings.libvirt.connection_uri
    return not uri or (os.geteuid() == 0 and not settings.neutron.endpoint_override)


def unwired(settings: Settings) -> tuple[Settings, str]:
    """Where nobody would wire guests, leave their interfaces without a link; and say so."""
    if settings.compute.compute_driver != "libvirt" or wires(settings) or settings.neutron.endpoint_override:
        return settings, ""
    settings = msgspec.structs.replace(settings, libvirt=msgspec.structs.replace(settings.libvirt, wire=False))
    lack = "Guests get addresses but no network: their interfaces have no link."
    if uses_machine(settings):
        return settings, f"{lack} Wires are made by root: sudo micronova up."
    return settings, f"{lack} The embedded network service wires QEMU's guests only."


def _above_guests(settings: Settings) -> Path:
    """Return the directory that guests' files are to be in, and that is not made or opened to them by us."""
    if settings.libvirt.instances_path:
        return Path(settings.libvirt.instances_path).absolute().parent
    directory = Path(settings.default.state_path).absolute()
    return directory.parent if os.geteuid() == 0 else directory


class Machine:
    """The privileged helper of one cloud on this machine, and the libvirt of its guests. Methods block."""

    def __init__(self, settings: Settings, place: StateDirectory, user: ServiceUser) -> None:
        from micronova.virt.libvirt.driver import state_root
        from micronova.virt.libvirt.running import RunningLibvirt
        from micronova.virt.libvirt.setup import private_libvirtd

        cloud_id = place.keys().cloud_id
        self._user = user
        self.libvirtd = self.running = None
        guests = None
        if uses_machine(settings) and settings.libvirt.connection_uri:
            guests = state_root(place.path, settings.libvirt).absolute()
            self.running = RunningLibvirt(settings.libvirt.connection_uri, cloud_id, guests)
        elif uses_machine(settings):
            host = settings.default.host or os.uname().nodename
            self.libvirtd = private_libvirtd(
                place.path, cloud_id, host, settings.libvirt, client=(user.uid, user.gid)
            )
        self.helper = HelperProcess(prefix_of(cloud_id), helper_socket(place), uid=user.uid, guests=guests)
        self._guests = guests
        self._elsewhere = guests if settings.libvirt.instances_path else None
        self._passes: int | None = None  # the group of those who have to pass through DIR to their files
        self.groups: list[int] = []  # that the cloud's user needs besides its own, to share files with guests

    def start(self) -> None:
        """Start what does not run."""
        if self.running is not None and not self.groups:
            guests_user = self.running.user()
            self.groups = self.running.groups(guests_user)
            self._passes = None if self._elsewhere else guests_user.gid
            self._make_folder()
        if not self.helper.running():
            self.helper.start()
            self.helper.do(EnsureNamespace(namespace=self.helper.prefix))
            if self.running is not None:
                _note_of(self.helper.prefix).write_text(f"{self.running.uri}\n{self._guests}\n")
        if self.libvirtd is not None:
            self.libvirtd.ensure()
            self.groups = [self.libvirtd.user.gid]

    def _make_folder(self) -> None:
        """Have a directory for guests' files that is elsewhere than in DIR, where the cloud's user makes it itself."""
        if self._elsewhere is not None and not self._elsewhere.exists():
            self._elsewhere.mkdir(mode=0o711)
            os.chown(self._elsewhere, self._user.uid, self._user.gid, follow_symlinks=False)

    def open(self, place: StateDirectory) -> None:
        """Let those pass through DIR who need to, and nobody else; for the process that has become its owner."""
        if self._passes is not None:
            let_through(place, self._passes)
        else:
            place.path.chmod(0o700)  # it may have been opened for guests of another libvirt

    def look_after(self) -> None:
        """Start again what died."""
        try:
            self.start()
        except MicronovaError as error:
            log.error("%s", error)

    def has_guests(self) -> bool:
        """Say whether a guest runs, or may."""
        if self.running is not None:
            try:
                return self.running.has_guests()
            except MicronovaError as error:
                log.warning("%s", error)
                return True
        return self.libvirtd is not None and self.libvirtd.has_guests()

    def stop(self) -> None:
        """Switch all guests off and take away everything but files in DIR."""
        if self.libvirtd is not None:
            self.libvirtd.stop()
        if self.running is not None:
            _switch_off(self.running)
            _note_of(self.helper.prefix).unlink(missing_ok=True)
        self.helper.stop(cleanup=True)


def _note_of(prefix: str) -> Path:
    """Return where root notes which libvirt has a cloud's guests, and their files: not in DIR, which is not root's."""
    return runtime_directory(prefix) / "libvirt"


def _switch_off(running: "RunningLibvirt") -> None:
    try:
        running.stop()
    except MicronovaError as error:
        log.error("guests may run on: %s", error)


def settings_on(settings: Settings, place: StateDirectory) -> Settings:
    """Have the private libvirtd in the namespace where the network agent looks for guests."""
    if settings.libvirt.network_namespace or settings.libvirt.connection_uri:
        return settings
    namespace = prefix_of(place.keys().cloud_id)
    return msgspec.structs.replace(
        settings, libvirt=msgspec.structs.replace(settings.libvirt, network_namespace=namespace)
    )


def clean_up(place: StateDirectory) -> bool:
    """Take away what a cloud that ended badly left on the machine, and say whether there was anything; for root."""
    from micronova.privileged.devices import namespaces
    from micronova.virt.libvirt.running import RunningLibvirt
    from micronova.virt.libvirt.setup import teardown

    cloud_id = place.keys().cloud_id
    prefix = prefix_of(cloud_id)
    left = teardown(place.path)
    note = _note_of(prefix)
    if note.exists():
        uri, guests = note.read_text().splitlines()
        _switch_off(RunningLibvirt(uri, cloud_id, Path(guests)))
        note.unlink()
        left = True
    if namespaces(prefix):
        HelperProcess(prefix, helper_socket(place)).stop(cleanup=True)
        left = True
    return left


def run_with_machine(machine: Machine, user: ServiceUser, place: StateDirectory, main: Callable[[], None]) -> None:
    """Run `main` in a child as the user, look after the machine meanwhile, and clean up when it was told to stop."""
    asked = False
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def woken(number: int, _frame: Any) -> None:
        nonlocal asked
        if number != signal.SIGCHLD:
            asked = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)

    hand_over(place, user)
    machine.start()
    root = os.getpid()
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # none is to come while nobody is there to take it
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        os.close(reader)
        os.close(writer)
        machine.helper.detach()
        become(user, place, machine.groups)
        machine.open(place)
        end_with(root, signal.SIGTERM)
        main()
        return
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, woken)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    status = 0
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if select.select([reader], [], [], LOOK)[0]:
            os.read(reader, 512)  # a child ended, or we were told to
        if not asked:
            machine.look_after()
    code = os.waitstatus_to_exitcode(status)
    # A cloud that fell over leaves its guests running: the next start finds them.
    if code == 0 or asked or not machine.has_guests():
        machine.stop()
    if code != 0:
        raise SystemExit(code if code > 0 else 128 - code)


def run_as_service(
    settings: Settings, place: StateDirectory, main: Callable[[Settings], None], *, needs_root: bool
) -> None:
    """Run `main` as a user who is not root. If this is root, and it is needed, root sees to the machine meanwhile."""
    user = service_user(settings.default.user)
    if user is None:
        main(settings)
        if needs_root and uses_machine(settings) and settings.libvirt.connection_uri:
            from micronova.virt.libvirt.driver import state_root
            from micronova.virt.libvirt.running import RunningLibvirt

            guests = state_root(place.path, settings.libvirt).absolute()
            _switch_off(RunningLibvirt(settings.libvirt.connection_uri, place.keys().cloud_id, guests))
    elif needs_root:
        claim(place, user)
        settings = settings_on(settings, place)
        run_with_machine(Machine(settings, place, user), user, place, lambda: main(settings))
    else:
        hand_over(place, user)
        become(user, place)
        main(settings)
