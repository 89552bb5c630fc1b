"""The composition root: the only place that knows all rooms and wires them.

`Process` is what one process of a cloud runs: any subset of the roles over one database, one bus and one port.
`micronova up` runs all of them; `micronova run ROLE…` runs some.
"""

import logging
import os
import random as random_module
import socket
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from micronova.cli.names import COMPUTE_ROLES, ROLES, START_ORDER
from micronova.cli.neighbours import Neighbours
from micronova.cli.state import Keys, StateDirectory
from micronova.conf.settings import Settings, SettingsError
from micronova.db.engine import Database, open_database
from micronova.http.mount import App, HTTPServer, Mounts
from micronova.http.service import Service
from micronova.notifications.notifier import make_notifier
from micronova.objects.clock import Clock, SystemClock
from micronova.objects.errors import MicronovaError
from micronova.rpc.bus import Bus, connect
from micronova.rpc.guard import GuardedBus
from micronova.telemetry.telemetry import make_telemetry

log = logging.getLogger(__name__)


class Role(Protocol):
    """What can be started and stopped."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Process:
    """Roles of one process with what they share."""

    def __init__(
        self,
        settings: Settings,
        roles: Iterable[str],
        directory: StateDirectory,
        *,
        clock: Clock | None = None,
        random: random_module.Random | None = None,
        wrap_bus: Callable[[Bus], Bus] | None = None,
        after_step: Callable[[str, str], None] | None = None,
    ) -> None:
        self.settings = settings
        self.roles = [role for role in ROLES if role in set(roles)]
        self.directory = directory
        self.clock: Clock = clock or SystemClock()
        self.random: random_module.Random = random or random_module.SystemRandom()
        self.host = settings.default.host or socket.gethostname()
        self._wrap_bus = wrap_bus
        self._after_step = after_step
        self.keys: Keys
        self.database: Database | None = None
        self.bus: Bus | None = None
        self.apps: dict[str, App] = {}  # by mount path
        self.services: dict[str, Service] = {}  # by name: their routes are what the isolation tests walk
        self.embedded: dict[str, Any] = {}  # the neighbours that run in this process
        self.url = settings.api.public_url or f"http://{settings.api.listen}:{settings.api.port}"
        self.neighbours = Neighbours(self)
        self.telemetry = make_telemetry(settings, self.clock, self.host)
        self.notifier = make_notifier(settings, host=self.host, clock=self.clock, random=self.random)
        self.telemetry.metrics.counter(
            "micronova_notifications", "Notifications by what became of them.", "outcome", self.notifier.counts
        )
        self.started: list[Role] = []
        self._databases: dict[str, Database] = {}
        self._server: HTTPServer | None = None

    # --- life ------------------------------------------------------------------------------------------------

    async def start(self, sock: socket.socket | None = None) -> None:
        """Start the roles, neighbours first; what is started is stopped again if one fails."""
        self.directory.create()
        self.keys = self.directory.keys()
        if sock is not None and self.settings.api.public_url is None:
            self.url = f"http://{self.settings.api.listen}:{sock.getsockname()[1]}"
        try:
            await self._start_shared()
            await self.notifier.start()
            from micronova.cli import roles

            for name in START_ORDER:
                if name in self.roles:
                    role = await getattr(roles, f"make_{name.replace('-', '_')}")(self)
                    await role.start()
                    self.started.append(role)
            await self.neighbours.start()
            if sock is not None and self.apps:
                self._server = HTTPServer(
                    self.application(),
                    sock,
                    certificate=self.settings.api.tls_certificate,
                    key=self.settings.api.tls_key,
                    websockets="console" in self.roles,
                )
                await self._server.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop accepting, then the roles in the opposite order, then what they share."""
        if self._server is not None:
            await self._server.stop()
            self._server = None
        for role in reversed(self.started):
            try:
                await role.stop()
            except Exception:
                log.exception("%s did not stop cleanly", type(role).__name__)
        self.started.clear()
        await self.neighbours.close()
        await self.notifier.stop()
        if self.bus is not None:
            await self.bus.stop()
            self.bus = None
        for database in self._databases.values():
            await database.close()
        self._databases.clear()
        self.database = None
        await self.telemetry.close()

    async def connect(self) -> None:
        """Open the database and the bus without starting a role: for commands that look."""
        await self._start_shared()

    def application(self) -> App:
        """Return the ASGI application with every service of this process."""
        # A metadata service by itself is found without its mount too: proxies of other make know none.
        root = self.apps["/metadata"] if set(self.apps) == {"/metadata"} else None
        return Mounts(
            self.apps,
            root=root,
            origins=self.settings.api.cors_allowed_origins,
            websockets=frozenset({"/console"} & set(self.apps)),
        )

    async def _start_shared(self) -> None:
        if any(role in self.roles for role in ("api", "metadata", "conductor", "scheduler")):
            from micronova.db.schema import upgrade
            from micronova.db.tables import metadata

            self.database = await self.open_database("compute")
            await upgrade(self.database, metadata, "micronova.db.migrations")
        if any(role in self.roles for role in (*COMPUTE_ROLES, "console", "network-agent")):
            self.bus = await self.connect_bus()

    def schema_of(self, name: str) -> str | None:
        """Return the PostgreSQL schema of a service; compute has the default one, SQLite has files instead."""
        return None if name == "compute" or not self.settings.database.connection.startswith("postgres") else name

    async def open_database(self, name: str) -> Database:
        """Open the database of a service: a SQLite file of its own, or a schema of the PostgreSQL database."""
        url = self.settings.database.connection or self.directory.database_url(name)
        schema = self.schema_of(name)
        if url.startswith("sqlite") and self.settings.database.connection and name != "compute":
            url = f"{url}.{name}"
        try:
            database = open_database(url, schema=schema, pool_size=self.settings.database.pool_size)
            self._databases[name] = database
            await database.read(_ping)
        except MicronovaError as error:
            raise SettingsError(f"Cannot open the database {_without_password(url)}: {error}") from None
        except Exception as error:
            reason = str(getattr(error, "orig", error)).splitlines()[0]
            raise SettingsError(f"Cannot open the database {_without_password(url)}: {reason}") from None
        return database

    async def connect_bus(self) -> Bus:
        """Connect to the bus that the settings name."""
        url = self.settings.default.transport_url
        pins = {
            topic: version
            for topic in ("compute", "conductor", "scheduler")
            if (version := getattr(self.settings.upgrade_levels, topic))
        }
        if url.startswith("local:") and set(COMPUTE_ROLES) - set(self.roles):
            raise SettingsError(
                "default.transport_url is local://, which reaches only this process: a role on its own needs "
                "amqp://USER:PASSWORD@HOST/."
            )
        if url == "local://":
            url = f"local://{self.keys.cloud_id}"
        bus = connect(url, clock=self.clock, random=self.random, pins=pins, name=f"{self.host}:{os.getpid()}")
        try:
            await bus.start()
        except MicronovaError as error:
            raise SettingsError(f"Cannot reach the bus {_without_password(url)}: {error}") from None
        users = frozenset(self.settings.default.control_users)
        if users and not url.startswith("local:"):
            bus = GuardedBus(bus, users)
        return self.telemetry.bus(self._wrap_bus(bus) if self._wrap_bus is not None else bus)


def _ping(conn: Any) -> None:
    conn.exec_driver_sql("SELECT 1")


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")
    return f"{scheme}://{credentials.partition(':')[0]}{at}{place}" if at else url
