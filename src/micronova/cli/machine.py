"""What a machine with real guests needs of root, and who looks after it.

    root: micronova up ──┬── privileged helper (namespaces, bridges, firewall, DHCP)
                         ├── private libvirtd, in the cloud's network namespace; its guests
                         └── the cloud: every role, as a user who is not root

Root's process holds no data and answers nobody. It starts the others, starts those again that die, and when the cloud
is told to stop, takes everything off the machine: guests are switched off, their disks stay.
"""

import contextlib
import logging
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from micronova.cli.privilege import ServiceUser, become, claim, end_with, hand_over, service_user
from micronova.cli.state import StateDirectory
from micronova.conf.settings import Settings
from micronova.objects.errors import MicronovaError
from micronova.privileged.client import HelperProcess
from micronova.privileged.names import prefix_of
from micronova.privileged.verbs import EnsureNamespace

log = logging.getLogger(__name__)

LOOK = 5.0  # seconds between looks whether all lives


def helper_socket(place: StateDirectory) -> Path:
    """Return where the privileged helper of a cloud listens."""
    return place.path / "privileged.sock"


def probe(settings: Settings) -> str | None:
    """Say why this machine cannot have real guests, in one line with what to do; None when it can."""
    from micronova.privileged.kernel import missing_programs
    from micronova.virt.libvirt.setup import probe as libvirt

    if settings.libvirt.connection_uri:
        return libvirt(msgspec.to_builtins(settings.libvirt))
    if os.geteuid() != 0:
        return "Real guests and their networks are made by root: run as root (sudo micronova up)."
    packages = missing_programs()
    if packages:
        return f"Packages are missing: apt-get install --no-install-recommends {' '.join(packages)}"
    return libvirt(msgspec.to_builtins(settings.libvirt))


class Machine:
    """The privileged helper and the private libvirtd of one cloud on this machine. Methods block."""

    def __init__(self, settings: Settings, place: StateDirectory, user: ServiceUser) -> None:
        from micronova.virt.libvirt.setup import private_libvirtd

        cloud_id = place.keys().cloud_id
        self.helper = HelperProcess(prefix_of(cloud_id), helper_socket(place), uid=user.uid)
        self.libvirtd = None
        if settings.compute.compute_driver == "libvirt" and not settings.libvirt.connection_uri:
            host = settings.default.host or os.uname().nodename
            self.libvirtd = private_libvirtd(
                place.path, cloud_id, host, settings.libvirt, client=(user.uid, user.gid)
            )

    @property
    def groups(self) -> list[int]:
        """The groups that the cloud's user needs besides its own, to share files with guests."""
        return [] if self.libvirtd is None else [self.libvirtd.user.gid]

    def start(self) -> None:
        """Start what does not run."""
        if not self.helper.running():
            self.helper.start()
            self.helper.do(EnsureNamespace(namespace=self.helper.prefix))
        if self.libvirtd is not None:
            self.libvirtd.ensure()

    def look_after(self) -> None:
        """Start again what died."""
        try:
            self.start()
        except MicronovaError as error:
            log.error("%s", error)

    def has_guests(self) -> bool:
        """Say whether a guest runs."""
        return self.libvirtd is not None and self.libvirtd.has_guests()

    def stop(self) -> None:
        """Switch all guests off and take away everything but files in DIR."""
        if self.libvirtd is not None:
            self.libvirtd.stop()
        self.helper.stop(cleanup=True)


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
    from micronova.virt.libvirt.setup import teardown

    prefix = prefix_of(place.keys().cloud_id)
    left = teardown(place.path)
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
    elif needs_root:
        claim(place, user)
        settings = settings_on(settings, place)
        run_with_machine(Machine(settings, place, user), user, place, lambda: main(settings))
    else:
        hand_over(place, user)
        become(user, place)
        main(settings)
