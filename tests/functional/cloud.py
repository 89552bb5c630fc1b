"""A whole compute cloud for the functional tests, driven through HTTP.

The same tests run on two kinds of cloud. By default a module gets one process with SQLite, which is quick to make.
With MICRONOVA_TEST_CLOUD=cluster all modules share separate processes on PostgreSQL and RabbitMQ; modules that need
a cloud of their own kind (a module-level `CLOUD = Wanted(...)`) are left out then, unless they say that the cluster
will do. So a test makes its own project and never assumes an empty cloud.

Nothing sleeps: `Cloud.until` looks again whenever something was written to the database (in one process), or often.
"""

import asyncio
import contextlib
import functools
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.cli.inspect import run_audit
from micronova.cli.state import StateDirectory
from micronova.cli.wiring import COMPUTE_ROLES, Process
from micronova.compute.rpcapi import ComputeAPI
from micronova.conf.settings import load
from micronova.db.tables import operations
from micronova.http.client import Answer, ASGITransport, HTTPTransport, Transport, error_message
from micronova.objects.clock import Clock
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Context
from tests.cluster import Cluster

NEWEST = 104
IMAGE = "11111111-1111-4111-8111-111111111111"
PATIENCE = 30.0  # seconds; a test that has to wait longer has failed
ON_CLUSTER = os.environ.get("MICRONOVA_TEST_CLOUD") == "cluster"

# What a group prefers outweighs all else, so that a test can tell.
GROUPS_FIRST = {"soft_affinity_weight_multiplier": 100.0, "soft_anti_affinity_weight_multiplier": 100.0}

T = TypeVar("T")
Probe = Callable[[], Awaitable[T | None]]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The kind of cloud that a module needs when the usual one will not do."""

    hosts: int = 4
    roles: tuple[str, ...] = ()  # besides those of compute
    wrap_bus: Callable[[Bus], Bus] | None = None
    after_step: Callable[[str, str], None] | None = None
    retried: bool = False  # every transaction is run twice, and the first time it fails at its end
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    clock: Clock | None = None
    cluster_too: bool = False  # separate processes will do as well; the rest says only what one process needs for it


# --- callers -------------------------------------------------------------------------------------------------------


@dataclass
class Caller:
    """Somebody who speaks HTTP to the compute API; a member of a project, or an admin."""

    cloud: "Cloud"
    user: str
    project: str
    minor: int = NEWEST

    @property
    def token(self) -> str:
        return f"{self.user}:{self.project}"

    @property
    def admin(self) -> "Caller":
        """An admin in the same project."""
        return Caller(self.cloud, "admin", self.project, self.minor)

    def at(self, minor: int) -> "Caller":
        """The same caller, speaking another microversion."""
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
        """The body of a plain server; a field that is None is left out."""
        server = {"name": f"vm-{uuid.uuid4().hex[:8]}", "imageRef": IMAGE, "flavorRef": "1", **fields}
        if self.minor >= 37:
            server.setdefault("networks", "none")
        whole: dict[str, Any] = {"server": {key: value for key, value in server.items() if value is not None}}
        if hints:
            whole["os:scheduler_hints"] = hints
        return whole

    async def create(self, hints: Mapping[str, Any] | None = None, **fields: Any) -> str:
        """Ask for a server; return its id."""
        return str((await self.post("/servers", self.body(hints, **fields)))["server"]["id"])

    async def boot(self, hints: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        """Ask for a server and wait until it runs."""
        return await self.wait_for(await self.create(hints, **fields), "ACTIVE")

    async def boot_many(self, count: int, **fields: Any) -> list[str]:
        """Ask for several servers in one request and wait until they run; ids in the order of launch."""
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
        """Wait until a server has one of the statuses and (unless said otherwise) nothing is done to it."""
        last: dict[str, Any] = {}

        async def probe() -> dict[str, Any] | None:
            nonlocal last
            last = await self.show(id)
            # ERROR is an end as well: whoever waits for something else need not wait for ever.
            if last["status"] == "ERROR" and "ERROR" not in statuses and last["OS-EXT-STS:task_state"] is None:
                raise AssertionError(f"{id} went to ERROR: {last.get('fault')}")
            return last if last["status"] in statuses and last["OS-EXT-STS:task_state"] == task else None

        return await self.cloud.until(probe, lambda: f"{id} to be {statuses}; it is {last}")

    async def gone(self, id: str) -> None:
        """Wait until a server is no more."""

        async def probe() -> bool | None:
            return True if (await self.request("GET", f"/servers/{id}")).status == 404 else None

        await self.cloud.until(probe, lambda: f"{id} to be gone")

    async def act(self, id: str, action: str, value: Any = None, status: int = 202) -> Any:
        return await self.post(f"/servers/{id}/action", {action: value}, status)

    async def host_of(self, id: str) -> str:
        return str((await self.admin.show(id))["OS-EXT-SRV-ATTR:host"])


# --- clouds --------------------------------------------------------------------------------------------------------


class Cloud:
    """What tests may do with a cloud, whichever kind it is."""

    process: Process  # its database and its bus, to look at
    transport: Transport
    hosts: tuple[str, ...]

    def __init__(self) -> None:
        self.callers: list[Caller] = []

    def caller(self) -> Caller:
        """A member of a new project."""
        made = Caller(self, f"user-{uuid.uuid4().hex[:6]}", uuid.uuid4().hex)
        self.callers.append(made)
        return made

    async def changed(self, since: Any, longest: float) -> None:
        """Return when something may have changed since `mark`, at the latest after so many seconds."""
        raise NotImplementedError

    def mark(self) -> Any:
        """Remember now, for `changed`."""

    async def until(self, probe: Probe[T], what: str | Callable[[], str] = "it", seconds: float = PATIENCE) -> T:
        """Return what the probe gives once that is not None."""
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
        """Look into the database."""
        assert self.process.database is not None
        return await self.process.database.read(lambda conn: conn.execute(query).all())

    async def open_operations(self) -> Sequence[Any]:
        """The operations that are not finished."""
        return await self.read(sa.select(operations).where(operations.c.finished_at.is_(None)))

    async def settled(self) -> None:
        """Wait until no operation is open."""
        left: Sequence[Any] = ()

        async def probe() -> bool | None:
            nonlocal left
            left = await self.open_operations()
            return None if left else True

        await self.until(probe, lambda: f"the end of {[(row.kind, row.step, row.owner) for row in left]}")

    async def delete_all(self) -> None:
        """Delete every server of the callers so far, and wait until they are gone."""
        for caller in self.callers:
            ids = [server["id"] for server in (await caller.get("/servers"))["servers"]]
            await asyncio.gather(*(caller.delete(f"/servers/{id}") for id in ids))
            await asyncio.gather(*(caller.gone(id) for id in ids))

    async def assert_clean(self) -> None:
        """Wait until nothing is under way, then let the audit find nothing."""
        await self.settled()
        findings = await run_audit(self.process)
        assert findings == []

    @property
    def compute(self) -> ComputeAPI:
        """The client end of the hosts' messages."""
        assert self.process.bus is not None
        return ComputeAPI(self.process.bus)

    async def guests(self, host: str) -> dict[str, Any]:
        """What the hypervisor of a host really holds."""
        return {guest.uuid: guest for guest in await self.compute.list_guests(Context(request_id="req-test"), host)}

    @contextlib.asynccontextmanager
    async def faults(self, *rules: Mapping[str, Any]) -> AsyncIterator[None]:
        """Let things go wrong on the simulated hosts for a while; let the rules name the servers that they mean."""
        await self._set_rules([dict(rule) for rule in rules])
        try:
            yield
        finally:
            await self._set_rules([])

    async def fault_struck(self) -> None:
        """Wait until a fault rule has been applied on some host."""

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

    def __init__(self, directory: Path, wanted: Wanted) -> None:
        super().__init__()
        sections: dict[str, dict[str, Any]] = {
            "default": {"report_interval": 0.5, "service_down_time": 6.0, "host": "controller"},
            "api": {"auth_strategy": "noauth2"},
            "conductor": {"lease": 6.0, "sweep_interval": 0.5},
            "scheduler": {"refresh_interval": 0.01},
            "filter_scheduler": GROUPS_FIRST,
            "quota": {"instances": -1, "cores": -1, "ram": -1},
            "fake": {"hosts": wanted.hosts},
        }
        for name, values in wanted.settings.items():
            sections.setdefault(name, {}).update(values)
        self.hosts = tuple(f"fake-{number}" for number in range(1, sections["fake"]["hosts"] + 1))
        self.process = Process(
            load(environ={}, **sections), (*COMPUTE_ROLES, *wanted.roles), StateDirectory(directory),
            wrap_bus=wanted.wrap_bus, after_step=wanted.after_step, clock=wanted.clock,
        )  # fmt: skip
        self._waiters: set[asyncio.Future[None]] = set()
        self._retried = wanted.retried

    async def start(self) -> None:
        """Start, and wait until all hosts are up."""
        await self.process.start()
        assert self.process.database is not None
        if self._retried:
            _retry_writes(self.process.database)
        self._notice_writes(self.process.database)
        self.transport = ASGITransport(self.process.application(), "cloud:8774")
        await _hosts_up(self)

    def _notice_writes(self, database: Any) -> None:
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

    async def stop(self) -> None:
        await self.process.stop()


class Apart(Cloud):
    """Separate processes on PostgreSQL and RabbitMQ; this process looks at them through both."""

    def __init__(self, cluster: Cluster, hosts: tuple[str, ...]) -> None:
        super().__init__()
        self.cluster = cluster
        self.hosts = hosts
        place = StateDirectory(cluster.directory / "tests")
        place.create()
        self.process = Process(load(cluster.config), ["conductor"], place)
        self.process.keys = place.keys()

    async def start(self) -> None:
        await self.process.connect()
        self.transport = HTTPTransport(f"http://127.0.0.1:{self.cluster.port}")

    async def changed(self, since: Any, longest: float) -> None:
        await asyncio.sleep(min(longest, 0.05))  # other processes tell us nothing: we have to ask

    async def stop(self) -> None:
        await self.transport.close()
        await self.process.stop()


def _retry_writes(database: Any) -> None:
    """Let every transaction fail at its end and be run again, as a serialisation failure would."""
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
        return await write(twice(fn), *args, **kwargs)

    database.write = retried


async def _hosts_up(cloud: Cloud) -> None:
    admin = cloud.caller().admin

    async def probe() -> bool | None:
        services = (await admin.get("/os-services?binary=nova-compute"))["services"]
        up = {service["host"] for service in services if service["state"] == "up"}
        return True if up >= set(cloud.hosts) else None

    await cloud.until(probe, "all hosts to be up")


@contextlib.asynccontextmanager
async def one_process(directory: Path, wanted: Wanted) -> AsyncIterator[OneProcess]:
    """Run a cloud in this process."""
    cloud = OneProcess(directory, wanted)
    await cloud.start()
    try:
        yield cloud
    finally:
        await cloud.stop()


# --- fixtures ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The run's cloud of separate processes: two conductors, two schedulers, two computes with two hosts each."""
    database = request.getfixturevalue("session_database_url")
    bus = request.getfixturevalue("session_amqp_url")
    made = Cluster(
        tmp_path_factory.mktemp("cluster"), database, bus, fake={"hosts": 2}, api={"workers": 2},
        filter_scheduler=GROUPS_FIRST,
        scheduler={"refresh_interval": 0.01},
    )  # fmt: skip
    network = {"MICRONOVA__NEUTRON__ENDPOINT_OVERRIDE": f"http://127.0.0.1:{made.port}/network"}
    made.add("api", "api network", **network)
    for number in (1, 2):
        made.add(f"conductor{number}", "conductor", MICRONOVA__DEFAULT__HOST=f"conductor{number}", **network)
        made.add(f"scheduler{number}", "scheduler", MICRONOVA__DEFAULT__HOST=f"scheduler{number}")
    for letter in "ab":
        made.add(f"compute-{letter}", "compute", MICRONOVA__FAKE__HOST_PATTERN=f"{letter}-{{}}")
    try:
        made.start()
        made.wait_ready(hosts=4)
        yield made
    finally:
        made.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cloud(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cloud]:
    """The module's cloud."""
    wanted: Wanted | None = getattr(request.module, "CLOUD", None)
    if not ON_CLUSTER:
        async with one_process(tmp_path_factory.mktemp("cloud"), wanted or Wanted()) as made:
            yield made
            await made.assert_clean()
        return
    if wanted is not None and not wanted.cluster_too:
        pytest.skip("needs a cloud of its own kind, in one process")
    apart = Apart(request.getfixturevalue("cluster"), ("a-1", "a-2", "b-1", "b-2"))
    await apart.start()
    yield apart
    await apart.assert_clean()
    await apart.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def user(cloud: Cloud) -> AsyncIterator[Caller]:
    """A member of a project that is this test's own; servers that the test leaves behind are deleted."""
    cloud.callers.clear()
    yield cloud.caller()
    await cloud.delete_all()
