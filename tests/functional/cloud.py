"""A whole compute cloud for the functional tests, driven through HTTP.

The same tests run on two kinds of cloud. By default a module gets one process with SQLite, which starts quickly. With
MICRONOVA_TEST_CLOUD=cluster all modules share separate processes on PostgreSQL and RabbitMQ, which have no use for the
options of a module (`CLOUD = CloudOptions(...)`), except that an API with settings of its own is started for it. So a
test makes its own project and never assumes an empty cloud. A test that cannot run there says why with the mark
`only_in_one_process`.

Tests do not sleep: `Cloud.until` checks again after each write to the database (one process), or every 50 ms.
"""

import asyncio
import contextlib
import functools
import os
import urllib.request
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.cli.audit import run_audit
from micronova.cli.names import COMPUTE_ROLES
from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.manager import ConductorManager
from micronova.conf.settings import load
from micronova.db.tables import operations
from micronova.http.client import Answer, ASGITransport, HTTPTransport, Transport, error_message
from micronova.objects.clock import Clock
from micronova.objects.context import Context
from micronova.rpc.bus import Bus
from tests.cluster import Cluster
from tests.schemas.openapi import Judge
from tests.services.process import free_port

NEWEST = 104
IMAGE = "11111111-1111-4111-8111-111111111111"
OTHER_IMAGE = "22222222-2222-4222-8222-222222222222"
PATIENCE = 30.0  # seconds; a test that waits longer fails
ON_CLUSTER = os.environ.get("MICRONOVA_TEST_CLOUD") == "cluster"

# The preference of a server group outweighs everything else, so that a test can see it.
GROUPS_FIRST = {"soft_affinity_weight_multiplier": 100.0, "soft_anti_affinity_weight_multiplier": 100.0}

T = TypeVar("T")
Probe = Callable[[], Awaitable[T | None]]


@dataclass(frozen=True, kw_only=True)
class CloudOptions:
    """What a module needs of its cloud when the defaults do not suffice."""

    hosts: int = 4
    roles: tuple[str, ...] = ()  # in addition to those of compute
    wrap_bus: Callable[[Bus], Bus] | None = None
    after_commit: Callable[[str, str], None] | None = None
    retried: bool = False  # every transaction runs twice; the first time it is rolled back at its end
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    api: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # further settings, which only the API uses
    clock: Clock | None = None


def only_in_one_process(reason: str) -> pytest.MarkDecorator:
    """Return the mark of tests that are skipped on separate processes, and why they cannot run there."""
    return pytest.mark.skipif(ON_CLUSTER, reason=reason)


# --- callers -------------------------------------------------------------------------------------------------------


@dataclass
class Caller:
    """A user of the compute API: a member of a project, or an admin."""

    cloud: "Cloud"
    user: str
    project: str
    minor: int = NEWEST

    @property
    def token(self) -> str:
        return f"{self.user}:{self.project}"

    @property
    def admin(self) -> "Caller":
        """Return an admin in the same project."""
        return Caller(self.cloud, "admin", self.project, self.minor)

    def at(self, minor: int) -> "Caller":
        """Return the same caller with another microversion."""
        return Caller(self.cloud, self.user, self.project, minor)

    async def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a request; a body that is bytes is sent as it is."""
        sent = {"x-auth-token": self.token, "openstack-api-version": f"compute 2.{self.minor}", **(headers or {})}
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        if data is not None:
            sent.setdefault("content-type", "application/json")
        return await self.cloud.transport.request(method, f"/compute/v2.1{path}", sent, data)

    async def get(self, path: str, status: int = 200) -> Any:
        return await self._ok(status, "GET", path)

    async def post(self, path: str, body: Any, status: int = 202) -> Any:
        return await self._ok(status, "POST", path, body)

    async def put(self, path: str, body: Any, status: int = 200) -> Any:
        return await self._ok(status, "PUT", path, body)

    async def delete(self, path: str, status: int = 204) -> None:
        await self._ok(status, "DELETE", path)

    async def refused(self, status: int, method: str, path: str, body: Any = None) -> str:
        """Expect a refusal and return its message."""
        answer = await self.request(method, path, body)
        assert answer.status == status, f"{method} {path}: {answer.status} {answer.body[:500]!r}"
        return error_message(answer)

    async def _ok(self, status: int, method: str, path: str, body: Any = None) -> Any:
        answer = await self.request(method, path, body)
        assert answer.status == status, f"{method} {path}: {answer.status} {answer.body[:500]!r}"
        return answer.json()

    # --- servers ---------------------------------------------------------------------------------------------

    def body(self, hints: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        """Return the body of a create request; a field that is None is left out."""
        server = {"name": f"vm-{uuid.uuid4().hex[:8]}", "imageRef": IMAGE, "flavorRef": "1", **fields}
        if self.minor >= 37:
            server.setdefault("networks", "none")
        whole: dict[str, Any] = {"server": {key: value for key, value in server.items() if value is not None}}
        if hints:
            whole["os:scheduler_hints"] = hints
        return whole

    async def create(self, hints: Mapping[str, Any] | None = None, **fields: Any) -> str:
        """Create a server; return its id."""
        return str((await self.post("/servers", self.body(hints, **fields)))["server"]["id"])

    async def boot(self, hints: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        """Create a server and wait until it is ACTIVE."""
        return await self.wait_for(await self.create(hints, **fields), "ACTIVE")

    async def boot_many(self, count: int, **fields: Any) -> list[str]:
        """Create servers in one request and wait until they are ACTIVE; return the ids in the order of launch."""
        answer = await self.post(
            "/servers", self.body(min_count=count, max_count=count, return_reservation_id=True, **fields)
        )
        listed = await self.admin.get(f"/servers/detail?reservation_id={answer['reservation_id']}")
        servers = sorted(listed["servers"], key=lambda server: server["OS-EXT-SRV-ATTR:launch_index"])
        await asyncio.gather(*(self.wait_for(server["id"], "ACTIVE") for server in servers))
        return [server["id"] for server in servers]

    async def show(self, id: str) -> dict[str, Any]:
        server: dict[str, Any] = (await self.get(f"/servers/{id}"))["server"]
        return server

    async def wait_for(self, id: str, *statuses: str, task: str | None = None) -> dict[str, Any]:
        """Wait until a server has one of the statuses and this task state."""
        last: dict[str, Any] = {}

        async def probe() -> dict[str, Any] | None:
            nonlocal last
            last = await self.show(id)
            # A server in ERROR stays there: fail at once.
            if last["status"] == "ERROR" and "ERROR" not in statuses and last["OS-EXT-STS:task_state"] is None:
                raise AssertionError(f"{id} went to ERROR: {last.get('fault')}")
            return last if last["status"] in statuses and last["OS-EXT-STS:task_state"] == task else None

        return await self.cloud.until(probe, lambda: f"{id} to be {statuses}; it is {last}")

    async def gone(self, id: str) -> None:
        """Wait until a server is deleted."""

        async def probe() -> bool | None:
            return True if (await self.request("GET", f"/servers/{id}")).status == 404 else None

        await self.cloud.until(probe, lambda: f"{id} to be gone")

    async def act(self, id: str, action: str, value: Any = None, status: int = 202) -> Any:
        return await self.post(f"/servers/{id}/action", {action: value}, status)

    async def host_of(self, id: str) -> str:
        return str((await self.admin.show(id))["OS-EXT-SRV-ATTR:host"])


# --- clouds --------------------------------------------------------------------------------------------------------


class Cloud:
    """What tests do with a cloud of either kind."""

    process: Process  # gives access to the database and the bus of the cloud
    transport: Transport
    hosts: tuple[str, ...]
    console_url = "http://cloud:8774"  # of the proxy that links to consoles lead to

    def __init__(self) -> None:
        self.callers: list[Caller] = []

    def caller(self) -> Caller:
        """Return a member of a new project."""
        made = Caller(self, f"user-{uuid.uuid4().hex[:6]}", uuid.uuid4().hex)
        self.callers.append(made)
        return made

    async def changed(self, since: Any, longest: float) -> None:
        """Return when something may have changed since `mark`, at the latest after `longest` seconds."""
        raise NotImplementedError

    def mark(self) -> Any:
        """Return the present state, for `changed`."""

    async def until(self, probe: Probe[T], what: str | Callable[[], str] = "it", seconds: float = PATIENCE) -> T:
        """Call the probe until it returns something else than None, and return that."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            mark = self.mark()
            found = await probe()
            if found is not None:
                return found
            left = deadline - loop.time()
            if left <= 0:
                raise AssertionError(f"waited {seconds:.0f} s for {what if isinstance(what, str) else what()}")
            await self.changed(mark, min(left, 0.5))

    async def read(self, query: sa.Select[Any]) -> Sequence[Any]:
        """Read the database."""
        assert self.process.database is not None
        return await self.process.database.read(lambda conn: conn.execute(query).all())

    async def open_operations(self) -> Sequence[Any]:
        """Return the operations that are not finished."""
        return await self.read(sa.select(operations).where(operations.c.finished_at.is_(None)))

    async def settled(self, seconds: float = PATIENCE) -> None:
        """Wait until no operation is open."""
        left: Sequence[Any] = ()

        async def probe() -> bool | None:
            nonlocal left
            left = await self.open_operations()
            return None if left else True

        await self.until(probe, lambda: f"the end of {[(row.kind, row.step, row.owner) for row in left]}", seconds)

    async def delete_all(self) -> None:
        """Delete all servers of the callers and wait until they are gone."""
        for caller in self.callers:
            ids = [server["id"] for server in (await caller.get("/servers"))["servers"]]
            await asyncio.gather(*(caller.delete(f"/servers/{id}") for id in ids))
            await asyncio.gather(*(caller.gone(id) for id in ids))

    async def assert_clean(self) -> None:
        """Wait until no operation is open, then assert that the audit finds nothing."""
        await self.settled()
        findings = await run_audit(self.process)
        assert findings == []

    @property
    def compute(self) -> ComputeAPI:
        """Return the client of the compute hosts."""
        assert self.process.bus is not None
        return ComputeAPI(self.process.bus)

    async def guests(self, host: str) -> dict[str, Any]:
        """Return the guests on the hypervisor of a host, by uuid."""
        return {guest.uuid: guest for guest in await self.compute.list_guests(Context(request_id="req-test"), host)}

    @contextlib.asynccontextmanager
    async def faults(self, *rules: Mapping[str, Any]) -> AsyncIterator[None]:
        """Apply fault rules to the simulated hosts while the context is open; a rule should name its servers."""
        await self._set_rules([dict(rule) for rule in rules])
        try:
            yield
        finally:
            await self._set_rules([])

    @contextlib.asynccontextmanager
    async def forced_down(self, host: str) -> AsyncIterator[None]:
        """Let the compute service of a host count as down while the context is open."""
        admin = Caller(self, "an-admin", uuid.uuid4().hex).admin
        [found] = (await admin.get(f"/os-services?binary=nova-compute&host={host}"))["services"]
        await admin.put(f"/os-services/{found['id']}", {"forced_down": True})
        try:
            yield
        finally:
            await admin.put(f"/os-services/{found['id']}", {"forced_down": False})

    async def fault_struck(self) -> None:
        """Wait until a fault rule has been applied on a host."""

        async def struck() -> bool | None:
            for host in self.hosts:
                rules = await self.compute.fault_rules(Context(request_id="req-test"), host)
                if any(rule["hits"] for rule in rules):
                    return True
            return None

        await self.until(struck, "a fault")

    async def _set_rules(self, rules: list[dict[str, Any]]) -> None:
        for host in self.hosts:
            await self.compute.fault_rules(Context(request_id="req-test"), host, rules)


class OneProcess(Cloud):
    """All roles in this process, on SQLite."""

    def __init__(self, directory: Path, options: CloudOptions) -> None:
        super().__init__()
        sections: dict[str, dict[str, Any]] = {
            "default": {"report_interval": 0.5, "service_down_time": 6.0, "host": "controller"},
            "api": {"auth_strategy": "noauth2"},
            "conductor": {"lease": 6.0, "sweep_interval": 0.5},
            "scheduler": {"refresh_interval": 0.01},
            "filter_scheduler": dict(GROUPS_FIRST),
            "quota": {"instances": -1, "cores": -1, "ram": -1},
            "fake": {"hosts": options.hosts},
        }
        for name, values in (*options.settings.items(), *options.api.items()):
            sections.setdefault(name, {}).update(values)
        self.hosts = tuple(f"fake-{number}" for number in range(1, sections["fake"]["hosts"] + 1))
        self.process = Process(
            load(None, {}, **sections), (*COMPUTE_ROLES, *options.roles), StateDirectory(directory),
            wrap_bus=options.wrap_bus, after_commit=options.after_commit, clock=options.clock,
        )  # fmt: skip
        self._waiters: set[asyncio.Future[None]] = set()
        self._retried = options.retried

    async def start(self) -> None:
        """Start, and wait until all hosts are up."""
        await self.process.start()
        assert self.process.database is not None
        if self._retried:
            _retry_writes(self.process.database)
        self._watch_writes(self.process.database)
        self.transport = Judge(
            ASGITransport(self.process.application(), "cloud:8774"), lambda: self.process.services["compute"].routes
        )
        await _hosts_up(self)

    def _watch_writes(self, database: Any) -> None:
        write = database.write

        async def noticed(*args: Any, **kwargs: Any) -> Any:
            try:
                return await write(*args, **kwargs)
            finally:
                for waiter in self._waiters:
                    if not waiter.done():
                        waiter.set_result(None)
                self._waiters.clear()

        database.write = noticed

    def mark(self) -> "asyncio.Future[None]":
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        return waiter

    async def changed(self, since: "asyncio.Future[None]", longest: float) -> None:
        await asyncio.wait([since], timeout=longest)
        self._waiters.discard(since)

    async def healthy(self) -> None:
        """Wait until the conductor would take a silent host for dead: before, it waits for hosts in any case."""
        [conductor] = [role for role in self.process.started if isinstance(role, ConductorManager)]

        async def probe() -> bool | None:
            return True if conductor.engine.health.healthy() else None

        await self.until(probe, "the conductor to be healthy")

    async def stop(self) -> None:
        await self.process.stop()


class SeparateProcesses(Cloud):
    """Separate processes on PostgreSQL and RabbitMQ; this process reads the database and calls the hosts."""

    def __init__(self, cluster: Cluster, hosts: tuple[str, ...], url: str) -> None:
        super().__init__()
        self.cluster = cluster
        self.hosts = hosts
        self.url = url  # of the compute API
        self.console_url = cluster.urls["console"]
        state = StateDirectory(cluster.directory / "tests")
        state.create()
        self.process = Process(load(cluster.config), ["conductor"], state)
        self.process.keys = state.keys()

    async def start(self) -> None:
        await self.process.connect()
        self.transport = _Services(self.url, self.cluster.urls)

    async def changed(self, since: Any, longest: float) -> None:
        await asyncio.sleep(min(longest, 0.05))  # other processes do not notify this one

    def logged(self) -> str:
        """Return what the processes have logged."""
        return "".join(self.cluster.log(name) for name in self.cluster.processes)

    async def stop(self) -> None:
        await self.transport.close()
        await self.process.stop()


class _Services:
    """The transport to services with a port each; the first part of a path names the service."""

    def __init__(self, compute: str, others: Mapping[str, str]) -> None:
        self._compute = HTTPTransport(compute)
        self._others = {name: HTTPTransport(url) for name, url in others.items()}

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        service = url.split("/", 2)[1]
        return await self._others.get(service, self._compute).request(method, url, headers, body)

    async def close(self) -> None:
        for transport in (self._compute, *self._others.values()):
            await transport.close()


def _retry_writes(database: Any) -> None:
    """Roll every transaction back at its end and run it again, as after a serialisation failure."""
    write = database.write

    def twice(fn: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(fn)
        def run(conn: sa.Connection, *args: Any, **kwargs: Any) -> T:
            savepoint = conn.begin_nested()
            try:
                fn(conn, *args, **kwargs)
            finally:
                savepoint.rollback()
            return fn(conn, *args, **kwargs)

        return run

    async def retried(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        result: T = await write(twice(fn), *args, **kwargs)
        return result

    database.write = retried


async def _hosts_up(cloud: Cloud) -> None:
    admin = cloud.caller().admin

    async def probe() -> bool | None:
        services = (await admin.get("/os-services?binary=nova-compute"))["services"]
        up = {service["host"] for service in services if service["state"] == "up"}
        return True if up >= set(cloud.hosts) else None

    await cloud.until(probe, "all hosts to be up")


@contextlib.asynccontextmanager
async def one_process(directory: Path, options: CloudOptions) -> AsyncIterator[OneProcess]:
    """Run a cloud in this process."""
    cloud = OneProcess(directory, options)
    await cloud.start()
    try:
        yield cloud
    finally:
        await cloud.stop()


# --- fixtures ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cloud of separate processes, as a region has them: an API with two workers, two conductors, two schedulers,
    two compute agents with two hosts each, and the services for images, networks and consoles."""
    database = request.getfixturevalue("session_database_url")
    bus = request.getfixturevalue("session_amqp_url")
    ports = {role: free_port() for role in ("image", "network", "console")}
    consoles = f"http://127.0.0.1:{ports['console']}/console"
    made = Cluster(
        tmp_path_factory.mktemp("cluster"), database, bus, fake={"hosts": 2},
        api={"workers": 2},
        default={"vif_plugging_timeout": 10.0, "default_access_ip_network_name": "access"},
        filter_scheduler=GROUPS_FIRST,
        scheduler={"refresh_interval": 0.01},
        compute={"boot_timeout": 0.4},
        glance={"endpoint_override": f"http://127.0.0.1:{ports['image']}/image", "ticket_key": "5b" * 32},
        neutron={"endpoint_override": f"http://127.0.0.1:{ports['network']}/network", "ticket_key": "5c" * 32},
        vnc={"novncproxy_base_url": f"{consoles}/vnc_lite.html"},
        serial_console={"base_url": f"{consoles}/serial.html"},
    )  # fmt: skip
    made.add("api", "api")
    for number in (1, 2):
        made.add(f"conductor{number}", "conductor", MICRONOVA__DEFAULT__HOST=f"conductor{number}")
        made.add(f"scheduler{number}", "scheduler", MICRONOVA__DEFAULT__HOST=f"scheduler{number}")
    for letter in "ab":  # "host-" is in no UUID, and tests look for hosts in messages
        made.add(f"compute-{letter}", "compute", MICRONOVA__FAKE__HOST_PATTERN=f"host-{letter}-{{}}")
    compute = f"http://127.0.0.1:{made.port}/compute/v2.1"
    for role, port in ports.items():
        made.add_service(role, role, port, MICRONOVA__NOVA__ENDPOINT_OVERRIDE=compute)
    try:
        made.start()
        made.wait_ready(hosts=4)
        for image in (IMAGE, OTHER_IMAGE):
            _make_image(made, image)
        yield made
    finally:
        made.stop()


def _make_image(cluster: Cluster, id: str) -> None:
    """Make an image that servers of all projects may be booted from."""
    wanted = {"id": id, "name": "i", "disk_format": "raw", "container_format": "bare", "visibility": "public"}
    for method, path, kind, body in (
        ("POST", "/image/v2/images", "application/json", msgspec.json.encode(wanted)),
        ("PUT", f"/image/v2/images/{id}/file", "application/octet-stream", bytes(1024)),
    ):
        headers = {"x-auth-token": "admin:admin", "content-type": kind}
        asked = urllib.request.Request(cluster.urls["image"] + path, body, headers, method=method)
        urllib.request.urlopen(asked, timeout=60.0).close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cloud(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cloud]:
    """The module's cloud."""
    options: CloudOptions = getattr(request.module, "CLOUD", CloudOptions())
    if not ON_CLUSTER:
        async with one_process(tmp_path_factory.mktemp("cloud"), options) as made:
            yield made
            await made.assert_clean()
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    with _api(cluster, options) as url:
        separate = SeparateProcesses(cluster, ("host-a-1", "host-a-2", "host-b-1", "host-b-2"), url)
        await separate.start()
        yield separate
        await separate.assert_clean()
        await separate.stop()


@contextlib.contextmanager
def _api(cluster: Cluster, options: CloudOptions) -> Iterator[str]:
    """Return the URL of the cluster's API, or of one with settings of its own, which runs while the context is open."""
    if not options.api:
        yield f"http://127.0.0.1:{cluster.port}"
        return
    environment = {
        f"MICRONOVA__{section}__{name}".upper(): ",".join(value) if isinstance(value, list) else str(value)
        for section, values in options.api.items()
        for name, value in values.items()
    }
    cluster.add_service("own-api", "api", free_port(), **environment)
    cluster.start("own-api")
    try:
        cluster.wait_listening("own-api")
        yield cluster.urls["own-api"]
    finally:
        cluster.remove("own-api")


@pytest_asyncio.fixture(loop_scope="module")
async def user(cloud: Cloud) -> AsyncIterator[Caller]:
    """A member of a new project; servers that the test leaves are deleted."""
    cloud.callers.clear()
    yield cloud.caller()
    await cloud.delete_all()
