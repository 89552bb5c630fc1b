"""Key pairs: imported, or made here for clients of old."""

import asyncio
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.api import inputs
from micronova.api.compute import keys
from micronova.api.inputs import Body, Owner, Paged, Query, Text
from micronova.api.links import Links
from micronova.api.view import Field, View
from micronova.db import keypairs, quotas
from micronova.db.engine import Database
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import Range, since, until
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Invalid

_BRIEF = (
    Field("name", "name"),
    Field("public_key", "public_key"),
    Field("fingerprint", "fingerprint"),
    Field("type", "type", since(2)),
)
BRIEF = View(*_BRIEF)
CREATED = View(*_BRIEF, Field("user_id", "user_id"))
FULL = View(
    *_BRIEF,
    Field("user_id", "user_id"),
    Field("id", "id"),
    Field("created_at", lambda row, _: iso_micros(row.created_at)),
    Field("updated_at", lambda row, _: None),
    # Relics that clients still find: a key pair that was deleted is not shown at all.
    Field("deleted", lambda row, _: False),
    Field("deleted_at", lambda row, _: None),
)


class NewKeyPair(Body):
    """A key pair to import, or (without a public key, until 2.91) to make."""

    versions = {"type": since(2), "user_id": since(10)}

    name: Text
    public_key: str | UnsetType = UNSET
    type: Literal["ssh", "x509"] | UnsetType = UNSET
    user_id: Owner | UnsetType = UNSET


class Create(Body):
    """The body of a create."""

    keypair: NewKeyPair


class UserQuery(Query):
    """Whose key pairs; another's are for administrators."""

    versions = {"user_id": since(10)}

    user_id: str | UnsetType = UNSET


class ListQuery(Paged):
    """Whose, and which page."""

    versions = {"user_id": since(10), "limit": since(35), "marker": since(35)}

    user_id: str | UnsetType = UNSET


def _named(value: str, request: Request) -> str:
    if request.relaxed:
        return inputs.name(value, relaxed=True)
    name = inputs.name(value)
    allowed = r"[_\- a-zA-Z0-9]+" if request.minor < 92 else r"[_\-@. a-zA-Z0-9]+"
    if not re.fullmatch(allowed, name):
        may = "letters, digits, spaces, _, -" + ("" if request.minor < 92 else ", @, .")
        raise Invalid(f"Invalid input for field/attribute name: {name[:64]!r} may have {may}.")
    return name


class KeyPairs:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, defaults: Mapping[str, int], max_limit: int) -> None:
        self._database = database
        self._clock = clock
        self._defaults = defaults
        self._max_limit = max_limit
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="keypairs")  # starts no thread until it is used

    @staticmethod
    def _user(request: Request, asked: str | UnsetType) -> str:
        """Return whose key pairs are meant, if the caller may."""
        user = request.context.user_id if isinstance(asked, UnsetType) or not asked else asked
        request.authorize({"user_id": user})
        return user

    async def index(self, request: Request) -> dict[str, Any]:
        """List key pairs."""
        query: ListQuery = request.query
        user = self._user(request, query.user_id)
        paged = request.minor >= 35
        limit, marker = query.page(self._max_limit) if paged else (None, None)
        rows = await self._database.read(keypairs.list_, user, marker=marker, limit=limit)
        shape = BRIEF.at(request.minor)
        body: dict[str, Any] = {"keypairs": [{"keypair": shape(row)} for row in rows]}
        if limit and len(rows) == limit:
            body["keypairs_links"] = Links(request).next(request, "os-keypairs", rows[-1].name)
        return body

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show a key pair."""
        user = self._user(request, request.query.user_id)
        return {"keypair": FULL.at(request.minor)(await self._database.read(keypairs.get, user, id))}

    async def create(self, request: Request) -> dict[str, Any]:
        """Import a key, or make one."""
        asked: NewKeyPair = request.body.keypair
        user = self._user(request, asked.user_id)
        name = _named(asked.name, request)
        kind = "ssh" if isinstance(asked.type, UnsetType) else asked.type
        private = None
        if not isinstance(asked.public_key, UnsetType):
            public = asked.public_key
        elif request.minor >= 92:
            raise Invalid("Invalid input for field/attribute keypair: 'public_key' is a required property.")
        else:
            make = partial(keys.generate, kind, user, self._clock.now())
            private, public = await asyncio.get_running_loop().run_in_executor(self._pool, make)
        digest = keys.fingerprint(kind, public)
        project = request.context.project_id
        row = await self._database.write(self._insert, project, user, name, kind, public, digest)
        shown = CREATED.at(request.minor)(row)
        if private is not None:
            shown["private_key"] = private
        return {"keypair": shown}

    def _insert(
        self, conn: sa.Connection, project: str, user: str, name: str, kind: str, key: str, digest: str
    ) -> sa.Row[Any]:
        limits = quotas.limits_for(conn, project, self._defaults, user)
        now = micros(self._clock.now())
        return keypairs.insert(conn, user, name, kind, digest, key, now, {**limits, **limits.of_user})

    async def delete(self, request: Request, id: str) -> None:
        """Remove a key pair."""
        user = self._user(request, request.query.user_id)
        await self._database.write(keypairs.delete, user, id)


def routes(database: Database, clock: Clock, quota_defaults: Mapping[str, int], max_limit: int = 1000) -> list[Route]:
    """Declare the routes of key pairs."""
    handlers = KeyPairs(database, clock, quota_defaults, max_limit)
    rule = "os_compute_api:os-keypairs"
    strict = Range(75)
    own: dict[str, Any] = {"checks_policy": True}  # the rule looks at whose key pair it is
    one: dict[str, Any] = {"path": "/os-keypairs/{id}", "query": UserQuery, "strict_query": strict, **own}
    create: dict[str, Any] = {
        "method": "POST", "path": "/os-keypairs", "handler": handlers.create, "policy": f"{rule}:create",
        "body": Create, **own,
    }  # fmt: skip
    delete: dict[str, Any] = {
        "method": "DELETE", "handler": handlers.delete, "policy": f"{rule}:delete", **one,
    }  # fmt: skip
    return [
        Route(
            method="GET", path="/os-keypairs", handler=handlers.index, policy=f"{rule}:index",
            query=ListQuery, strict_query=strict, **own,
        ),
        Route(method="GET", handler=handlers.show, policy=f"{rule}:show", **one),
        Route(status=200, versions=until(1), **create),
        Route(status=201, versions=since(2), **create),
        Route(status=202, versions=until(1), **delete),
        Route(status=204, versions=since(2), **delete),
    ]  # fmt: skip
