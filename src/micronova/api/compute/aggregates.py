"""Host aggregates: groups of hosts with metadata that the scheduler uses; some are availability zones."""

from functools import partial
from random import Random
from typing import Annotated, Any

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.api import inputs
from micronova.api.inputs import STRICT, Body, HostName, Key, NoQuery, Text
from micronova.api.view import Field, View
from micronova.db import aggregates
from micronova.db.aggregates import AggregateRow
from micronova.db.engine import Database
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Invalid, NotFound, NotSupported
from micronova.objects.ids import new_uuid

_BRIEF = (
    Field("id", "id"),
    Field("uuid", "uuid", since(41)),
    Field("name", "name"),
    Field("availability_zone", lambda row, _: row.metadata.get(aggregates.ZONE)),
    Field("created_at", lambda row, _: iso_micros(row.created_at)),
    Field("updated_at", lambda row, _: iso_micros(row.updated_at)),
    Field("deleted", lambda row, _: False),
    Field("deleted_at", lambda row, _: None),
)
CREATED = View(*_BRIEF)
FULL = View(*_BRIEF, Field("hosts", lambda row, hosts: hosts), Field("metadata", "metadata"))


class NewAggregate(Body):
    """The aggregate to create."""

    name: Text
    availability_zone: Text | None = None


class Create(Body):
    """The body of a create."""

    aggregate: NewAggregate


class Changes(Body):
    """The fields of an aggregate to change."""

    name: Text | UnsetType = UNSET
    availability_zone: Text | None | UnsetType = UNSET


class Update(Body):
    """The body of an update."""

    aggregate: Changes


class OneHost(Body):
    """A host."""

    host: HostName


class AddHost(Body):
    """The action that adds a host."""

    add_host: OneHost


class RemoveHost(Body):
    """The action that removes a host."""

    remove_host: OneHost


class NewMetadata(Body):
    """Metadata to set; null removes a key."""

    metadata: dict[Key, Annotated[str, Meta(max_length=255)] | None]


class SetMetadata(Body):
    """The action that changes metadata."""

    set_metadata: NewMetadata


def _number(id: str) -> int:
    number = inputs.number(id)
    if number is None and inputs.number(id.removeprefix("-")) is not None:
        raise NotFound(f"Aggregate {id} could not be found.")
    if number is None:
        raise Invalid(f"Invalid input received: id {id[:64]!r} must be a number.")
    return number


def _zone(value: str | None, strip: bool) -> str | None:
    return None if value is None else inputs.name(value, "availability_zone", strip, forbidden=":")


class Aggregates:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, random: Random) -> None:
        self._database = database
        self._clock = clock
        self._random = random

    def _now(self) -> int:
        return micros(self._clock.now())

    def _shown(self, request: Request, found: tuple[AggregateRow, list[str]]) -> dict[str, Any]:
        return {"aggregate": FULL.at(request.minor)(*found)}

    async def index(self, request: Request) -> dict[str, Any]:
        """List aggregates."""
        rows, hosts = await self._database.read(lambda conn: (aggregates.list_(conn), aggregates.hosts(conn)))
        shape = FULL.at(request.minor)
        return {"aggregates": [shape(row, hosts.get(row.id, [])) for row in rows]}

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show an aggregate with its hosts."""
        number = _number(id)
        found = await self._database.read(lambda conn: _with_hosts(conn, aggregates.get(conn, number)))
        return self._shown(request, found)

    async def create(self, request: Request) -> dict[str, Any]:
        """Create an aggregate."""
        asked: NewAggregate = request.body.aggregate
        name = inputs.name(asked.name, strip=request.is_v2)
        zone = _zone(asked.availability_zone, request.is_v2)
        row = await self._database.write(aggregates.insert, new_uuid(self._random), name, zone, self._now())
        return {"aggregate": CREATED.at(request.minor)(row)}

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Rename an aggregate, or change its zone."""
        number, asked = _number(id), request.body.aggregate
        if isinstance(asked.name, UnsetType) and isinstance(asked.availability_zone, UnsetType):
            raise Invalid("Invalid input: 'name' or 'availability_zone' is a required property.")
        name = None if isinstance(asked.name, UnsetType) else inputs.name(asked.name, strip=True)
        metadata: dict[str, str | None] = {}
        if not isinstance(asked.availability_zone, UnsetType):
            metadata[aggregates.ZONE] = _zone(asked.availability_zone, request.is_v2)
        return await self._change(request, number, name, metadata)

    async def set_metadata(self, request: Request, id: str) -> dict[str, Any]:
        """Change metadata."""
        return await self._change(request, _number(id), None, request.body.set_metadata.metadata)

    async def _change(
        self, request: Request, number: int, name: str | None, metadata: dict[str, str | None]
    ) -> dict[str, Any]:
        now = self._now()
        found = await self._database.write(
            lambda conn: _with_hosts(conn, aggregates.update(conn, number, name, metadata, now))
        )
        return self._shown(request, found)

    async def add_host(self, request: Request, id: str) -> dict[str, Any]:
        """Add a host."""
        number, host, now = _number(id), request.body.add_host.host, self._now()
        found = await self._database.write(lambda conn: _with_hosts(conn, aggregates.add_host(conn, number, host, now)))
        return self._shown(request, found)

    async def remove_host(self, request: Request, id: str) -> dict[str, Any]:
        """Remove a host."""
        number, host, now = _number(id), request.body.remove_host.host, self._now()
        found = await self._database.write(
            lambda conn: _with_hosts(conn, aggregates.remove_host(conn, number, host, now))
        )
        return self._shown(request, found)

    async def cache_images(self, request: Request, id: str) -> None:
        """Raise NotSupported: images are fetched to a host when a server needs them, not ahead of time."""
        await self._database.read(aggregates.get, _number(id))
        raise NotSupported("Images are not cached on hosts ahead of time.")

    async def delete(self, request: Request, id: str) -> None:
        """Remove an aggregate that has no hosts."""
        await self._database.write(aggregates.delete, _number(id))


def _with_hosts(conn: sa.Connection, row: AggregateRow) -> tuple[AggregateRow, list[str]]:
    return row, aggregates.hosts(conn, [row.id]).get(row.id, [])


def routes(database: Database, clock: Clock, random: Random) -> list[Route]:
    """Declare the routes of aggregates."""
    handlers = Aggregates(database, clock, random)
    root, rule = "/os-aggregates", "os_compute_api:os-aggregates"
    one = f"{root}/{{id}}"
    read = partial(Route, method="GET", query=NoQuery, strict_query=STRICT)
    act = partial(Route, method="POST", path=f"{one}/action")
    return [
        read(path=root, handler=handlers.index, policy=f"{rule}:index"),
        read(path=one, handler=handlers.show, policy=f"{rule}:show"),
        Route(method="POST", path=root, handler=handlers.create, policy=f"{rule}:create", body=Create),
        Route(method="PUT", path=one, handler=handlers.update, policy=f"{rule}:update", body=Update),
        Route(method="DELETE", path=one, handler=handlers.delete, policy=f"{rule}:delete"),
        act(action="add_host", handler=handlers.add_host, policy=f"{rule}:add_host", body=AddHost),
        act(action="remove_host", handler=handlers.remove_host, policy=f"{rule}:remove_host", body=RemoveHost),
        act(action="set_metadata", handler=handlers.set_metadata, policy=f"{rule}:set_metadata", body=SetMetadata),
        Route(
            method="POST",
            path=f"{one}/images",
            handler=handlers.cache_images,
            policy="compute:aggregates:images",
            versions=since(81),
        ),
    ]
