"""A private PostgreSQL that tests stop, crash and restart, with databases that they make."""

import signal
from pathlib import Path
from typing import Self

from micronova.cli.private_services.postgres import HOST, PrivatePostgres
from micronova.cli.private_services.process import end, run
from tests.services.process import free_port, signal_tree

OWNER = "micronova"
COUNTS_STATEMENTS = """
shared_preload_libraries = 'pg_stat_statements'
pg_stat_statements.track_utility = off
"""


class Postgres(PrivatePostgres):
    """One server: start() makes it, stop() or kill() end it, restart() brings it back with its data."""

    @classmethod
    def start(cls, directory: Path | str, durable: bool = False, counts_statements: bool = False) -> Self:
        """Make a new server under the directory; only a durable one keeps every commit when it is killed.

        One that counts statements has the extension pg_stat_statements in new databases.

        When we are root, the user `postgres` must be able to reach the directory (not pytest's tmp_path).
        """
        server = cls(Path(directory), free_port())
        server.create(OWNER, durable=durable)
        if counts_statements:
            with (server.data / "postgresql.auto.conf").open("a") as settings:
                settings.write(COUNTS_STATEMENTS)
        (server.directory / "port").write_text(str(server.port))
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
        try:
            self.launch()
        except BaseException:
            self.kill()
            raise

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

    def _url(self, database: str) -> str:
        return f"postgresql://{OWNER}@{HOST}:{self.port}/{database}"
