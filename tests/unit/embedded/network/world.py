"""A network service for tests, called by HTTP on its ASGI application without a socket."""

import asyncio
import contextlib
import json
import random
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from micronova.db.engine import Database, open_database
from micronova.embedded.network import tables
from micronova.embedded.network.core import NetworkServiceSettings
from micronova.embedded.network.service import NetworkService
from micronova.http.client import Answer, ASGITransport, ServiceClient
from micronova.http.host_keys import HostKeyring, HostTickets
from micronova.policies.enforcer import Enforcer
from micronova.policies.network import RULES
from tests.clocks import ManualClock
from tests.unit.embedded.tokens import Tokens

ALICE, BOB = "alice@p1", "bob@p2"  # of two projects
READER = "rita@p1/reader"
MANAGER = "mona@p1/manager,member,reader"
ADMIN = "root@p0/admin,manager,member,reader"
SERVICE = "nova@services/service"
KEYRING = HostKeyring(b"0123456789abcdef")  # for the tickets of hosts


class Compute:
    """A compute API that records the events it receives, and fails on request."""

    def __init__(self) -> None:
        self.requests: list[list[dict[str, Any]]] = []
        self.failures = 0  # requests to answer with 503 from now on
        self.early: set[str] = set()  # servers that have no host yet
        self.told = asyncio.Event()

    @property
    def events(self) -> list[tuple[str, str, str]]:
        return [(e["name"], e["server_uuid"], e["tag"]) for request in self.requests for e in request]

    async def wait_for(self, count: int) -> None:
        """Wait until compute has received so many events."""
        async with asyncio.timeout(10):
            while len(self.events) < count:
                self.told.clear()
                await self.told.wait()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        assert scope["path"] == "/v2.1/os-server-external-events"
        status, answer = 200, {"events": [{**event, "code": 200} for event in body["events"]]}
        if self.failures:
            self.failures -= 1
            status, answer = 503, {}
        else:
            late = [event for event in body["events"] if event["server_uuid"] in self.early]
            for event in answer["events"]:
                if event["server_uuid"] in self.early:
                    event.update(code=422, status="failed")
                    status = 207
            self.requests.append([event for event in body["events"] if event not in late])
        self.told.set()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def token() -> str:
    return "token"


class World:
    """A running network service."""

    def __init__(
        self, database: Database, compute: Compute | None, clock: Any, schema: str | None, **settings: Any
    ) -> None:
        self.database = database
        self.clock = clock
        self.compute = compute
        client = ServiceClient(ASGITransport(compute), token, prefix="/v2.1") if compute is not None else None
        self.role = NetworkService(
            database, Enforcer(RULES), HostTickets(KEYRING, Tokens(), clock.now), clock, client,
            random_source=random.Random(7), schema=schema, settings=NetworkServiceSettings(**settings),
        )  # fmt: skip
        self.transport = ASGITransport(self.role.service.app, "cloud")

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = ALICE,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send one request to the API below /v2.0 (a path that begins with // is taken as it is)."""
        sent = dict(headers or {})
        if token is not None:
            sent["x-auth-token"] = token
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        url = path[1:] if path.startswith("//") else f"/v2.0{path}"
        return await self.transport.request(method, url, sent, data)

    async def make(self, kind: str, token: str = ALICE, **fields: Any) -> dict[str, Any]:
        """Create a resource; it must succeed."""
        answer = await self.call("POST", f"/{path_of(kind)}", {kind: names(fields)}, token=token)
        assert answer.status == 201, (kind, fields, answer.status, answer.body)
        thing: dict[str, Any] = answer.json()[kind]
        return thing

    async def change(self, kind: str, id: str, token: str = ALICE, **fields: Any) -> dict[str, Any]:
        """Update a resource; it must succeed."""
        answer = await self.call("PUT", f"/{path_of(kind)}/{id}", {kind: names(fields)}, token=token)
        assert answer.status == 200, (kind, fields, answer.status, answer.body)
        thing: dict[str, Any] = answer.json()[kind]
        return thing

    async def show(self, kind: str, id: str, token: str = ALICE) -> dict[str, Any]:
        """Show a resource; it must exist."""
        answer = await self.call("GET", f"/{path_of(kind)}/{id}", token=token)
        assert answer.status == 200, (answer.status, answer.body)
        thing: dict[str, Any] = answer.json()[kind]
        return thing

    async def list(self, kind: str, query: str = "", token: str = ALICE) -> Any:
        """List a collection."""
        answer = await self.call("GET", f"/{path_of(kind)}?{query}", token=token)
        assert answer.status == 200, (answer.status, answer.body)
        return answer.json()[plural(kind)]

    async def delete(self, kind: str, id: str, token: str = ALICE) -> None:
        """Delete a resource; it must succeed."""
        answer = await self.call("DELETE", f"/{path_of(kind)}/{id}", token=token)
        assert answer.status == 204, (answer.status, answer.body)

    async def network(self, cidr: str = "10.1.0.0/24", token: str = ALICE, **fields: Any) -> tuple[Any, Any]:
        """Create a network with one subnet."""
        network = await self.make("network", token, **{"name": "n", **fields})
        subnet = await self.make(
            "subnet", token, network_id=network["id"], cidr=cidr, ip_version=6 if ":" in cidr else 4
        )
        return network, subnet


COUNTED_TABLES: Mapping[str, sa.Table] = {
    "floatingip": tables.floatingips,
    "network": tables.networks,
    "port": tables.ports,
    "rbac_policy": tables.rbac_policies,
    "router": tables.routers,
    "security_group": tables.security_groups,
    "security_group_rule": tables.security_group_rules,
    "subnet": tables.subnets,
    "subnetpool": tables.subnetpools,
    "trunk": tables.trunks,
}


def quota_drift(conn: sa.Connection) -> list[tuple[str, str, int, int]]:
    """Compare usage rows with the tables; return (project, resource, recorded, actual) for each difference."""
    recorded = {(row.project_id, row.resource): row.used for row in conn.execute(sa.select(tables.usages))}
    actual: dict[tuple[str, str], int] = {}
    for resource, table in COUNTED_TABLES.items():
        counted = sa.select(table.c.project_id, sa.func.count()).group_by(table.c.project_id)
        for project, count in conn.execute(counted.where(table.c.project_id != "")):
            actual[project, resource] = count
    return [
        (project, resource, recorded.get((project, resource), 0), actual.get((project, resource), 0))
        for project, resource in sorted({*recorded, *actual})
        if recorded.get((project, resource), 0) != actual.get((project, resource), 0)
    ]


def pending_events(conn: sa.Connection) -> int:
    """Return the number of events in the outbox."""
    return int(conn.execute(sa.select(sa.func.count()).select_from(tables.events)).scalar_one())


def names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return names of the API for Python names: binding__host_id is binding:host_id."""
    return {name.replace("__", ":"): value for name, value in fields.items()}


def plural(kind: str) -> str:
    return f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"


def path_of(kind: str) -> str:
    return "qos/policies" if kind == "policy" else plural(kind).replace("_", "-")


def error(answer: Answer) -> str:
    """Return the type of the error in an answer."""
    return str(answer.json()["NeutronError"]["type"])


@contextlib.asynccontextmanager
async def world(
    directory: Path, url: str | None = None, compute: Compute | None = None, clock: Any = None, **settings: Any
) -> AsyncIterator[World]:
    """Run a network service on its own database: SQLite in the directory, or a new schema of a PostgreSQL one."""
    schema = settings.pop("schema", None) or (f"s{uuid.uuid4().hex[:12]}" if url else None)
    database = open_database(url or f"sqlite:///{directory}/network.db", schema=schema, pool_size=20)
    made = World(database, compute, clock or ManualClock(), schema, **settings)
    await made.role.start()
    try:
        yield made
    finally:
        await made.role.stop()
        await database.close()
