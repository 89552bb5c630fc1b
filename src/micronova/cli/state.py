"""DIR: the files of a cloud that survive a restart, readable by their owner only."""

import contextlib
import errno
import fcntl
import os
import secrets
import signal
import socket
import stat
import string
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from micronova.objects.errors import MicronovaError

if TYPE_CHECKING:
    from micronova.http.tokens import TokenKey


class NewerTokenKey(msgspec.Struct):
    """A key that signs tokens from a time on."""

    key: str
    since: float


_CREDENTIALS = struct.Struct("3i")  # of a process: its id, user and group


class Keys(msgspec.Struct, kw_only=True):
    """The secrets of a cloud, made at its first start."""

    cloud_id: str
    secret_key: str  # seals the secrets of operations
    token_key: str  # signs tokens, until the first of newer_token_keys does
    ticket_key: str  # signs image tickets
    admin_password: str
    demo_password: str
    service_password: str
    newer_token_keys: list[NewerTokenKey] = []
    other_secret_keys: list[str] = []  # with which secrets may still be sealed, while the key is being changed


def default_directory() -> Path:
    """Return the directory of a cloud if neither --dir nor MICRONOVA_DIR names one."""
    if os.geteuid() == 0:
        return Path("/var/lib/micronova")
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "micronova"


def new_password() -> str:
    """Return a password of letters only, so that no shell, option parser or YAML reader takes it for anything else."""
    return "".join(secrets.choice(string.ascii_letters) for _ in range(24))


def open_trusted(file: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file, without waiting; in another user's directory, only a regular file of that user's or of root's.

    Root reads files in DIR, which belongs to the service user. That user could put a link to a file there that only
    root can read, or a FIFO that never ends. Root's directories and the caller's own may contain links.
    """
    owner = file.parent.stat().st_uid
    if owner in (0, os.geteuid()):
        return os.open(file, flags | os.O_CLOEXEC, 0o600)
    try:
        descriptor = os.open(file, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket, or a FIFO that nobody reads
            raise MicronovaError(f"{file} is not a regular file, in a directory of another user: remove it.") from None
        raise
    found = os.fstat(descriptor)
    # Another name of a file of root's is not a file that root has put there.
    own = found.st_uid == owner or (found.st_uid == 0 and found.st_nlink == 1)
    if stat.S_ISREG(found.st_mode) and own:
        return descriptor
    os.close(descriptor)
    raise MicronovaError(f"{file} is not a regular file of the owner of its directory: remove it.")


def read_trusted(file: Path) -> bytes:
    """Return the content of a file that open_trusted opens."""
    with os.fdopen(open_trusted(file), "rb") as stream:
        return stream.read()


class StateDirectory:
    """The files in DIR."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Make the directory, for its owner only."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.path / "images").mkdir(exist_ok=True)
        except OSError as error:
            raise MicronovaError(f"Cannot make {self.path}: {error.strerror}. Choose another with --dir.") from None

    def has_keys(self) -> bool:
        """Return whether a cloud was ever started here."""
        try:
            (self.path / "keys.json").lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def keys(self) -> Keys:
        """Return the keys; make them at the first call."""
        file = self.path / "keys.json"
        if self.has_keys():
            try:
                return msgspec.json.decode(read_trusted(file), type=Keys)
            except msgspec.MsgspecError as error:
                raise MicronovaError(f"{file} is damaged: {error}.") from None
        return self.make_keys(str(uuid.uuid4()))

    def make_keys(self, cloud_id: str) -> Keys:
        """Make the keys of a new cloud."""
        from micronova.http.tokens import TokenKey

        keys = Keys(
            cloud_id=cloud_id,
            secret_key=secrets.token_hex(32),
            token_key=TokenKey.generate().hex(),
            ticket_key=secrets.token_hex(32),
            admin_password=new_password(),
            demo_password=new_password(),
            service_password=new_password(),
        )
        self.write("keys.json", msgspec.json.format(msgspec.json.encode(keys), indent=2))
        return keys

    def token_keys(self) -> "list[TokenKey]":
        """Return the keys that sign tokens, as they are now in the file."""
        from micronova.http.tokens import TokenKey

        keys = self.keys()
        newer = [TokenKey(bytes.fromhex(each.key), each.since) for each in keys.newer_token_keys]
        return [TokenKey(bytes.fromhex(keys.token_key)), *newer]

    def rotate_token_key(self, now: float, since: float, lifetime: float) -> None:
        """Make a key that signs tokens from `since` on; erase the keys whose tokens have all expired.

        The processes of the identity service read the file again, and accept the new key before it signs.
        """
        from micronova.http.tokens import TokenKey, in_use

        with self._changed_keys() as keys:
            first, *others = [*in_use(self.token_keys(), now, lifetime), TokenKey(TokenKey.generate(), since)]
            keys.token_key = first.private.hex()
            keys.newer_token_keys = [NewerTokenKey(each.private.hex(), each.since) for each in others]

    def rotate_secret_key(self) -> None:
        """Make a new key for secrets; the old one still opens them. A change that was not completed goes on."""
        with self._changed_keys() as keys:
            if not keys.other_secret_keys:
                keys.secret_key, keys.other_secret_keys = secrets.token_hex(32), [keys.secret_key]

    def forget_other_secret_keys(self) -> None:
        """Complete the change of the key for secrets."""
        with self._changed_keys() as keys:
            keys.other_secret_keys = []

    @contextlib.contextmanager
    def _changed_keys(self) -> Iterator[Keys]:
        """Yield the keys, and write them when the context ends; nobody else changes them meanwhile."""
        self.keys()  # makes them, if there are none
        file = self.path / "keys.json"
        while True:
            descriptor = open_trusted(file)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.fstat(descriptor).st_ino != file.lstat().st_ino:
                    continue  # who had the lock has written another file
                keys = self.keys()
                yield keys
                self.write("keys.json", msgspec.json.format(msgspec.json.encode(keys), indent=2))
                return
            finally:
                os.close(descriptor)

    def use_secret_key(self) -> int:
        """Return a descriptor; while it is open, the key for secrets is not changed. Raise MicronovaError if it is."""
        descriptor = self._lock(fcntl.LOCK_SH)
        if descriptor is None:
            raise MicronovaError(
                f"The key for secrets in {self.path} is being changed: start again when `micronova key rotate` has "
                "ended."
            )
        return descriptor

    @contextlib.contextmanager
    def unused_secret_key(self) -> Iterator[None]:
        """Keep processes that use the key for secrets from starting; raise MicronovaError if one runs.

        It would go on to seal secrets with the old key, which nothing could open any more.
        """
        descriptor = self._lock(fcntl.LOCK_EX)
        if descriptor is None:
            raise MicronovaError(
                f"A process uses the keys in {self.path}, or begins to: stop the cloud, or the roles, that run in this "
                "directory, and start them afterwards."
            )
        try:
            yield
        finally:
            os.close(descriptor)

    def _lock(self, how: int) -> int | None:
        """Lock the directory; return None if another process has a lock that keeps this one from it."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:  # of a file system without locks: roles start, and the key is not changed
            if how == fcntl.LOCK_EX:
                os.close(descriptor)
                raise MicronovaError(f"{self.path} cannot be locked: {error.strerror}.") from None
        return descriptor

    def write(self, name: str, content: bytes) -> Path:
        """Write a file whole or not at all, for DIR's owner only.

        Root may write here while DIR belongs to the service user. So no link is followed, and the file changes its
        owner by its descriptor: its name may lead to another file by then.
        """
        file = self.path / name
        fresh = file.with_name(f".{name}.new")
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            if os.geteuid() == 0:
                owner = self.path.stat()
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        fresh.replace(file)
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)  # else the name is lost with the power: of keys.json, all that the keys open
        finally:
            os.close(directory)
        return file

    def write_clouds(
        self, url: str, keys: Keys, region: str, guests: str = "real", *, authority: Path | None = None
    ) -> Path:
        """Write clouds.yaml: `micronova` is the admin, `micronova-demo` a plain member.

        `authority` is the certificate by which clients verify those of the services; else they use the system's.

        `guests` is what guests are (real, simulated, or without a network), for `micronova ssh`, which may read nothing
        else in DIR.
        """
        text = (
            "# Written by Micronova. export OS_CLIENT_CONFIG_FILE=THIS_FILE OS_CLOUD=micronova-demo\n"
            f"micronova:\n  guests: {guests}\nclouds:\n"
        )
        for cloud, user, project, password in (
            ("micronova", "admin", "admin", keys.admin_password),
            ("micronova-demo", "demo", "demo", keys.demo_password),
        ):
            text += (
                f"  {cloud}:\n    region_name: {region}\n    identity_api_version: 3\n    auth:\n"
                f"      auth_url: {url}/identity/v3\n      username: {user}\n      password: {password}\n"
                f"      project_name: {project}\n      user_domain_name: Default\n      project_domain_name: Default\n"
            )
            if authority is not None:
                text += f"    cacert: {authority}\n"
        return self.write("clouds.yaml", text.encode())

    def database_url(self, name: str) -> str:
        """Return the URL of one of the SQLite files."""
        return f"sqlite:///{self.path / name}.sqlite"

    def has_database(self, name: str) -> bool:
        """Return whether one of the SQLite files was ever made."""
        return os.path.lexists(self.path / f"{name}.sqlite")

    @property
    def control(self) -> Path:
        """The control socket of the running cloud."""
        return self.path / "control.sock"

    def conductor_lock(self, worker: str) -> Path:
        """The lock of a conductor that runs in this directory; it names the owner of its leases.

        `worker` tells the conductors of several workers apart.
        """
        return self.path / f"conductor{worker}.lock"

    @property
    def pid_file(self) -> Path:
        """The process id of the running cloud."""
        return self.path / "micronova.pid"

    def running_pid(self) -> int | None:
        """Return the process that listens on the control socket; None if no cloud runs in this directory.

        The kernel names the process. The pid file does not decide: the service user writes it, and root may ask. That
        user may also put a link to another socket there, so only a process of DIR's owner counts.
        """
        from micronova.privileged.client import address_of

        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(2.0)
            try:
                with address_of(self.control) as address:
                    sock.connect(address)
                raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            except PermissionError:
                raise MicronovaError(f"The cloud in {self.path} belongs to another user: use sudo.") from None
            except BlockingIOError:  # its queue of connections is full
                raise MicronovaError(
                    f"The cloud in {self.path} runs and does not answer: end its process, which listens on "
                    f"{self.control}, then try again."
                ) from None
            except OSError:
                return None
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return pid if pid > 0 and uid == self._owner() and self._is_owners(pid) else None

    def terminate(self, pid: int) -> None:
        """Send SIGTERM to a process of DIR's owner; do nothing if another user's process has its id by now."""
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            try:
                if self._is_owners(pid):
                    signal.pidfd_send_signal(process, signal.SIGTERM)
            finally:
                os.close(process)

    def _owner(self) -> int:
        return self.path.stat().st_uid

    def _is_owners(self, pid: int) -> bool:
        """Return whether a process belongs to DIR's owner now. The kernel names who listened first."""
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return False
        return f"\nUid:\t{self._owner()}\t" in status

    def supervisor_pid(self, pid: int) -> int:
        """Return the process that `up` wrote down, if it is the parent of the running process; else that one."""
        try:
            named = int(read_trusted(self.pid_file))
            fields = Path(f"/proc/{pid}/status").read_text().splitlines()
        except (OSError, ValueError, MicronovaError):
            return pid
        return named if f"PPid:\t{named}" in fields else pid


class OwnerLock:
    """A file that names the lease owner of the process that holds a lock on it.

    The kernel releases the lock when the process ends, however it ends. So a process that gets the lock knows that the
    owner in the file is dead.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.predecessor = os.read(descriptor, 1024).decode("utf-8", "replace").strip()

    @classmethod
    def take(cls, file: Path) -> "OwnerLock | None":
        """Lock the file; return None if another process holds the lock."""
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return cls(descriptor)

    def record(self, owner: str) -> None:
        """Write the owner's name for the next process."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{owner}\n".encode(), 0)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


def ask(control: Path, path: str, *, method: str = "GET", body: Any = None, timeout: float = 120.0) -> Any:
    """Send a request to the control socket of the running cloud and return the decoded answer."""
    import http.client

    from micronova.privileged.client import address_of

    class Connection(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(timeout)
            with address_of(control) as address:
                self.sock.connect(address)

    connection = Connection("control", timeout=timeout)
    try:
        data = msgspec.json.encode(body) if body is not None else None
        connection.request(method, path, body=data, headers={"content-type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    except PermissionError:
        raise MicronovaError(f"The cloud at {control} belongs to another user: use sudo.") from None
    except OSError:
        raise MicronovaError(
            f"No cloud answers at {control}: start one with `micronova up`, or name it by --dir or MICRONOVA_DIR."
        ) from None
    finally:
        connection.close()
    if answer.status >= 400:
        raise MicronovaError(content.decode("utf-8", "replace"))
    return msgspec.json.decode(content)
