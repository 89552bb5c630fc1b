"""A private PostgreSQL: own directory, own port, own process; never the system's."""

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from micronova.cli.private_services.process import ServiceError, end, run, wait_until
from micronova.cli.state import open_trusted

HOST = "127.0.0.1"


def programs() -> Path:
    """Return the directory of the newest installed PostgreSQL server's programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    if on_path := shutil.which("initdb"):
        return Path(on_path).resolve().parent
    raise ServiceError("PostgreSQL is not installed: apt-get install --no-install-recommends postgresql")


class PrivatePostgres:
    """One server: `create` makes its files, `launch` starts it, `stop` ends the process that `launch` started."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.port = port
        self.process: subprocess.Popen[bytes] | None = None
        self._bin = programs()
        # PostgreSQL refuses to run as root; Debian's package brings the user.
        self._user = "postgres" if os.geteuid() == 0 else None

    @property
    def data(self) -> Path:
        """Its data directory."""
        return self.directory / "data"

    def create(
        self, superuser: str, *, password: str = "", durable: bool = True, tls: tuple[Path, Path] | None = None
    ) -> None:
        """Make the files of a new server; without a password every user of this machine may log in.

        `tls` is a certificate and its key, which are copied. When we are root, the user `postgres` must be able to
        reach the directory. That user owns only the data: in the directory itself, where we write, it can put no links.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self.data.mkdir(mode=0o700, exist_ok=True)
        if self._user is not None:
            self.directory.chmod(0o711)
            shutil.chown(self.data, self._user, self._user)
        with tempfile.NamedTemporaryFile("w", dir=self.directory, suffix=".password") as file:
            file.write(password)
            file.flush()
            if self._user is not None:
                shutil.chown(file.name, self._user, self._user)
            login = ("--auth", "scram-sha-256", "--pwfile", file.name) if password else ("--auth", "trust")
            run(
                *(str(self._bin / "initdb"), "--pgdata", str(self.data), "--username", superuser, *login),
                *("--encoding", "UTF8", "--locale", "C.UTF-8", "--no-sync"),
                user=self._user,
            )
        settings = _settings(self.port, durable)
        if tls is not None:
            certificate, key = self.copy_certificate(*tls)
            settings += f"ssl = on\nssl_cert_file = '{certificate}'\nssl_key_file = '{key}'\n"
        with os.fdopen(open_trusted(self.data / "postgresql.auto.conf", os.O_WRONLY | os.O_APPEND), "w") as stream:
            stream.write(settings)

    def copy_certificate(self, certificate: Path, key: Path) -> tuple[Path, Path]:
        """Copy a certificate and its key to where the server reads them, at its start and at SIGHUP; return the copies.

        PostgreSQL refuses a key that others can read.
        """
        copies = self.directory / certificate.name, self.directory / key.name
        for source, copy in zip((certificate, key), copies, strict=True):
            copy.touch(0o600)
            copy.write_bytes(source.read_bytes())
            if self._user is not None:
                shutil.chown(copy, self._user, self._user)
        return copies

    def launch(self) -> None:
        """Start the process and wait until it accepts connections."""
        log = self.directory / "log"
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [str(self._bin / "postgres"), "-D", str(self.data)],
                cwd="/",
                user=self._user,
                group=self._user,
                extra_groups=None if self._user is None else [],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # a Ctrl-C is for who started us, and stops us in order
            )
        wait_until(self._ready, self.process, log)

    def stop(self) -> None:
        """Stop in order: clients are cut off, what is committed is written."""
        end(self.process, signal.SIGINT)
        self.process = None

    def _ready(self) -> bool:
        command = [str(self._bin / "pg_isready"), "-q", "-h", HOST, "-p", str(self.port)]
        return subprocess.run(command, check=False).returncode == 0


def _settings(port: int, durable: bool) -> str:
    keep = "on" if durable else "off"
    return f"""
listen_addresses = '{HOST}'
port = {port}
unix_socket_directories = ''
max_connections = 300
shared_buffers = 64MB
fsync = {keep}
synchronous_commit = {keep}
full_page_writes = {keep}
max_wal_size = 1GB
autovacuum_naptime = 10s
timezone = 'UTC'
log_timezone = 'UTC'
"""
