"""A private libvirtd: its own configuration, sockets, state and logs under one directory, in its own mount namespace.

Root's libvirtd has its paths compiled in. So it runs in a mount namespace where those paths are ours: DIRECTORY lies
over /var/lib/libvirt, and its etc, run, log and cache over the rest. The machine's own libvirt, if there is one, is
neither seen nor touched, and any number of private ones run side by side. `/run` is empty in there: no system
bus, no udev, nothing through which the daemon could change the machine.

Guests see the same fixed paths whatever DIRECTORY is; its parents may be closed to QEMU's user.

The daemon and its guests outlive the agent. It keeps its pid file locked as long as it lives, which is how it is
found again: a pid alone may be anybody's.
"""

import fcntl
import grp
import os
import pwd
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from micronova.virt.libvirt.layout import Layout
from micronova.virt.libvirt.library import LibvirtMissing

SEEN_AS = Path("/var/lib/libvirt")
"""Where the daemon and its guests see DIRECTORY."""
START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0
NOTICE_TIMEOUT = 3.0
SOCKET_PATH_LIMIT = 107
QEMU_USERS = ("libvirt-qemu", "qemu")
CONSOLE_LOG_BYTES = 262_144
"""When a console log is this long another is begun; one old one is kept."""

PROGRAMS = {
    "libvirtd": "libvirt-daemon-system",
    "virtlogd": "libvirt-daemon-system",
    "unshare": "util-linux",
    "mount": "mount",
    "nsenter": "util-linux",
}
_SOCKETS = {"libvirtd": "libvirt-sock", "virtlogd": "virtlogd-sock"}
_SHADOWED = ("/etc/libvirt", "/var/lib/libvirt", "/var/log/libvirt", "/var/cache/libvirt")

# $1: the directory; $2: "fresh" if /sys is to show another network namespace; $3: "hide" if /dev/kvm is of no
# use; then the daemon's command line.
_ENTER = """
set -eu
directory=$1 sys=$2 kvm=$3
shift 3
mount --bind "$directory" /var/lib/libvirt
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
exec "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QemuUser:
    """Whom guests run as."""

    name: str
    group: str
    uid: int
    gid: int


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
    ) -> None:
        self.directory = directory
        self._host_uuid = host_uuid
        self._namespace = namespace
        self.user = user
        self._kvm = kvm  # if not, guests do not see the device: libvirt would try it again and again
        self._client = client  # user and group of the agent: who may talk to it is as good as root on this machine

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.directory / "run" / _SOCKETS["libvirtd"]

    @property
    def uri(self) -> str:
        """How to connect."""
        return f"qemu+unix:///system?socket={quote(str(self.socket))}"

    def ensure(self) -> None:
        """Start what does not run; raise in one line if that cannot be."""
        if len(os.fsencode(self.socket)) > SOCKET_PATH_LIMIT:
            raise LibvirtMissing(f"The path {self.socket} is too long for a socket: choose a shorter directory.")
        if self._answers("libvirtd") and self._answers("virtlogd"):
            return
        if os.geteuid() != 0:
            raise LibvirtMissing("A private libvirtd is started by root: run as root, or set libvirt.connection_uri.")
        self._prepare()
        with self._alone():
            for daemon in ("virtlogd", "libvirtd"):
                self._await_end(daemon)
                if not self._answers(daemon):
                    self._start(daemon)

    def running(self) -> bool:
        """Say whether the daemon lives."""
        return self._owner("libvirtd") is not None

    def has_guests(self) -> bool:
        """Say whether a guest runs."""
        return any(True for _ in self._qemu_pids())

    def stop(self) -> None:
        """End the daemons and any guest that still runs; definitions and disks stay."""
        for guest in self._qemu_pids():
            _end(guest, signal.SIGKILL)
        if self.running():
            # It removes what it made for them.
            deadline = time.monotonic() + NOTICE_TIMEOUT
            while any(self._guest_files()) and time.monotonic() < deadline:
                time.sleep(0.02)
        for daemon in ("libvirtd", "virtlogd"):
            pid = self._owner(daemon)
            if pid is not None:
                _end(pid, signal.SIGTERM)
                deadline = time.monotonic() + STOP_TIMEOUT
                while self._owner(daemon) is not None:
                    if time.monotonic() > deadline:
                        _end(pid, signal.SIGKILL)
                    time.sleep(0.02)

    def _prepare(self) -> None:
        directory = self.directory
        directory.mkdir(parents=True, exist_ok=True)
        # Inside the namespace this is /var/lib/libvirt: guests pass through it.
        directory.chmod(0o711)
        for name, mode in {"etc": 0o700, "run": 0o755, "log": 0o711, "cache": 0o711}.items():
            folder = directory / name
            folder.mkdir(exist_ok=True)
            folder.chmod(mode)
        # What is in these the agent makes and removes.
        for folder in (*Layout(directory).folders, directory / "log" / "qemu"):
            folder.mkdir(exist_ok=True)
            os.chown(folder, self._client[0], self.user.gid)
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
                # Guests can see the socket; only these may use it.
                unix_sock_group=f"+{group}",
                unix_sock_rw_perms="0770" if group else "0700",
                unix_sock_ro_perms="0700",
                auth_unix_rw="none",
                auth_unix_ro="none",
                log_outputs="3:file:/var/log/libvirt/libvirtd.log",
                max_clients=100,
                max_client_requests=20,
                max_workers=30,
            ),
            "qemu.conf": _lines(
                user=self.user.name,
                group=self.user.group,
                # Our directories carry the group; files keep their owner.
                dynamic_ownership=0,
                security_driver="none",
                seccomp_sandbox=1,
                stdio_handler="logd",
                # Nothing of the machine's control groups is changed, and nothing is left in them.
                cgroup_controllers=[],
                # QEMU's own view of /dev cannot be made over one that hides a device.
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
        command = ["unshare", "--mount", "--propagation", "private", "--"]
        command += ["sh", "-c", _ENTER, daemon, str(self.directory)]
        command += ["fresh" if self._namespace else "same", "show" if self._kvm else "hide"]
        command += [path, "--daemon", "--config", f"/etc/libvirt/{daemon}.conf"]
        command += ["--pid-file", f"/run/libvirt/{daemon}.pid"]
        if self._namespace:
            command = ["nsenter", f"--net=/run/netns/{self._namespace}", "--", *command]
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py")), *command]
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=START_TIMEOUT,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LibvirtMissing(f"{daemon} did not start within {START_TIMEOUT:g} s.") from None
        if done.returncode != 0 and self._owner(daemon) is None:
            said = done.stdout.decode(errors="replace").strip().splitlines()
            raise LibvirtMissing(f"{daemon} did not start: {said[-1] if said else f'it ended with {done.returncode}'}")

    def _await_end(self, daemon: str) -> None:
        """One that lives and does not listen any more is just ending."""
        deadline = time.monotonic() + STOP_TIMEOUT
        while (pid := self._owner(daemon)) is not None and not self._answers(daemon):
            if time.monotonic() > deadline:
                _end(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _answers(self, daemon: str) -> bool:
        return self._owner(daemon) is not None and _listens(self.directory / "run" / _SOCKETS[daemon])

    def _owner(self, daemon: str) -> int | None:
        """Give the process that holds the daemon's pid file."""
        return _lock_owner(self.directory / "run" / f"{daemon}.pid")

    def _qemu_pids(self) -> Iterator[int]:
        """Find the guests' processes: those whose pid files are ours and that are still what they were."""
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
        return [file for file in (self.directory / "run" / "qemu").glob("*.pid") if file.name != "driver.pid"]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.directory / "run" / ".starting").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def find_qemu_user(name: str = "", group: str = "") -> QemuUser:
    """Find the user whom the packages made for guests, or the one that is named."""
    for candidate in [name] if name else QEMU_USERS:
        try:
            entry = pwd.getpwnam(candidate)
        except KeyError:
            continue
        group_name, gid = _group(group, candidate, entry.pw_gid)
        return QemuUser(name=candidate, group=group_name, uid=entry.pw_uid, gid=gid)
    raise LibvirtMissing(
        f"There is no user {name or ' or '.join(QEMU_USERS)} to run guests as: install libvirt-daemon-system."
    )


def missing_directories() -> list[str]:
    """List the directories that the packages should have made and that a private libvirtd is mounted over."""
    return [path for path in _SHADOWED if not Path(path).is_dir()]


def _group(wanted: str, user: str, primary: int) -> tuple[str, int]:
    try:
        return wanted or user, grp.getgrnam(wanted or user).gr_gid
    except KeyError:
        if wanted:
            raise LibvirtMissing(f"There is no group {wanted} to run guests as.") from None
    return grp.getgrgid(primary).gr_name, primary


def _lines(**options: str | int | list[str]) -> str:
    """Write libvirt's configuration format."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in options.items())


def _value(value: str | int | list[str]) -> str:
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    return f'"{value}"'


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (BlockingIOError, PermissionError):  # too many at once, or not for us: it is there
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
