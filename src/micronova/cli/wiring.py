"""The composition root: the only package that knows all others and wires them.

`Process` is what one process of a cloud runs: any subset of the roles over one database, one bus and one port.
`micronova up` runs all of them; `micronova run ROLE…` runs some. What only some need is imported where it is used: the
agent of a host has no database and answers no HTTP.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import random as random_module
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

from micronova.cli.agent import HOST_ROLES, SERVICES, AgentLink, control_name
from micronova.cli.clients import Clients
from micronova.cli.connections import open_and_ask, start_bus, when_available
from micronova.cli.names import COMPUTE_ROLES, EMBEDDED_ROLES, ROLES, START_ORDER
from micronova.cli.state import Keys, OwnerLock, StateDirectory, default_directory
from micronova.cli.telemetry import make_telemetry
from micronova.compute.rpcapi import COMPUTE_INTERFACE
from micronova.conf.settings import Settings, SettingsError, load
from micronova.notifications.notifier import make_notifier
from micronova.objects.clock import Clock, SystemClock
from micronova.objects.errors import Unavailable
from micronova.objects.ids import PooledSystemRandom
from micronova.rpc.bus import Bus, connect
from micronova.rpc.contract import queue_name
from micronova.rpc.guard import GuardedBus
from micronova.rpc.local import LocalBus
from micronova.rpc.unix.bus import UnixBus
from micronova.rpc.unix.gate import BusGate

if TYPE_CHECKING:
    from micronova.cli.process_record import RecordedProcess, RecordedService
    from micronova.db.clock import DatabaseClock
    from micronova.db.engine import Database
    from micronova.db.secrets import SecretBox
    from micronova.embedded.identity.service import IdentityService
    from micronova.embedded.image.service import ImageService
    from micronova.embedded.network.service import NetworkService
    from micronova.embedded.volume.service import VolumeService
    from micronova.http.access_log import AccessLog
    from micronova.http.asgi import App
    from micronova.http.healthcheck import Check
    from micronova.http.server import HTTPServer
    from micronova.http.service import Service

log = logging.getLogger(__name__)

NO_CONTROL_USERS = (
    "default.control_users is empty: every user of the broker may give orders to hosts and answer for any service. "
    "Name the broker user of the control services there, also on hosts."
)
AGENT_GRACE = 20.0  # seconds beyond compute.shutdown_grace that the agents' process has to stop
COMPUTE_TOPIC = COMPUTE_INTERFACE.topic
MIGRATIONS = "micronova.db.migrations"
WITH_COMPUTE_DATABASE = ("api", "metadata", "conductor", "scheduler")

T = TypeVar("T")


class EmbeddedServices(TypedDict, total=False):
    """The embedded services of a process, by role. A process imports only those that it runs."""

    identity: IdentityService
    image: ImageService
    network: NetworkService
    volume: VolumeService


class Role(Protocol):
    """A part of the cloud that can be started and stopped."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class AfterStart:
    """A role with a function that is called once it has started."""

    def __init__(self, role: Role, then: Callable[[], Awaitable[Any]]) -> None:
        self._role, self._then = role, then

    async def start(self) -> None:
        """Start the role, then call the function."""
        await self._role.start()
        await self._then()

    async def stop(self) -> None:
        """Stop the role."""
        await self._role.stop()


def role_module(name: str) -> Any:
    """Import the module of a role; a process has only the code of its roles."""
    return importlib.import_module(f"micronova.cli.roles.{name.replace('-', '_')}")


class Process:
    """The roles of one process and what they share: database, bus, HTTP server, telemetry."""

    def __init__(
        self,
        settings: Settings,
        roles: Iterable[str],
        directory: StateDirectory,
        *,
        clock: Clock | None = None,
        random: random_module.Random | None = None,
        wrap_bus: Callable[[Bus], Bus] | None = None,
        after_commit: Callable[[str, str], None] | None = None,
        agent: AgentLink | None = None,
        waits: bool = False,
        cloud_id: str = "",
        volume_access: Path | None = None,
        relay_socket: socket.socket | None = None,
        on_stop: Callable[[], None] | None = None,
        name: str = "",
    ) -> None:
        """`name` is that of its conductor and scheduler, default.host unless another process has it. `agent` is the
        process with the agents of this host, if it is another one. If the process `waits`, its start waits for a
        database or broker that is away. The others are for the process of the agents: it gets the id of its cloud, the
        sockets of the exporter of volumes and of its console relay, and what to do when the cloud stops.
        """
        self.settings = settings
        self.roles = [role for role in ROLES if role in set(roles)]
        self.directory = directory
        self.clock: Clock = clock or SystemClock()
        self.random: random_module.Random = random or PooledSystemRandom()
        self.host = settings.default.host or socket.gethostname()
        self.name = name or self.host
        self._wrap_bus = wrap_bus
        self.after_commit = after_commit
        self.agent = agent
        self._waits = waits
        self.cloud_id = cloud_id
        self.volume_access = volume_access
        self.relay_socket = relay_socket
        self._on_stop = on_stop
        self.gate: BusGate | None = None  # through it the agents use the bus of this process
        self._link: UnixBus | None = None  # the other end of a gate
        self.keys: Keys
        self.database: Database | None = None
        self.bus: Bus | None = None
        self.apps: dict[str, App] = {}  # by mount path
        self.services: dict[str, Service] = {}  # by name: their routes are what the isolation tests walk
        self.embedded: EmbeddedServices = {}  # those that run in this process
        self.access_log: AccessLog | None = None  # of the HTTP server
        self.url = _url(settings, settings.api.listen, settings.api.port)
        self.clients = Clients(self)
        self.telemetry = make_telemetry(settings, self.clock, self.host)
        self.notifier = make_notifier(settings, host=self.host, clock=self.clock, random=self.random)
        self.telemetry.metrics.counter(
            "micronova_notifications", "Notifications by outcome.", "outcome", self.notifier.counts
        )
        self.started: list[Role] = []
        self._databases: dict[str, Database] = {}
        self._database_clock: DatabaseClock | None = None
        self._recorded: RecordedProcess | RecordedService | None = None
        self._servers: list[HTTPServer] = []
        self._owner_lock: OwnerLock | None = None
        self._key_lock: int | None = None  # a descriptor

    # --- start and stop --------------------------------------------------------------------------------------

    async def start(self, sock: socket.socket | None = None) -> None:
        """Start the roles in START_ORDER; if one fails, stop those that were started."""
        if not self.cloud_id:
            self.directory.create()
            if not self.settings.default.secret_key:
                self._key_lock = self.directory.use_secret_key()
            self.keys = self.directory.keys()
            self.cloud_id = self.keys.cloud_id
        if sock is not None:
            address, port = sock.getsockname()[:2]
            self.url = _url(self.settings, address, port)
        try:
            await self.connect(upgrade=True)
            await self.notifier.start()
            for name in START_ORDER:
                if name in self.roles:
                    role = await role_module(name).make(self)
                    await role.start()
                    self.started.append(role)
            self._recorded = self._record()
            if self._recorded is not None:
                await self._recorded.start()
                self.started.append(self._recorded)
            await self.clients.start()
            if self.apps:
                await self._answer(sock)
            if self.gate is not None:
                await self.gate.start()
        except BaseException:
            await self.stop()
            raise

    def _record(self) -> RecordedProcess | RecordedService | None:
        """Return what lets `micronova status` know this process; hosts have their heartbeats instead."""
        if not set(self.roles) - set(HOST_ROLES):
            return None
        from micronova.cli.process_record import RecordedProcess, RecordedService

        if self.database is not None:
            return RecordedProcess(self, self.database)
        return RecordedService(self) if self._on_postgresql else None

    async def _answer(self, sock: socket.socket | None) -> None:
        """Answer HTTP requests of clients on the socket, and of the agents of this host if they are another process."""
        from micronova.http.access_log import AccessLog
        from micronova.http.mount import Mounts
        from micronova.http.proxies import TrustedProxies
        from micronova.http.server import HTTPServer, Limits

        api = self.settings.api
        proxies = TrustedProxies(api.trusted_proxies)
        limits = Limits(
            connections=api.max_connections,
            per_client=api.max_connections_per_client,
            timeout=api.client_timeout,
            proxies=proxies,
        )
        if sock is not None:
            self.access_log = AccessLog(self.application(), self.clock, proxies, on=api.access_log)
            await self._listen(
                HTTPServer(
                    self.access_log,
                    sock,
                    certificate=api.tls_certificate,
                    key=api.tls_key,
                    websockets="console" in self.roles,
                    limits=limits,
                )
            )
        if self.agent is not None:
            apps = {mount: app for mount, app in self.apps.items() if mount in SERVICES}
            await self._listen(HTTPServer(Mounts(apps), self.agent.http, limits=limits))

    async def _listen(self, server: HTTPServer) -> None:
        self._servers.append(server)
        await server.start()

    def use_certificate(self, certificate: str, key: str) -> None:
        """Show this certificate to clients that connect from now on."""
        for server in self._servers:
            server.use_certificate(certificate, key)

    def database_certificates(self) -> list[Callable[[], None]]:
        """Read the certificates of connections to the databases; return what takes them into use.

        Raise SettingsError if they cannot be used.
        """
        try:
            found = [database.read_certificates() for database in self._databases.values()]
            if self._recorded is not None:
                found.append(self._recorded.read_certificates())
        except ValueError as error:
            raise SettingsError(f"database.connection: {error}.") from None
        return [each for each in found if each is not None]

    def announce_ready(self) -> None:
        """Tell the process with the bus that the roles of this one have started."""
        if self._link is not None:
            self._link.announce_ready()

    async def stop(self) -> None:
        """Stop the agents' process, the HTTP servers, then the roles in reverse order, then what they share."""
        if self.gate is not None and not await self.gate.stop_clients(
            self.settings.compute.shutdown_grace + AGENT_GRACE
        ):
            log.warning("the agents of this host did not stop in time")
        if "network" in self.embedded:
            self.embedded["network"].end_waits()
        for server in self._servers:
            await server.stop()
        self._servers.clear()
        for role in reversed(self.started):
            try:
                await role.stop()
            except Exception:
                log.exception("%s did not stop cleanly", type(role).__name__)
        self.started.clear()
        self._recorded = None
        await self.clients.close()
        await self.notifier.stop()
        if self.gate is not None:
            await self.gate.stop()
            self.gate = None
        if self.bus is not None:
            await self.bus.stop()
            self.bus = None
        if self._database_clock is not None:
            await self._database_clock.stop()
        for database in self._databases.values():
            await database.close()
        self._databases.clear()
        self.database = None
        await self.telemetry.close()
        if self._owner_lock is not None:
            self._owner_lock.close()
            self._owner_lock = None
        if self._key_lock is not None:
            os.close(self._key_lock)
            self._key_lock = None

    def mount(self, service: Service) -> None:
        """Let the HTTP server of this process answer for a service."""
        self.register(service)
        self.apps[service.mount] = service.app

    def register(self, service: Service) -> None:
        """Give a service the settings of this process; the caller mounts it."""
        service.body_timeout = self.settings.api.client_timeout
        self.services[service.name] = service

    @property
    def databases(self) -> Mapping[str, Database]:
        """The databases that are open, by the service that they are of."""
        return self._databases

    def secret_box(self) -> SecretBox:
        """Return what encrypts the secrets of waiting operations."""
        from micronova.db.secrets import SecretBox

        key, *others = self.secret_keys()
        return SecretBox(key, others)

    def secret_keys(self) -> list[bytes]:
        """Return the key that secrets are sealed with, then those that may have sealed what is stored."""
        default = self.settings.default
        own = (default.secret_key,) if default.secret_key else (self.keys.secret_key, *self.keys.other_secret_keys)
        return [bytes.fromhex(key) for key in (*own, *default.other_secret_keys.split())]

    async def take_over_leases(self, owner: str) -> None:
        """Release the leases of the conductor that ran in this directory before and was killed.

        Its operations then continue at once. If a conductor runs in the directory, its leases are left alone.
        """
        from micronova.db import operations

        assert self.database is not None
        lock = OwnerLock.take(self.directory.conductor_lock(self.name.removeprefix(self.host)))
        if lock is None:
            return
        self._owner_lock = lock
        if lock.predecessor:
            await self.database.write(operations.release_leases, lock.predecessor)
        lock.record(owner)

    def application(self) -> App:
        """Return the ASGI application with every service of this process."""
        from micronova.http.healthcheck import healthcheck
        from micronova.http.mount import Mounts
        from micronova.http.proxies import TrustedProxies

        # A metadata service alone also answers without its mount path, which Neutron's proxies do not send.
        root = self.apps["/metadata"] if set(self.apps) == {"/metadata"} else None
        return Mounts(
            {**self.apps, "/healthcheck": healthcheck(self._health_checks(), self.clock)},
            root=root,
            origins=self.settings.api.cors_allowed_origins,
            websockets=frozenset({"/console"} & set(self.apps)),
            proxies=TrustedProxies(self.settings.api.trusted_proxies),
        )

    def _health_checks(self) -> dict[str, Check]:
        """Return how to find out whether each database and the bus of this process work."""

        async def database_answers(database: Database) -> bool:
            await database.read(lambda conn: conn.exec_driver_sql("SELECT 1").all())
            return True

        async def bus_is_usable() -> bool:
            assert self.bus is not None
            broker = (await self.bus.probe()).broker
            return broker.connected and not broker.blocked

        checks: dict[str, Check] = {
            f"database {name}": partial(database_answers, database) for name, database in self._databases.items()
        }
        if self.bus is not None:
            checks["bus"] = bus_is_usable
        return checks

    async def connect(self, *, upgrade: bool = False, without_bus: bool = False) -> None:
        """Open the database and the bus that the roles need, without starting a role.

        With `upgrade`, bring the database to the newest revision; else refuse a database that is at another one. If it
        may go on `without_bus`, a broker that does not answer leaves `bus` None.
        """
        if any(role in self.roles for role in WITH_COMPUTE_DATABASE):
            if upgrade:
                from micronova.db import schema
                from micronova.db.tables import metadata

                database = await self.open_database("compute")
                await self._available(lambda: schema.upgrade(database, metadata, MIGRATIONS))
            else:
                database = await self.open_current_database()
            self.database = database
        await self._use_clock_of_database()
        if self.database is not None:
            self.database = self._watched(self.database)
        if any(role in self.roles for role in (*COMPUTE_ROLES, "console", "network-agent")):
            default = self.settings.default
            if not default.control_users and not default.transport_url.startswith("local:"):
                log.warning("%s", NO_CONTROL_USERS)
            try:
                self.bus = await self.connect_bus()
            except Unavailable as error:
                if not without_bus:
                    raise
                log.warning("the broker is not asked: %s", error)

    async def _use_clock_of_database(self) -> None:
        """Use the clock of PostgreSQL: roles compare times in rows with those of processes on other machines.

        The services' databases are schemas of one server, so that any of them tells the time.
        """
        names = ["compute"] if self.database is not None else [role for role in EMBEDDED_ROLES if role in self.roles]
        if names:
            await self.use_clock_of(await self.open_database(names[0]))

    async def use_clock_of(self, database: Database) -> None:
        """Use the clock of a database if it is PostgreSQL."""
        if self._on_postgresql:
            from micronova.db.clock import DatabaseClock

            self.clock = self._database_clock = DatabaseClock(self.clock, database)
            await self._available(self._database_clock.start)

    @property
    def _on_postgresql(self) -> bool:
        return self.settings.database.connection.startswith("postgres")

    def _watched(self, database: Database) -> Database:
        """Let changes of instances send notifications, if the settings say so."""
        wanted = self.settings.notifications.notify_on_state_change
        if wanted == "none" or not self.notifier.enabled:
            return database
        from micronova.db.instance_changes import WatchedDatabase
        from micronova.notifications.notifier import on_change

        period = self.settings.default.instance_usage_audit_period
        with_task_states = wanted == "vm_and_task_state"
        watcher = on_change(self.notifier, self.clock, with_task_states=with_task_states, period=period)
        return WatchedDatabase(database, watcher)

    def schema_of(self, name: str) -> str | None:
        """Return the PostgreSQL schema of a service; compute has the default one, SQLite has files instead."""
        return None if name == "compute" or not self._on_postgresql else name

    async def open_database(self, name: str) -> Database:
        """Open the database of a service: a SQLite file of its own, or a schema of the PostgreSQL database.

        It is opened once and closed with the process. Raise SettingsError if the settings are wrong; if it is away,
        raise Unavailable, or wait if the process waits.
        """
        if name in self._databases:
            return self._databases[name]
        url = self.settings.database.connection or self.directory.database_url(name)
        if url.startswith("sqlite") and self.settings.database.connection and name != "compute":
            url = f"{url}.{name}"
        if url.startswith("sqlite:///"):
            file = url.removeprefix("sqlite:///")
            if os.access(file, os.F_OK) and not os.access(file, os.R_OK | os.W_OK):
                raise SettingsError(f"You may not use the database {file}: use sudo.")
        pool_size = self.settings.database.pool_size
        database = await self._available(lambda: open_and_ask(url, self.schema_of(name), pool_size))
        self._databases[name] = database
        return database

    async def open_current_database(self) -> Database:
        """Open the compute database for a command, which leaves its revision alone; refuse another revision."""
        from micronova.db import schema

        database = await self.open_database("compute")
        await database.read(schema.check_current, MIGRATIONS)
        return database

    async def _available(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return what `attempt` returns; if it raises Unavailable and the process waits, wait and call it again."""
        return await (when_available(attempt, self.clock, self.random) if self._waits else attempt())

    async def connect_bus(self) -> Bus:
        """Connect to the bus that the settings name."""
        url = self.settings.default.transport_url
        pins = {
            topic: version
            for topic in ("compute", "conductor", "scheduler")
            if (version := getattr(self.settings.upgrade_levels, topic))
        }
        apart = HOST_ROLES if self.agent is not None else ()
        if url.startswith("local:") and set(COMPUTE_ROLES) - {*self.roles, *apart}:
            raise SettingsError(
                "default.transport_url is local://, which reaches only this process: a role on its own needs "
                "amqp://USER:PASSWORD@HOST/."
            )
        if url == "local://":
            url = f"local://{self.cloud_id}"
        users = frozenset(self.settings.default.control_users)
        name = f"{self.host}:{os.getpid()}"
        if self.agent is not None:
            name = control_name(self.host)
            users = frozenset({name})
        bus = connect(url, clock=self.clock, random=self.random, pins=pins, name=name, control_users=users)
        await self._available(lambda: start_bus(bus))
        if isinstance(bus, LocalBus) and self.agent is not None:
            own = queue_name(COMPUTE_TOPIC, "", self.host)
            self.gate = BusGate(
                bus, self.agent.bus, sender=self.host, uid=self.agent.uid, may_serve=lambda queue: queue == own
            )
        if isinstance(bus, UnixBus):
            self._link = bus
            bus.on_stop = self._on_stop
        if users and (self.agent is not None or not url.startswith("local:")):
            bus = GuardedBus(bus, users)
        return self.telemetry.bus(self._wrap_bus(bus) if self._wrap_bus is not None else bus)


def _url(settings: Settings, address: str, port: int) -> str:
    """Return the URL of this process: api.public_url, or where it listens."""
    if settings.api.public_url:
        return settings.api.public_url
    if address in ("0.0.0.0", "::"):  # noqa: S104 - listened on, not connected to
        address = "127.0.0.1"
    scheme = "https" if settings.api.tls_certificate else "http"
    return f"{scheme}://{f'[{address}]' if ':' in address else address}:{port}"


def run_connected(
    config: Path, directory: Path | None, work: Callable[[Process], Awaitable[Any]], *, without_bus: bool = False
) -> Any:
    """Connect to the database and the bus that a settings file names, without starting a role, and run `work`.

    If it may run `without_bus`, it also runs when the broker does not answer.
    """
    settings = load(config)

    async def main() -> Any:
        place = StateDirectory(directory or Path(settings.default.state_path or default_directory()))
        place.create()
        process = Process(settings, ["conductor"], place)
        process.keys = place.keys()
        process.cloud_id = process.keys.cloud_id
        try:
            await process.connect(without_bus=without_bus)
            return await work(process)
        finally:
            await process.stop()

    return asyncio.run(main())
