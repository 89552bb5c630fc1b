"""The compute API's resources over HTTP, on a database of their own, with tokens that say who one is."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from micronova.api.compute import (
    aggregates,
    availability_zones,
    extensions,
    flavor_access,
    flavor_extra_specs,
    flavors,
    hosts,
    hypervisors,
    instance_actions,
    keypairs,
    limits,
    quota_class_sets,
    quota_sets,
    removed,
    server_groups,
    services,
    versions_doc,
)
from micronova.clients.key_manager.certificates import Certificates
from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.rpcapi import ConductorAPI
from micronova.conf.api import QuotaSettings
from micronova.db.engine import Database
from micronova.http.client import Answer, ASGITransport
from micronova.http.faults import compute_fault
from micronova.http.mount import below_versions
from micronova.http.service import Route, Service
from micronova.http.versions import Versions
from micronova.notifications.notifier import NoNotifications
from micronova.objects.context import RequestContext
from micronova.objects.errors import Unauthorized
from micronova.policies.compute import RULES
from micronova.policies.enforcer import Enforcer
from micronova.rpc.bus import Bus, connect
from micronova.servers.honoured import Honoured
from micronova.servers.image_caching import CacheImagesRequests
from micronova.servers.image_signatures import ImageSignatures, SignatureRules
from micronova.servers.service_removal import ServiceRemoval
from micronova.servers.unsupported import Unsupported
from tests.clocks import SetClock
from tests.unit.db.databases import compute_database

VERSIONS = Versions("compute", 2, versions_doc.LEAST, versions_doc.NEWEST, "X-OpenStack-Nova-API-Version")
PROJECTS = ("red", "blue")  # the projects that exist
DOWN_TIME = 20.0
ZONE = "nova"  # of hosts whose aggregates name none


class SpokenTokens:
    """A token is USER:PROJECT:ROLE,ROLE and is believed."""

    async def authenticate(self, token: str | None, context: RequestContext) -> RequestContext:
        if not token:
            raise Unauthorized("A token is needed.")
        user, project, roles = token.split(":")
        return msgspec.structs.replace(
            context, user_id=user, project_id=project, roles=tuple(roles.split(",")), token=token
        )


@dataclass
class Caller:
    """Somebody who speaks HTTP."""

    app: Any
    token: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    async def __call__(
        self, method: str, path: str, body: Any = None, minor: int | None = None, prefix: str = "/v2.1"
    ) -> Answer:
        """Send a request; a body that is bytes is sent as it is."""
        headers = {**self.headers}
        if self.token:
            headers["x-auth-token"] = self.token
        if minor is not None:
            headers["openstack-api-version"] = f"compute 2.{minor}"
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        if data is not None:
            headers.setdefault("content-type", "application/json")
        return await ASGITransport(self.app, "cloud:8774").request(method, prefix + path, headers, data)

    async def get(self, path: str, minor: int | None = None) -> Answer:
        return await self("GET", path, None, minor)

    async def post(self, path: str, body: Any, minor: int | None = None) -> Answer:
        return await self("POST", path, body, minor)

    async def put(self, path: str, body: Any, minor: int | None = None) -> Answer:
        return await self("PUT", path, body, minor)

    async def delete(self, path: str, minor: int | None = None) -> Answer:
        return await self("DELETE", path, None, minor)


@dataclass
class Cloud:
    """What a test has at hand."""

    database: Database
    clock: SetClock
    routes: list[Route]
    app: Any

    def caller(self, user: str, project: str, *roles: str) -> Caller:
        return Caller(self.app, f"{user}:{project}:{','.join(roles)}")

    @property
    def admin(self) -> Caller:
        return self.caller("root", "red", "admin", "manager", "member", "reader")

    @property
    def member(self) -> Caller:
        return self.caller("ada", "red", "member", "reader")

    @property
    def reader(self) -> Caller:
        return self.caller("rob", "red", "reader")

    @property
    def stranger(self) -> Caller:
        return self.caller("eve", "blue", "member", "reader")

    @property
    def nobody(self) -> Caller:
        return Caller(self.app)


async def _project_exists(project: str) -> bool:
    return project in PROJECTS


async def _uptime_of(_: RequestContext, host: str) -> str | None:
    return "up 1 day" if host == "h1" else None  # what a host would answer


def _bus(clock: SetClock) -> Bus:
    return connect("local://resources", clock=clock, random=Random(1))  # not started: its queues cannot be deleted


def _removal(database: Database, clock: SetClock) -> ServiceRemoval:
    return ServiceRemoval(database=database, compute=ComputeAPI(_bus(clock)), network_client=None)


def all_routes(database: Database, clock: SetClock, max_limit: int = 1000) -> list[Route]:
    """Return the routes of the resources that need nothing but the database."""
    limit, random, silent = QuotaSettings().limits(), Random(1), NoNotifications()
    signatures = ImageSignatures(
        image_client=None, certificates=Certificates(Path("/nonexistent")), clock=clock, rules=SignatureRules()
    )
    caching = CacheImagesRequests(
        database=database, conductor=ConductorAPI(_bus(clock)), image_client=None, signatures=signatures
    )
    return [
        *versions_doc.routes(),
        *extensions.routes(list),
        *flavors.routes(database, clock, random, max_limit, silent),
        *flavor_access.routes(database, _project_exists, silent),
        *flavor_extra_specs.routes(database, silent),
        *keypairs.routes(database, clock, limit, max_limit, silent),
        *limits.routes(database, limit),
        *quota_sets.routes(database, limit, _project_exists),
        *quota_class_sets.routes(database, limit),
        *services.routes(database, clock, _removal(database, clock), DOWN_TIME, ZONE, silent),
        *hypervisors.routes(database, clock, _uptime_of, DOWN_TIME, max_limit),
        *hosts.routes(database, clock, ZONE, silent),
        *availability_zones.routes(database, clock, DOWN_TIME, ZONE),
        *aggregates.routes(database, clock, random, silent, caching, Unsupported(Honoured)),
        *server_groups.routes(database, clock, random, limit, max_limit, silent),
        *instance_actions.routes(database, max_limit),
        *removed.routes(),
    ]


@contextlib.asynccontextmanager
async def cloud_on(kind: str, request: pytest.FixtureRequest, max_limit: int = 1000) -> AsyncIterator[Cloud]:
    """Make the API on a database of this kind."""
    async with compute_database(kind, request) as database:
        clock = SetClock()
        routes = all_routes(database, clock, max_limit)
        shared: dict[str, Any] = {
            "policy": Enforcer(RULES),
            "authenticator": SpokenTokens(),
            "fault_body": compute_fault,
        }
        service = Service(
            "compute", routes, prefix="/v2.1", versions=VERSIONS, vendor_type=versions_doc.VENDOR_TYPE, **shared
        )
        documents = Service("compute", versions_doc.root_routes(), **shared)
        yield Cloud(
            database, clock, routes, below_versions(service.app, documents.app, routes, version="v2.1", relaxed="v2")
        )


@pytest.fixture
async def cloud(request: pytest.FixtureRequest) -> AsyncIterator[Cloud]:
    """The API on SQLite; import this where it is used."""
    async with cloud_on("sqlite", request) as made:
        yield made
