"""People who log in to a cloud through its identity API and use all its services over HTTP."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from micronova.http.client import Answer, Transport

NEWEST = 104
NEWEST_PLACEMENT = 39
NEWEST_VOLUME = 71


class Reachable(Protocol):
    """A cloud that can be reached over a transport."""

    transport: Transport


def _version(path: str, minor: int) -> str:
    """Return the microversion of a service, at most its newest."""
    if path.startswith("/placement"):
        return f"placement 1.{min(minor, NEWEST_PLACEMENT)}"
    return f"volume 3.{min(minor, NEWEST_VOLUME)}" if path.startswith("/volume") else f"compute 2.{minor}"


@dataclass
class Person:
    """A user who has logged in, or an anonymous one without a token."""

    cloud: Reachable
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
        sent = {"openstack-api-version": _version(path, minor), **(headers or {})}
        if self.token is not None:
            sent["x-auth-token"] = self.token
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        if data is not None:
            sent.setdefault("content-type", "application/json")
        return await self.cloud.transport.request(method, path, sent, data)

    async def do(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """Send a request that must succeed; return its body, decoded if it is JSON."""
        answer = await self.request(method, path, body, headers)
        assert 200 <= answer.status < 300, f"{method} {path}: {answer.status} {answer.body[:500]!r}"
        return answer.json() if answer.body[:1] in (b"{", b"[") else answer.body

    async def make(self, path: str, noun: str, /, **fields: Any) -> dict[str, Any]:
        """Create a resource and return it."""
        made: dict[str, Any] = (await self.do("POST", path, {noun: fields}))[noun]
        return made

    async def make_image(self, name: str, disk_format: str, content: bytes) -> str:
        """Create an image and return its id."""
        body = {"name": name, "disk_format": disk_format, "container_format": "bare"}
        image = str((await self.do("POST", "/image/v2/images", body))["id"])
        kind = {"content-type": "application/octet-stream"}
        await self.do("PUT", f"/image/v2/images/{image}/file", content, kind)
        return image


class People:
    """The people who use a cloud: its admin, and others that a test creates."""

    transport: Transport
    admin: Person

    async def login(self, name: str, password: str, project: str) -> Person:
        """Log in to a project by its name."""
        user = {"name": name, "domain": {"id": "default"}, "password": password}
        identity = {"methods": ["password"], "password": {"user": user}}
        scope = {"project": {"name": project, "domain": {"id": "default"}}}
        body = {"auth": {"identity": identity, "scope": scope}}
        answer = await Person(self).request("POST", "/identity/v3/auth/tokens", body)
        assert answer.status == 201, answer.body
        token = answer.json()["token"]
        return Person(self, answer.headers["x-subject-token"], token["user"]["id"], token["project"]["id"])

    async def person(self, *roles: str, project: str | None = None) -> Person:
        """Create a user with these roles in the named project or in a new one, and log in."""
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

    async def scoped(self, role: str, scope: dict[str, Any]) -> Person:
        """Create a user with a role on a domain (`{"domain": {"id": ID}}`) or on the system, and log in there."""
        name, password = f"user-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
        user = await self.admin.make("/identity/v3/users", "user", name=name, password=password)
        given = (await self.admin.do("GET", f"/identity/v3/roles?name={role}"))["roles"][0]["id"]
        place = f"domains/{scope['domain']['id']}" if "domain" in scope else "system"
        await self.admin.do("PUT", f"/identity/v3/{place}/users/{user['id']}/roles/{given}")
        identity = {"methods": ["password"], "password": {"user": {"id": user["id"], "password": password}}}
        body = {"auth": {"identity": identity, "scope": scope}}
        answer = await Person(self).request("POST", "/identity/v3/auth/tokens", body)
        assert answer.status == 201, answer.body
        return Person(self, answer.headers["x-subject-token"], user["id"])

    async def project_name(self, person: Person) -> str:
        """Return the name of a person's project."""
        return str((await self.admin.do("GET", f"/identity/v3/projects/{person.project_id}"))["project"]["name"])
