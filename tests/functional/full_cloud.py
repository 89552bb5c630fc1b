"""A whole cloud in this process: compute with its embedded identity, image and network, on SQLite, with real tokens.

Tests speak HTTP to it without a socket, as people who log in through the identity API. A module's tests share one.
"""

import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from micronova.cli.inspect import run_audit
from micronova.cli.state import StateDirectory
from micronova.cli.wiring import ROLES, Process
from micronova.conf.settings import load
from micronova.http.client import Answer, ASGITransport
from micronova.http.service import Route, Service
from tests.functional.cloud import OneProcess, Wanted

NEWEST = 104
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {"report_interval": 0.5, "service_down_time": 6.0, "host": "controller"},
    "conductor": {"lease": 6.0, "sweep_interval": 0.5},
    "scheduler": {"refresh_interval": 0.01},
    "quota": {"instances": -1, "cores": -1, "ram": -1, "server_groups": -1, "key_pairs": -1},
    "fake": {"hosts": 2},
    "api": {"fault_injection": True},
}


@dataclass
class Person:
    """Somebody who has logged in; or nobody, without a token."""

    cloud: "FullCloud"
    token: str | None = None
    user_id: str = ""
    project_id: str = ""

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        minor: int = NEWEST,
    ) -> Answer:
        """Send a request to /SERVICE/…; a body that is bytes is sent as it is."""
        sent = {"openstack-api-version": f"compute 2.{minor}", **(headers or {})}
        if self.token is not None:
            sent["x-auth-token"] = self.token
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        if data is not None:
            sent.setdefault("content-type", "application/json")
        return await self.cloud.transport.request(method, path, sent, data)

    async def do(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """Send a request that must succeed; return what it answers."""
        answer = await self.request(method, path, body, headers)
        assert 200 <= answer.status < 300, f"{method} {path}: {answer.status} {answer.body[:500]!r}"
        return answer.json() if answer.body[:1] in (b"{", b"[") else answer.body

    async def make(self, path: str, noun: str, /, **fields: Any) -> dict[str, Any]:
        """Make something, and return it."""
        made: dict[str, Any] = (await self.do("POST", path, {noun: fields}))[noun]
        return made


class FullCloud(OneProcess):
    """Every role in this process, on SQLite."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, Wanted(hosts=2))
        self.process = Process(load(environ={}, **SETTINGS), ROLES, StateDirectory(directory))
        self.anybody = Person(self)

    async def start(self) -> None:
        await self.process.start()
        assert self.process.database is not None
        self._notice_writes(self.process.database)
        self.transport = ASGITransport(self.process.application(), "cloud:8774")
        self.admin = await self.login("admin", self.process.keys.admin_password, "admin")
        await self.until(self._hosts_up, "all hosts to be up")

    async def _hosts_up(self) -> bool | None:
        found = (await self.admin.do("GET", "/compute/v2.1/os-services?binary=nova-compute"))["services"]
        return True if sum(service["state"] == "up" for service in found) == 2 else None

    async def login(self, name: str, password: str, project: str) -> Person:
        """Get a token for a project by its name."""
        user = {"name": name, "domain": {"id": "default"}, "password": password}
        identity = {"methods": ["password"], "password": {"user": user}}
        scope = {"project": {"name": project, "domain": {"id": "default"}}}
        body = {"auth": {"identity": identity, "scope": scope}}
        answer = await self.anybody.request("POST", "/identity/v3/auth/tokens", body)
        assert answer.status == 201, answer.body
        token = answer.json()["token"]
        return Person(self, answer.headers["x-subject-token"], token["user"]["id"], token["project"]["id"])

    async def person(self, *roles: str, project: str | None = None) -> Person:
        """Make somebody with these roles in a project: the named one, or a new one."""
        name, password = f"user-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
        if project is None:
            project = f"project-{uuid.uuid4().hex[:8]}"
            await self.admin.make("/identity/v3/projects", "project", name=project)
        found = await self.admin.do("GET", f"/identity/v3/projects?name={project}")
        user = await self.admin.make("/identity/v3/users", "user", name=name, password=password)
        for role in roles:
            given = (await self.admin.do("GET", f"/identity/v3/roles?name={role}"))["roles"][0]["id"]
            path = f"/identity/v3/projects/{found['projects'][0]['id']}/users/{user['id']}/roles/{given}"
            await self.admin.do("PUT", path)
        return await self.login(name, password, project)

    async def project_name(self, person: Person) -> str:
        """Return the name of a person's project."""
        return str((await self.admin.do("GET", f"/identity/v3/projects/{person.project_id}"))["project"]["name"])

    def routes(self) -> list[tuple[Service, Route]]:
        """Return every route of every service."""
        return [(service, route) for service in self.process.services.values() for route in service.routes]

    async def assert_clean(self) -> None:
        await self.settled()
        assert await run_audit(self.process) == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def full_cloud(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FullCloud]:
    """The module's cloud."""
    cloud = FullCloud(tmp_path_factory.mktemp("cloud"))
    await cloud.start()
    yield cloud
    await cloud.assert_clean()
    await cloud.stop()
