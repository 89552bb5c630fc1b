"""Host aggregates: groups of hosts with metadata that the scheduler uses; some are availability zones."""

import logging
from functools import partial
from random import Random
from typing import Annotated, Any

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.api import inputs
from micronova.api.compute.server_inputs import Id
from micronova.api.inputs import STRICT, Body, HostName, Key, NoQuery, Text
from micronova.api.view import Field, View
from micronova.db import aggregates
from micronova.db.aggregates import AggregateRow
from micronova.db.engine import Database
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.notifications import resources
from micronova.notifications.notifier import Announcer
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Invalid, NotFound
from micronova.objects.ids import new_uuid
from micronova.servers.image_caching import CacheImagesRequests
from micronova.servers.unsupported import Unsupported
from micronova.servers.without_effect import RATIOS

log = logging.getLogger(__name__)

_BRIEF = (
    Field("id", "id", type=int),
    Field("uuid", "uuid", since(41), type=str),
    Field("name", "name", type=str),
    Field("availability_zone", lambda row, _: row.metadata.get(aggregates.ZONE), type=str | None),
    Field("created_at", lambda row, _: iso_micros(row.created_at), type=str),
    Field("updated_at", lambda row, _: iso_micros(row.updated_at), type=str | None),
    Field("deleted", lambda row, _: False, type=bool),
    Field("deleted_at", lambda row, _: None, type=None),
)
CREATED = View(*_BRIEF)
FULL = View(
    *_BRIEF,
    Field("hosts", lambda row, hosts: hosts, type=list[str]),
    Field("metadata", "metadata", type=dict[str, str]),
)

_ONE = {"aggregate": FULL}


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


class Image(Body):
    """An image."""

    id: Id


class CacheImages(Body):
    """The images to fetch."""

    cache: Annotated[list[Image], Meta(min_length=1)]


def _number(id: str) -> int:
    number = inputs.numeric_id(id)
    if number is None and inputs.numeric_id(id.removeprefix("-")) is not None:
        raise NotFound(f"Aggregate {id} could not be found.")
    if number is None:
        raise Invalid(f"Invalid input received: id {id[:64]!r} must be a number.")
    return number


def _zone(value: str | None, strip: bool) -> str | None:
    return None if value is None else inputs.name(value, "availability_zone", strip, forbidden=":")


class Aggregates:
    """The handlers."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        random: Random,
        notifier: Announcer,
        image_caching: CacheImagesRequests,
        unsupported: Unsupported,
    ) -> None:
        self._database = database
        self._clock = clock
        self._random = random
        self._notifier = notifier
        self._image_caching = image_caching
        self._unsupported = unsupported

    async def _announce_start(self, request: Request, action: str, number: int, **more: Any) -> None:
        """Tell that an action begins; an aggregate that does not exist is refused later."""
        if not self._notifier.enabled:
            return
        try:
            found = await self._database.read(lambda conn: _with_hosts(conn, aggregates.get(conn, number)))
        except NotFound:
            return
        self._announce(request, action, "start", found, **more)

    def _announce(
        self, request: Request, action: str, phase: str, found: tuple[AggregateRow, list[str]], **more: Any
    ) -> None:
        notification = partial(resources.aggregate_of, action, phase, *found, **more)
        self._notifier.announce(request.context.for_bus(), notification)

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
        uuid, context = new_uuid(self._random), request.context.for_bus()
        metadata = {aggregates.ZONE: zone} if zone else {}
        more: dict[str, Any] = {"meta_data": metadata} if metadata else {}
        notification = partial(resources.aggregate, "create", "start", uuid=uuid, name=name, metadata=metadata, **more)
        self._notifier.announce(context, notification)
        row = await self._database.write(aggregates.insert, uuid, name, zone, self._now())
        self._announce(request, "create", "end", (row, []), **more)
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
        """Change metadata, and log which of it has no effect."""
        number, metadata = _number(id), request.body.set_metadata.metadata
        shown = await self._change(request, number, None, metadata)
        given = {key: value for key, value in metadata.items() if value is not None}
        ratios: dict[int, dict[str, float]] = {}
        if given.keys() & RATIOS.keys():
            ratios = await self._database.read(aggregates.largest_ratios, [number])
        name = shown["aggregate"]["name"]
        for remark in self._unsupported.remarks_of_aggregate(name, given, ratios.get(number, {})):
            log.warning("%s", remark)
        return shown

    async def _change(
        self, request: Request, number: int, name: str | None, metadata: dict[str, str | None]
    ) -> dict[str, Any]:
        actions: dict[str, dict[str, Any]] = {} if name is None else {"update_prop": {}}
        if metadata:
            actions["update_metadata"] = {"meta_data": metadata}
        for action, more in actions.items():
            await self._announce_start(request, action, number, **more)
        found = await self._database.write(
            lambda conn: _with_hosts(conn, aggregates.update(conn, number, name, metadata, self._now))
        )
        for action, more in actions.items():
            self._announce(request, action, "end", found, **more)
        return self._shown(request, found)

    async def add_host(self, request: Request, id: str) -> dict[str, Any]:
        """Add a host."""
        number, host = _number(id), request.body.add_host.host
        await self._announce_start(request, "add_host", number, host_name=host)
        found = await self._database.write(
            lambda conn: _with_hosts(conn, aggregates.add_host(conn, number, host, self._now))
        )
        self._announce(request, "add_host", "end", found, host_name=host, name_=found[0].name)
        return self._shown(request, found)

    async def remove_host(self, request: Request, id: str) -> dict[str, Any]:
        """Remove a host."""
        number, host = _number(id), request.body.remove_host.host
        await self._announce_start(request, "remove_host", number, host_name=host)
        found = await self._database.write(
            lambda conn: _with_hosts(conn, aggregates.remove_host(conn, number, host, self._now))
        )
        self._announce(request, "remove_host", "end", found, host_name=host, name_=found[0].name)
        return self._shown(request, found)

    async def cache_images(self, request: Request, id: str) -> None:
        """Let the hosts of an aggregate fetch images before servers need them."""
        ids = [image.id for image in request.body.cache]
        await self._image_caching.request(request.context, _number(id), ids)

    async def delete(self, request: Request, id: str) -> None:
        """Remove an aggregate that has no hosts."""
        number = _number(id)
        await self._announce_start(request, "delete", number)
        self._announce(request, "delete", "end", (await self._database.write(_deleted, number), []))


def _with_hosts(conn: sa.Connection, row: AggregateRow) -> tuple[AggregateRow, list[str]]:
    return row, aggregates.hosts(conn, [row.id]).get(row.id, [])


def _deleted(conn: sa.Connection, number: int) -> AggregateRow:
    row = aggregates.get(conn, number, lock=True)
    aggregates.delete(conn, number)
    return row


def routes(
    database: Database,
    clock: Clock,
    random: Random,
    notifier: Announcer,
    image_caching: CacheImagesRequests,
    unsupported: Unsupported,
) -> list[Route]:
    """Declare the routes of aggregates."""
    handlers = Aggregates(database, clock, random, notifier, image_caching, unsupported)
    root, rule = "/os-aggregates", "os_compute_api:os-aggregates"
    one = f"{root}/{{id}}"
    read = partial(Route, method="GET", query=NoQuery, strict_query=STRICT)
    act = partial(Route, method="POST", path=f"{one}/action", answer=_ONE)
    return [
        read(path=root, handler=handlers.index, policy=f"{rule}:index", answer={"aggregates": [FULL]}),
        read(path=one, handler=handlers.show, policy=f"{rule}:show", answer=_ONE),
        Route(
            method="POST",
            path=root,
            handler=handlers.create,
            policy=f"{rule}:create",
            body=Create,
            answer={"aggregate": CREATED},
        ),
        Route(method="PUT", path=one, handler=handlers.update, policy=f"{rule}:update", body=Update, answer=_ONE),
        Route(method="DELETE", path=one, handler=handlers.delete, policy=f"{rule}:delete"),
        act(action="add_host", handler=handlers.add_host, policy=f"{rule}:add_host", body=AddHost),
        act(action="remove_host", handler=handlers.remove_host, policy=f"{rule}:remove_host", body=RemoveHost),
        act(action="set_metadata", handler=handlers.set_metadata, policy=f"{rule}:set_metadata", body=SetMetadata),
        Route(
            method="POST",
            path=f"{one}/images",
            handler=handlers.cache_images,
            policy="compute:aggregates:images",
            body=CacheImages,
            status=202,
            versions=since(81),
            errors=(501,),
        ),
    ]
