"""Our Placement API on a port, as Placement's tests want it: anew for each of their files, with tokens that they write.

`POST /control` with `{"policy": …, "origins": […]}` makes a new service on an empty database.
"""

import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from micronova.api.placement import app
from micronova.db.engine import Database, open_database
from micronova.db.tables import metadata
from micronova.http.asgi import App, Receive, Scope, Send
from micronova.http.mount import Mounts
from micronova.http.server import HTTPServer, Limits
from micronova.objects.clock import SystemClock
from micronova.objects.context import RequestContext
from micronova.objects.errors import Unauthorized
from micronova.policies.enforcer import Enforcer, Rule
from micronova.policies.placement import RULES


class _Caller(msgspec.Struct):
    """What the headers of a test say about its caller."""

    token: str
    roles: str | None = None
    system: str | None = None
    project: str | None = None


class _Authenticator:
    """Believes the headers, as Placement's own test authentication does."""

    async def authenticate(self, token: str | None, context: RequestContext) -> RequestContext:
        """Return the context with the caller filled in."""
        if token is None:
            raise Unauthorized("The request has no token.")
        caller = msgspec.json.decode(token, type=_Caller)
        user, _, project = caller.token.partition(":")
        roles = caller.roles.split(",") if caller.roles is not None else ["admin"] if user == "admin" else []
        return msgspec.structs.replace(
            context,
            user_id=user,
            project_id="" if caller.system else caller.project or project or user,
            roles=tuple(roles),
            system_scope=caller.system,
        )


def _rules(policy: str) -> list[Rule]:
    if policy == "open":
        return [_with_check(rule, "@") if rule.name != "admin_api" else rule for rule in RULES]
    if policy == "legacy":  # with the deprecated defaults, by which an administrator may do all
        return [
            _with_check(rule, f"({rule.check}) or role:admin") if rule.name.endswith("_api") else rule for rule in RULES
        ]
    return RULES


def _with_check(rule: Rule, check: str) -> Rule:
    """Return a rule with another check."""
    return Rule(rule.name, check, rule.description, rule.scope_types)


class _Served:
    """The ASGI application: the service of the file that runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._database: Database | None = None
        self._app: App | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/control":
            event = await receive()
            await self._make_anew(**msgspec.json.decode(event["body"]))
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        assert self._app is not None
        await self._app(_with_caller(scope), receive, send)

    async def _make_anew(self, policy: str, origins: list[str]) -> None:
        await self.close()
        self._number += 1
        self._database = open_database(f"sqlite:///{self._folder}/{self._number}.db")
        await self._database.write(metadata.create_all)
        clock, random = SystemClock(), Random(time.time())
        service = app.make(
            app.routes(self._database, clock, random),
            policy=Enforcer(_rules(policy)),
            authenticator=_Authenticator(),
            mount="",
        )
        self._app = Mounts({}, root=service.app, origins=tuple(origins))

    async def close(self) -> None:
        """Close the database."""
        if self._database is not None:
            await self._database.close()


def _with_caller(scope: Scope) -> Scope:
    """Put what the headers say about the caller into the token."""
    given: dict[bytes, str] = {name: value.decode() for name, value in scope["headers"]}
    if b"x-auth-token" not in given:
        return scope
    caller = _Caller(
        token=given[b"x-auth-token"],
        roles=given.get(b"x-roles"),
        system=given.get(b"openstack-system-scope"),
        project=given.get(b"x-project-id"),
    )
    kept = [(name, value) for name, value in scope["headers"] if name != b"x-auth-token"]
    changed: dict[str, Any] = {**scope, "headers": [*kept, (b"x-auth-token", msgspec.json.encode(caller))]}
    return changed


@contextlib.asynccontextmanager
async def serve(folder: Path, port: int) -> AsyncIterator[None]:
    """Serve the API on a port of the loopback address."""
    sock = socket.create_server(("127.0.0.1", port))
    served = _Served(folder)
    server = HTTPServer(served, sock, limits=Limits(per_client=4096))
    await server.start()
    try:
        yield
    finally:
        await server.stop()
        await served.close()
