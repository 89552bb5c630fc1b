"""A private PostgreSQL: own directory, own port, own process; never the system's."""

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Self

from tests.services.process import ServiceError, end, free_port, is_root, run, signal_tree, wait_until

OWNER = "micronova"
HOST = "127.0.0.1"
COUNTS_STATEMENTS = """
shared_preload_libraries = 'pg_stat_statements'
pg_stat_statements.track_utility = off
"""


def programs() -> Path:
    """Return the directory of the newest installed PostgreSQL server's programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    if on_path := shutil.which("initdb"):
        return Path(on_path).resolve().parent
    raise ServiceError("PostgreSQL is not installed: run scripts/ensure-packages")


class Postgres:
    """One server: start() makes it, stop() or kill() end it, restart() brings it back with its data."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.port = port
        self.process: subprocess.Popen[bytes] | None = None
        self._bin = programs()
        # PostgreSQL refuses to run as root; Debian's package brings the user.
        self._user = "postgres" if is_root() else None

    @classmethod
    def start(cls, directory: Path | str, durable: bool = False, counts_statements: bool = False) -> Self:
        """Make a new server under the directory; only a durable one keeps every commit when it is killed.

        One that counts statements has the extension pg_stat_statements in new databases.

        When we are root, the user `postgres` must be able to reach the directory (not pytest's tmp_path).
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if is_root():
            shutil.chown(directory, "postgres", "postgres")
        server = cls(directory, free_port())
        run(
            *(str(server._bin / "initdb"), "--pgdata", str(server._data), "--username", OWNER),
            *("--auth", "trust", "--encoding", "UTF8", "--locale", "C.UTF-8", "--no-sync"),
            user=server._user,
        )
        settings = _settings(server.port, durable) + (COUNTS_STATEMENTS if counts_statements else "")
        (server._data / "postgresql.auto.conf").write_text(settings)
        (directory / "port").write_text(str(server.port))
        server.restart()
        if counts_statements:
            server.sql("CREATE EXTENSION pg_stat_statements", "template1")
        return server

    @classmethod
    def attach(cls, directory: Path | str) -> Self:
        """Use a server that another process started under the directory."""
        return cls(Path(directory), int((Path(directory) / "port").read_text()))

    @property
    def url(self) -> str:
        """The URL of the maintenance database."""
        return self._url("postgres")

    def create_database(self, name: str, template: str = "template1") -> str:
        """Create a database, as a copy of the template, and return its URL."""
        self.sql(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return self._url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database and cut off whoever still uses it."""
        self.sql(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def sql(self, statement: str, database: str = "postgres") -> str:
        """Run one statement with psql and return its bare output."""
        psql = str(self._bin / "psql")
        return run(psql, "-XqAt", "-v", "ON_ERROR_STOP=1", "-c", statement, self._url(database)).strip()

    def restart(self) -> None:
        """Start the process again, after stop() or kill() or over a running one, on the same port and data."""
        self.stop()
        log = self.directory / "log"
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [str(self._bin / "postgres"), "-D", str(self._data)],
                cwd="/",
                user=self._user,
                group=self._user,
                extra_groups=None if self._user is None else [],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # a Ctrl-C is for the tests, which then stop us in order
            )
        try:
            wait_until(self._ready, self.process, log)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Stop in order: clients are cut off, what is committed is written."""
        end(self.process, signal.SIGINT)
        self.process = None

    def kill(self) -> None:
        """Crash: the postmaster and all its backends are gone at once, nothing is flushed."""
        if self.process is None:
            return
        # A SIGKILL of the postmaster alone leaves backends behind that block the restart until they notice.
        # SIGQUIT makes it SIGQUIT all of them, which exit without any clean-up: recovery runs at the restart.
        end(self.process, signal.SIGQUIT, seconds=5)
        self.process = None

    def pause(self) -> None:
        """Let it stand still: connections stay open and nothing answers."""
        signal_tree(self.process, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        signal_tree(self.process, signal.SIGCONT)

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _url(self, database: str) -> str:
        return f"postgresql://{OWNER}@{HOST}:{self.port}/{database}"

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
