"""An identity service for a test, called over HTTP without a socket."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from micronova.db.engine import open_database
from micronova.embedded.identity.passwords import Passwords
from micronova.embedded.identity.service import IdentityService
from micronova.http.asgi import Receive, Scope, Send
from micronova.http.client import Answer, ASGITransport
from micronova.http.mount import Mounts
from micronova.http.tokens import TokenKey

KEY = bytes(range(32))
ENDPOINTS = {"identity": "/identity/v3", "compute": "/compute/v2.1", "image": "/image", "network": "/network"}
ADMIN = ("admin", "admin-password", "admin")
DEMO = ("demo", "demo-password", "demo")
SERVICE = ("micronova", "service-password", "service")


class CountingPasswords(Passwords):
    """Real argon2 at the lowest cost, with a count of the checks."""

    def __init__(self) -> None:
        super().__init__(memory_kib=64, passes=1)
        self.checked = 0

    def _verify(self, stored: str, password: str) -> bool:
        self.checked += 1
        return super()._verify(stored, password)


class Caller:
    """A user with a token, or a client without one."""

    def __init__(self, cloud: "Cloud", token: str | None, body: dict[str, Any]) -> None:
        self._cloud = cloud
        self.token = token
        self.body = body

    @property
    def user_id(self) -> str:
        return str(self.body["user"]["id"])

    @property
    def project_id(self) -> str:
        return str(self.body["project"]["id"])

    @property
    def roles(self) -> set[str]:
        return {role["name"] for role in self.body.get("roles", ())}

    async def request(self, method: str, path: str, body: Any = None, **headers: Any) -> Answer:
        """Send a request with the caller's token; `subject=` is X-Subject-Token."""
        return await self._cloud.request(method, path, body, token=self.token, **headers)

    async def get(self, path: str, **headers: str) -> Any:
        """Return the body of a GET that must succeed."""
        answer = await self.request("GET", path, **headers)
        assert answer.status == 200, answer
        return answer.json()

    async def make(self, path: str, **attributes: Any) -> dict[str, Any]:
        """Create a resource with a POST to a collection, whose name gives the key of the body."""
        key = path.rsplit("/", 1)[-1].removesuffix("s")
        answer = await self.request("POST", path, {key: attributes})
        assert answer.status == 201, answer
        return dict(answer.json()[key])

    async def do(self, method: str, path: str, body: Any = None, status: int = 204) -> Any:
        """Send a request that must end with this status."""
        answer = await self.request(method, path, body)
        assert answer.status == status, answer
        return answer.json()


class Cloud:
    """An identity service and a client of it."""

    def __init__(self, identity: IdentityService, address: str = "in-process") -> None:
        self.identity = identity
        self.transport = ASGITransport(identity.service.app, host="cloud.example")

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await identity.service.app({**scope, "client": (address, 1)}, receive, send)

        self._mounted = ASGITransport(Mounts({"/identity": app}), host="cloud.example")

    def seen_from(self, address: str) -> "Cloud":
        """Return the same service with a client at another address."""
        return Cloud(self.identity, address)

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        raw: bytes | None = None,
        subject: str | None = None,
        **headers: str,
    ) -> Answer:
        """Send one request below /identity/v3 (or /identity for "")."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            sent["x-auth-token"] = token
        if subject is not None:
            sent["x-subject-token"] = subject
        data = raw if raw is not None else (msgspec.json.encode(body) if body is not None else None)
        if data is not None:
            sent.setdefault("content-type", "application/json")
        prefix = "/identity/v3" if path else "/identity"
        return await self._mounted.request(method, prefix + path, sent, data)

    async def authenticate(
        self, identity: dict[str, Any], scope: Any = None, query: str = "", **headers: Any
    ) -> Answer:
        """Ask for a token."""
        auth: dict[str, Any] = {"identity": identity}
        if scope is not None:
            auth["scope"] = scope
        return await self.request("POST", f"/auth/tokens{query}", {"auth": auth}, **headers)

    async def login(self, user: str, password: str, project: str | None = None, scope: Any = None) -> Caller:
        """Log in by name, in the default domain."""
        if project is not None:
            scope = {"project": {"name": project, "domain": {"id": "default"}}}
        return self.caller(await self.authenticate(by_password(user, password), scope))

    def caller(self, answer: Answer) -> Caller:
        """Return the caller that a token was issued to."""
        assert answer.status == 201, answer
        return Caller(self, answer.headers["x-subject-token"], answer.json()["token"])

    async def admin(self) -> Caller:
        """Log in as the administrator."""
        return await self.login(*ADMIN)

    async def member(self, admin: Caller, name: str, role: str = "member") -> Caller:
        """Create a project and a user with a role on it, both with this name, and log in."""
        project = await admin.make("/projects", name=name)
        user = await admin.make("/users", name=name, password="secret")
        roles = (await admin.get(f"/roles?name={role}"))["roles"]
        await admin.do("PUT", f"/projects/{project['id']}/users/{user['id']}/roles/{roles[0]['id']}")
        return await self.login(name, "secret", name)


def by_password(user: str, password: str) -> dict[str, Any]:
    """Return the identity part of a body that names a user of the default domain."""
    return {
        "methods": ["password"],
        "password": {"user": {"name": user, "domain": {"id": "default"}, "password": password}},
    }


def by_token(token: str | None) -> dict[str, Any]:
    """Return the identity part of a body that exchanges a token."""
    return {"methods": ["token"], "token": {"id": token}}


def by_credential(credential: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Return the identity part of a body that uses an application credential."""
    proof = {"id": credential["id"], "secret": credential["secret"], **changed}
    return {"methods": ["application_credential"], "application_credential": proof}


@contextlib.asynccontextmanager
async def cloud_at(
    url: str, *, schema: str | None = None, bootstrap: bool = True, **options: Any
) -> AsyncIterator[Cloud]:
    """Run an identity service on a database."""
    database = open_database(url, schema=schema)
    options.setdefault("passwords", CountingPasswords())
    options.setdefault("token_keys", lambda: [TokenKey(KEY)])
    options.setdefault("secret_keys", [b"the secret key of a cloud of tests"])
    identity = IdentityService(database=database, db_schema=schema, **options)
    try:
        await identity.start()
        if bootstrap:
            await identity.bootstrap(ADMIN[1], DEMO[1], SERVICE[1], ENDPOINTS)
        yield Cloud(identity)
    finally:
        await identity.stop()
        await database.close()


def sqlite_at(directory: Path) -> str:
    """Return the URL of an SQLite database in a directory."""
    return f"sqlite:///{directory}/identity.db"
