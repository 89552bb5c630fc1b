"""Key pairs: imported, or generated (until 2.91)."""

import asyncio
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.api import inputs
from micronova.api.compute import keypair_crypto
from micronova.api.inputs import Body, Owner, Paged, Query, Text
from micronova.api.links import LINKS, Links
from micronova.api.view import OMIT, Field, View
from micronova.db import keypairs, quotas
from micronova.db.engine import Database
from micronova.db.keypairs import KeyPairRow
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import Range, since, until
from micronova.notifications import resources
from micronova.notifications.notifier import Announcer
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Invalid

_BRIEF = (
    Field("name", "name", type=str),
    Field("public_key", "public_key", type=str),
    Field("fingerprint", "fingerprint", type=str),
    Field("type", "type", since(2), type=Literal["ssh", "x509"]),
)
BRIEF = View(*_BRIEF)
CREATED = View(
    *_BRIEF,
    Field("user_id", "user_id", type=str),
    Field("private_key", lambda row, private: OMIT if private is None else private, optional=True, type=str),
)
FULL = View(
    *_BRIEF,
    Field("user_id", "user_id", type=str),
    Field("id", "id", type=int),
    Field("created_at", lambda row, _: iso_micros(row.created_at), type=str),
    Field("updated_at", lambda row, _: None, type=None),
    # Old fields that clients still read; a deleted key pair is not shown.
    Field("deleted", lambda row, _: False, type=bool),
    Field("deleted_at", lambda row, _: None, type=None),
)


class NewKeyPair(Body):
    """A key pair to import or, without a public key, to generate (until 2.91)."""

    versions = {"type": since(2), "user_id": since(10)}

    name: Text
    public_key: str | UnsetType = UNSET
    type: Literal["ssh", "x509"] | UnsetType = UNSET
    user_id: Owner | UnsetType = UNSET


class Create(Body):
    """The body of a create."""

    keypair: NewKeyPair


class UserQuery(Query):
    """Whose key pairs; only administrators may name another user."""

    versions = {"user_id": since(10)}

    user_id: str | UnsetType = UNSET


class ListQuery(Paged):
    """Whose key pairs, and which page."""

    versions = {"user_id": since(10), "limit": since(35), "marker": since(35)}

    user_id: str | UnsetType = UNSET


def _named(value: str, request: Request) -> str:
    if request.is_v2:
        return inputs.name(value, strip=True)
    name = inputs.name(value)
    allowed = r"[_\- a-zA-Z0-9]+" if request.minor < 92 else r"[_\-@. a-zA-Z0-9]+"
    if not re.fullmatch(allowed, name):
        may = "letters, digits, spaces, _, -" + ("" if request.minor < 92 else ", @, .")
        raise Invalid(f"Invalid input for field/attribute name: {name[:64]!r} may have {may}.")
    return name


class KeyPairs:
    """The handlers."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        defaults: Mapping[str, int],
        max_limit: int,
        notifier: Announcer,
    ) -> None:
        self._database = database
        self._clock = clock
        self._defaults = defaults
        self._max_limit = max_limit
        self._notifier = notifier
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="keypairs")  # starts no thread until it is used

    @staticmethod
    def _user(request: Request, asked: str | UnsetType) -> str:
        """Return the user whose key pairs are requested; raise Forbidden if the caller may not."""
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
        """Import a key pair, or generate one."""
        asked: NewKeyPair = request.body.keypair
        user = self._user(request, asked.user_id)
        name = _named(asked.name, request)
        kind = "ssh" if isinstance(asked.type, UnsetType) else asked.type
        private = None
        context, action = request.context.for_bus(), "create"
        if not isinstance(asked.public_key, UnsetType):
            action, public = "import", asked.public_key
        elif request.minor >= 92:
            raise Invalid("Invalid input for field/attribute keypair: 'public_key' is a required property.")
        else:
            make = partial(keypair_crypto.generate, kind, user, self._clock.now())
            private, public = await asyncio.get_running_loop().run_in_executor(self._pool, make)
        start = partial(resources.keypair, action, "start", context, user_id=user, name=name, kind=kind)
        self._notifier.announce(context, partial(start, public_key=None if action == "create" else public))
        digest = keypair_crypto.fingerprint(kind, public)
        project = request.context.project_id
        row = await self._database.write(self._insert, project, user, name, kind, public, digest)
        self._notifier.announce(context, partial(resources.keypair_of, action, "end", context, row))
        return {"keypair": CREATED.at(request.minor)(row, private)}

    def _insert(
        self, conn: sa.Connection, project: str, user: str, name: str, kind: str, key: str, digest: str
    ) -> KeyPairRow:
        limits = quotas.limits_for(conn, project, self._defaults, user)
        now = micros(self._clock.now())
        return keypairs.insert(conn, user, name, kind, digest, key, now, {**limits, **limits.of_user})

    async def delete(self, request: Request, id: str) -> None:
        """Delete a key pair."""
        user = self._user(request, request.query.user_id)
        context = request.context.for_bus()
        row = await self._database.read(keypairs.get, user, id)
        self._notifier.announce(context, partial(resources.keypair_of, "delete", "start", context, row))
        await self._database.write(keypairs.delete, user, id)
        self._notifier.announce(context, partial(resources.keypair_of, "delete", "end", context, row))


def routes(
    database: Database, clock: Clock, quota_defaults: Mapping[str, int], max_limit: int, notifier: Announcer
) -> list[Route]:
    """Declare the routes of key pairs."""
    handlers = KeyPairs(database, clock, quota_defaults, max_limit, notifier)
    rule = "os_compute_api:os-keypairs"
    strict = Range(75)
    own = partial(Route, checks_policy=True)  # the rule depends on the owner of the key pair
    one = partial(own, path="/os-keypairs/{id}", query=UserQuery, strict_query=strict)
    create = partial(
        own,
        method="POST",
        path="/os-keypairs",
        handler=handlers.create,
        policy=f"{rule}:create",
        body=Create,
        answer={"keypair": CREATED},
    )
    delete = partial(one, method="DELETE", handler=handlers.delete, policy=f"{rule}:delete")
    return [
        own(
            method="GET",
            path="/os-keypairs",
            handler=handlers.index,
            policy=f"{rule}:index",
            query=ListQuery,
            strict_query=strict,
            answer={"keypairs": [{"keypair": BRIEF}], "keypairs_links?": LINKS},
        ),
        one(method="GET", handler=handlers.show, policy=f"{rule}:show", answer={"keypair": FULL}),
        create(status=200, versions=until(1)),
        create(status=201, versions=since(2)),
        delete(status=202, versions=until(1)),
        delete(status=204, versions=since(2)),
    ]
