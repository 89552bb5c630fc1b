"""DIR: everything of a cloud that survives a restart, readable by its owner only."""

import os
import secrets
import socket
import uuid
from pathlib import Path
from typing import Any

import msgspec

from micronova.objects.errors import MicronovaError


class Keys(msgspec.Struct, kw_only=True):
    """What must not be guessed; made once, at the first start."""

    cloud_id: str
    secret_key: str  # seals the secrets of operations
    token_key: str  # signs tokens
    ticket_key: str  # signs image tickets
    admin_password: str
    demo_password: str
    service_password: str


def default_directory() -> Path:
    """Return where a cloud lives when nothing else is said."""
    if os.geteuid() == 0:
        return Path("/var/lib/micronova")
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "micronova"


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
        """Say whether a cloud was ever started here."""
        return (self.path / "keys.json").exists()

    def keys(self) -> Keys:
        """Read the keys; the first time, make them."""
        file = self.path / "keys.json"
        if file.exists():
            try:
                return msgspec.json.decode(file.read_bytes(), type=Keys)
            except msgspec.MsgspecError as error:
                raise MicronovaError(f"{file} is damaged: {error}.") from None
        from micronova.http.tokens import TokenSigner

        keys = Keys(
            cloud_id=str(uuid.uuid4()),
            secret_key=secrets.token_hex(32),
            token_key=TokenSigner.generate().hex(),
            ticket_key=secrets.token_hex(32),
            admin_password=secrets.token_urlsafe(15),
            demo_password=secrets.token_urlsafe(15),
            service_password=secrets.token_urlsafe(24),
        )
        self.write("keys.json", msgspec.json.format(msgspec.json.encode(keys), indent=2))
        return keys

    def write(self, name: str, content: bytes) -> Path:
        """Write a file whole or not at all, for its owner only."""
        file = self.path / name
        fresh = file.with_name(f".{name}.new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        fresh.replace(file)
        return file

    def write_clouds(self, url: str, keys: Keys, region: str) -> Path:
        """Write clouds.yaml: `micronova` is the admin, `micronova-demo` a plain member."""
        text = "# Made by `micronova up`. Use: export OS_CLIENT_CONFIG_FILE=THIS_FILE OS_CLOUD=micronova\nclouds:\n"
        for cloud, user, project, password in (
            ("micronova", "admin", "admin", keys.admin_password),
            ("micronova-demo", "demo", "demo", keys.demo_password),
        ):
            text += (
                f"  {cloud}:\n    region_name: {region}\n    identity_api_version: 3\n    auth:\n"
                f"      auth_url: {url}/identity/v3\n      username: {user}\n      password: {password}\n"
                f"      project_name: {project}\n      user_domain_name: Default\n      project_domain_name: Default\n"
            )
        return self.write("clouds.yaml", text.encode())

    def database_url(self, name: str) -> str:
        """Return the URL of one of the SQLite files."""
        return f"sqlite:///{self.path / name}.sqlite"

    @property
    def control(self) -> Path:
        """The control socket of the running cloud."""
        return self.path / "control.sock"

    @property
    def pid_file(self) -> Path:
        """The process id of the running cloud."""
        return self.path / "micronova.pid"

    def running_pid(self) -> int | None:
        """Return the process id of the cloud that runs in this directory, if one does."""
        try:
            pid = int(self.pid_file.read_text())
            os.kill(pid, 0)
        except (OSError, ValueError):
            return None
        return pid if self._answers() else None

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(2.0)
            try:
                sock.connect(str(self.control))
            except OSError:
                return False
        return True


def ask(control: Path, path: str, *, method: str = "GET", body: Any = None, timeout: float = 120.0) -> Any:
    """Ask the running cloud something through its control socket."""
    import http.client

    class Connection(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(timeout)
            self.sock.connect(str(control))

    connection = Connection("control", timeout=timeout)
    try:
        data = msgspec.json.encode(body) if body is not None else None
        connection.request(method, path, body=data, headers={"content-type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    except OSError:
        raise MicronovaError(
            f"No cloud answers at {control}: start one with `micronova up`, or name its directory with --dir."
        ) from None
    finally:
        connection.close()
    if answer.status >= 400:
        raise MicronovaError(content.decode("utf-8", "replace"))
    return msgspec.json.decode(content)
