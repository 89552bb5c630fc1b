"""A private libvirtd: its own configuration, sockets, state and logs under one directory, in its own mount namespace.

Root's libvirtd has its paths compiled in. So it runs in a mount namespace in which DIRECTORY is mounted over
/var/lib/libvirt, and its etc, run, log and cache over the other paths. The machine's own libvirt, if there is one, is
not affected, and any number of private ones run side by side. `/run` is empty in the namespace: there is no system bus
and no udev through which the daemon could change the machine.

Guests see the same paths whatever DIRECTORY is, and QEMU's user needs no access to its parents.

DIRECTORY is root's own, in a directory that may belong to another user, who could put a link or another directory in
its place. So root opens it once without following a link, refuses one that is not root's, and works below the open
descriptor only.

The daemon and its guests outlive the agent. It keeps its pid file locked as long as it lives; by the lock it is found
again, because a pid alone may belong to another process.
"""

import fcntl
import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.daemon.cgroups import CONTROLLERS, DaemonGroup
from micronova.virt.libvirt.daemon.qemu_user import QemuUser
from micronova.virt.libvirt.storage.layout import Layout

log = logging.getLogger(__name__)

SEEN_AS = Path("/var/lib/libvirt")
"""Where the daemon and its guests see DIRECTORY."""
START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0
NOTICE_TIMEOUT = 3.0
SOCKET_PATH_LIMIT = 107
_NOWHERE = Path("/proc/self/fd/none")  # nothing has this path
GUEST_PROCESSES = 1024
"""How many threads and processes the user of a guest may have."""
CONSOLE_LOG_BYTES = 262_144
"""The size at which a console log is rotated; one old file is kept."""

PROGRAMS = {
    "libvirtd": "libvirt-daemon-system",
    "virtlogd": "libvirt-daemon-system",
    "unshare": "util-linux",
    "mount": "mount",
    "nsenter": "util-linux",
}
_SOCKETS = {"libvirtd": "libvirt-sock", "virtlogd": "virtlogd-sock"}
_SECURITY = (("selinuxfs", "rw", "/sys/fs/selinux"), ("securityfs", "rw", "/sys/kernel/security"))
"""By these libvirt finds SELinux and AppArmor, and separates guests by them. A new /sys does not have them."""
_PAGES = Path("/sys/kernel/mm/hugepages")
_SHADOWED = ("/etc/libvirt", "/var/lib/libvirt", "/var/log/libvirt", "/var/cache/libvirt")

# The working directory is the daemon's directory. $1: "fresh" if /sys must show another network namespace; $2: "hide"
# if /dev/kvm does not work; then type, options and place of each further mount; "--"; the daemon's command line.
_ENTER = """
set -eu
sys=$1 kvm=$2
shift 2
mount --no-canonicalize --bind . /var/lib/libvirt
cd /
mount -t tmpfs -o mode=0755,size=64m tmpfs /run
mkdir /run/libvirt
mount --bind /var/lib/libvirt/run /run/libvirt
mount --bind /var/lib/libvirt/etc /etc/libvirt
mount --bind /var/lib/libvirt/log /var/log/libvirt
mount --bind /var/lib/libvirt/cache /var/cache/libvirt
if [ "$sys" = fresh ]; then
    mount -t sysfs sysfs /sys
fi
if [ "$kvm" = hide ] && [ -e /dev/kvm ]; then
    mount --bind /var/lib/libvirt/etc/nothing /dev/kvm
fi
while [ "$1" != -- ]; do
    mkdir -p "$3"
    mount -t "$1" -o "$2" "$1" "$3" || [ "$1" = hugetlbfs ]
    shift 3
done
shift
if [ -e /sys/fs/cgroup/cgroup.subtree_control ]; then
    # A group with processes gives no controllers to its children.
    mkdir -p /sys/fs/cgroup/daemon
    echo $$ >/sys/fs/cgroup/daemon/cgroup.procs
fi
exec "$@"
"""


class PrivateLibvirtd:
    """One private libvirtd with its virtlogd. Methods block."""

    def __init__(
        self,
        directory: Path,
        *,
        host_uuid: str,
        namespace: str = "",
        user: QemuUser,
        kvm: bool = False,
        client: tuple[int, int] = (0, 0),
        security_driver: str = "",
    ) -> None:
        self.directory = directory
        self._host_uuid = host_uuid
        self._namespace = namespace
        self.user = user
        self._kvm = kvm  # if not, /dev/kvm is hidden: libvirt would probe it again and again
        self._client = client  # user and group of the agent; access to the socket is equivalent to root
        self._security_driver = security_driver  # empty: what the machine has
        self._open: int | None = None  # root's descriptor of the directory
        self._group = DaemonGroup(directory)
        self._compared = False  # the settings of daemons that ran already with those of now

    @property
    def socket(self) -> Path:
        """The socket that it listens on."""
        return self.directory / "run" / _SOCKETS["libvirtd"]

    @property
    def uri(self) -> str:
        """The URI to connect to it."""
        return f"qemu+unix:///system?socket={quote(str(self.socket))}"

    @property
    def has_cgroups(self) -> bool:
        """Whether its guests are in control groups."""
        return self._group.exists()

    @property
    def _tree(self) -> Path:
        """The directory; for root the one that was opened, whatever its path leads to by now."""
        if os.geteuid() != 0:
            return self.directory
        if self._open is None:
            self._open = _open_own(self.directory)
        return _NOWHERE if self._open is None else Path(f"/proc/self/fd/{self._open}")

    def folders(self) -> list[Path]:
        """Return the directories whose files are the agent's."""
        tree = self._tree
        return [*Layout(tree).folders, tree / "log" / "qemu"]

    def detach(self) -> None:
        """Close root's descriptor, in a child that gives root's rights up."""
        if self._open is not None:
            os.close(self._open)
            self._open = None

    def ensure(self) -> None:
        """Start the daemons that do not run; raise LibvirtMissing if that fails."""
        if len(os.fsencode(self.socket)) > SOCKET_PATH_LIMIT:
            raise LibvirtMissing(f"The path {self.socket} is too long for a socket: choose a shorter directory.")
        if os.geteuid() == 0:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # what it is, is checked when it is opened
                self.directory.mkdir()
        if self._answers("libvirtd") and self._answers("virtlogd") and not self._ended_to_configure():
            if os.geteuid() == 0:  # an earlier agent may have had another group
                for path in (self._tree / "run", self._tree / "run" / _SOCKETS["libvirtd"]):
                    os.chown(path, -1, self._client[1])
            return
        if os.geteuid() != 0:
            raise LibvirtMissing(
                "The private libvirtd of this host does not answer. Root's process of this cloud starts it "
                "again. If there is no such process, start the cloud as root, or set libvirt.connection_uri."
            )
        self._group.make()
        self._prepare()
        with self._start_lock():
            for daemon in ("virtlogd", "libvirtd"):
                self._await_end(daemon, unless_it_answers=True)  # else it is about to end
                if not self._answers(daemon):
                    self._start(daemon)

    def running(self) -> bool:
        """Return whether the daemon runs."""
        return self._owner("libvirtd") is not None

    def has_guests(self) -> bool:
        """Return whether a guest runs."""
        return any(True for _ in self._qemu_pids())

    def stop(self) -> None:
        """Stop the guests and the daemons; definitions and disks stay."""
        for guest in self._qemu_pids():
            _end(guest, signal.SIGKILL)
        if self.running():
            # Let it remove what it made for them.
            deadline = time.monotonic() + NOTICE_TIMEOUT
            while any(self._guest_files()) and time.monotonic() < deadline:
                time.sleep(0.02)
        self._end_daemons()
        self._group.remove()

    def _ended_to_configure(self) -> bool:
        """End daemons of an earlier start that have other settings; return whether they ended.

        They go on while a guest runs: libvirt labels and limits guests by these settings, and virtlogd has their logs.
        """
        if self._compared or os.geteuid() != 0:
            return False
        self._compared = True  # they do not change while this process runs
        etc = self._tree / "etc"
        changed = [
            name
            for name, text in self._configuration().items()
            if (etc / name).exists() and (etc / name).read_text() != text
        ]
        if not changed:
            return False
        if self.has_guests():
            log.warning(
                "the private libvirtd in %s runs with other settings than those of now (%s), because guests run; "
                "`micronova down` on this host, which ends them, lets the next start use those of now",
                self.directory,
                ", ".join(changed),
            )
            return False
        self._end_daemons()
        return True

    def _end_daemons(self) -> None:
        for daemon in ("libvirtd", "virtlogd"):
            pid = self._owner(daemon)
            if pid is not None:
                _end(pid, signal.SIGTERM)
                self._await_end(daemon)

    def _prepare(self) -> None:
        directory = self._tree
        # Inside the namespace this is /var/lib/libvirt, which guests traverse.
        directory.chmod(0o711)
        # Guests cannot enter `run`: its sockets are the agent's, and its files name the guests of all tenants.
        for name, mode in {"etc": 0o700, "run": 0o710, "log": 0o711, "cache": 0o711}.items():
            folder = directory / name
            folder.mkdir(exist_ok=True)
            folder.chmod(mode)
        os.chown(directory / "run", 0, self._client[1])
        # The agent creates and removes files in these.
        for folder in self.folders():
            folder.mkdir(exist_ok=True)
            os.chown(folder, *self._client)
        (directory / "log" / "qemu").chmod(0o700)
        if not (directory / "qemu").exists():
            # Libvirt would let everybody list these, and files in them have the names of all tenants' guests.
            for name in ("qemu", "qemu/save", "qemu/nvram", "qemu/channel", "qemu/channel/target"):
                (directory / name).mkdir()
                (directory / name).chmod(0o711)
        nothing = directory / "etc" / "nothing"
        nothing.touch()
        nothing.chmod(0)
        for name, text in self._configuration().items():
            fresh = directory / "etc" / f".{name}.new"
            fresh.write_text(text)
            fresh.chmod(0o600)
            fresh.replace(directory / "etc" / name)

    def _configuration(self) -> dict[str, str]:
        _, group = self._client
        return {
            "libvirtd.conf": _lines(
                host_uuid=self._host_uuid,
                # Guests can see the socket; only this group may use it.
                unix_sock_group=f"+{group}",
                unix_sock_rw_perms="0770" if group else "0700",
                unix_sock_ro_perms="0700",
                auth_unix_rw="none",
                auth_unix_ro="none",
                log_outputs="3:file:/var/log/libvirt/libvirtd.log",
                max_clients=100,
                max_client_requests=20,
                max_workers=40,
            ),
            "qemu.conf": _lines(
                user=self.user.name,
                group=self.user.group,
                # What libvirt makes for a guest belongs to the guest's user; definitions except disks from that.
                dynamic_ownership=1,
                remember_owner=0,
                **({"security_driver": self._security_driver} if self._security_driver else {}),
                seccomp_sandbox=1,
                max_processes=GUEST_PROCESSES,
                max_core=0,
                stdio_handler="logd",
                cgroup_controllers=list(CONTROLLERS) if self.has_cgroups else [],
                # Libvirt cannot make a /dev for QEMU from one with a hidden device.
                namespaces=["mount"] if self._kvm else [],
            ),
            "virtlogd.conf": _lines(
                max_size=CONSOLE_LOG_BYTES, max_backups=1, log_outputs="3:file:/var/log/libvirt/virtlogd.log"
            ),
        }

    def _start(self, daemon: str) -> None:
        path = shutil.which(daemon)
        if path is None:
            raise LibvirtMissing(f"{daemon} is missing: install {PROGRAMS[daemon]}.")
        in_group = daemon == "libvirtd" and self.has_cgroups
        command = self._group.join() if in_group else []
        command += ["unshare", "--mount", "--propagation", "private", "--"]
        command += ["sh", "-c", _ENTER, daemon]
        command += ["fresh" if self._namespace else "same", "show" if self._kvm else "hide"]
        security = [mount for mount in _SECURITY if self._namespace and os.path.ismount(mount[2])]
        pages = _huge_pages() if daemon == "libvirtd" else ()
        for mount in (*security, *pages, *(self._group.mounts if in_group else ())):
            command += mount
        command += ["--", path, "--daemon", "--config", f"/etc/libvirt/{daemon}.conf"]
        command += ["--pid-file", f"/run/libvirt/{daemon}.pid"]
        if self._namespace:
            command = ["nsenter", f"--net=/run/netns/{self._namespace}", "--", *command]
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("subreaper.py")), *command]
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=self._tree,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=START_TIMEOUT,
                start_new_session=True,
                umask=0o022,  # QEMU, another user, reads what the daemons write
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LibvirtMissing(f"{daemon} did not start within {START_TIMEOUT:g} s.") from None
        if done.returncode != 0 and self._owner(daemon) is None:
            said = done.stdout.decode(errors="replace").strip().splitlines()
            raise LibvirtMissing(f"{daemon} did not start: {said[-1] if said else f'it ended with {done.returncode}'}")

    def _await_end(self, daemon: str, *, unless_it_answers: bool = False) -> None:
        """Wait for the end of a daemon that runs; kill it if that takes long."""
        deadline = time.monotonic() + STOP_TIMEOUT
        while (pid := self._owner(daemon)) is not None and not (unless_it_answers and self._answers(daemon)):
            if time.monotonic() > deadline + STOP_TIMEOUT:
                raise LibvirtMissing(f"{daemon} (process {pid}) does not end: the kernel does not let go of it.")
            if time.monotonic() > deadline:
                _end(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _answers(self, daemon: str) -> bool:
        return self._owner(daemon) is not None and _listens(self._tree / "run" / _SOCKETS[daemon])

    def _owner(self, daemon: str) -> int | None:
        """Return the pid of the process that has the daemon's pid file locked."""
        return _lock_owner(self._tree / "run" / f"{daemon}.pid")

    def _qemu_pids(self) -> Iterator[int]:
        """Yield the pids of the guests' processes; a pid that now belongs to another process is left out."""
        for file in self._guest_files():
            try:
                pid = int(file.read_text())
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (OSError, ValueError):
                continue
            # Each guest's command line names the directory of its monitor's socket.
            if b"guest=" + os.fsencode(file.stem) in arguments:
                yield pid

    def _guest_files(self) -> list[Path]:
        return [file for file in (self._tree / "run" / "qemu").glob("*.pid") if file.name != "driver.pid"]

    @contextmanager
    def _start_lock(self) -> Iterator[None]:
        with (self._tree / "run" / ".starting").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _open_own(directory: Path) -> int | None:
    """Open root's own directory without following a link; return None if there is none.

    Raise LibvirtMissing if it is a link or belongs to another user.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        found = os.open(directory, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LibvirtMissing(f"{directory} cannot be opened as root's own directory: {error.strerror}.") from None
    if os.fstat(found).st_uid != 0:
        os.close(found)
        raise LibvirtMissing(f"{directory} does not belong to root: move it away, or choose another directory.")
    return found


def _huge_pages() -> list[tuple[str, str, str]]:
    """Return type, options and place of a file system for each size of huge pages; libvirt finds them by their type.

    The machine may have none mounted. Where none can be mounted, guests with huge pages cannot be started.
    """
    sizes = [folder.name.removeprefix("hugepages-").removesuffix("kB") for folder in _PAGES.glob("hugepages-*kB")]
    return [("hugetlbfs", f"pagesize={size}K", f"/run/hugepages/{size}kB") for size in sorted(sizes)]


def missing_directories() -> list[str]:
    """Return the missing ones of the directories that a private libvirtd mounts over; libvirt's packages make them."""
    return [path for path in _SHADOWED if not Path(path).is_dir()]


def _lines(**options: str | int | list[str]) -> str:
    """Return options in libvirt's configuration format."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in options.items())


def _value(value: str | int | list[str]) -> str:
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    return f'"{value}"'


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # it would wait for a place in the queue of connections, for ever if the daemon hangs
        try:
            probe.connect(str(path))
        except (BlockingIOError, PermissionError):  # too many connections, or no permission: it listens
            return True
        except OSError:
            return False
    return True


def _lock_owner(path: Path) -> int | None:
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, request)
    finally:
        os.close(descriptor)
    kind, _, _, _, pid = struct.unpack("hhqqi4x", answer)
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None


def _end(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
