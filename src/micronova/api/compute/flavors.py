"""Flavors: list, show, create, change the description, delete."""

from functools import partial
from random import Random
from typing import Annotated, Any

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType, field

from micronova.api import inputs
from micronova.api.inputs import Body, Flag, Paged, Text, Whole
from micronova.api.links import LINKS, Links
from micronova.api.view import Field, View
from micronova.db import flavors
from micronova.db.engine import Database
from micronova.db.flavors import FlavorRow
from micronova.http.request import Request
from micronova.http.service import AUTHENTICATED, Route
from micronova.http.versions import Range, since, until
from micronova.notifications import resources
from micronova.notifications.notifier import Announcer
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Invalid, NotFound
from micronova.objects.flavor import Flavor
from micronova.objects.ids import new_uuid

SHOWS_SPECS = "os_compute_api:os-flavor-extra-specs:index"


def _links(row: FlavorRow, links: Links) -> list[dict[str, str]]:
    return links.of("flavors", row.flavorid)


BRIEF = View(
    Field("id", "flavorid", type=str),
    Field("name", "name", type=str),
    Field("description", "description", since(55), type=str | None),
    Field("links", _links, type=LINKS),
)
FULL = View(
    Field("id", "flavorid", type=str),
    Field("name", "name", type=str),
    Field("ram", "memory_mb", type=int),
    Field("disk", "root_gb", type=int),
    Field("swap", lambda row, _: row.swap or "", until(74), type=int | str),
    Field("swap", "swap", since(75), type=int),
    Field("OS-FLV-EXT-DATA:ephemeral", "ephemeral_gb", type=int),
    Field("OS-FLV-DISABLED:disabled", "disabled", until(101), type=bool),
    Field("vcpus", "vcpus", type=int),
    Field("os-flavor-access:is_public", "is_public", type=bool),
    Field("rxtx_factor", "rxtx_factor", until(101), type=float),
    Field("description", "description", since(55), type=str | None),
    Field("extra_specs", "extra_specs", since(61), when="specs", type=dict[str, str]),
    Field("links", _links, type=LINKS),
)

FlavorId = Annotated[
    str,
    Meta(
        title="letters, digits, . _ - and inner spaces",
        pattern=r"^(?! )[a-zA-Z0-9. _\-]+(?<! )\Z",
        min_length=1,
        max_length=255,
    ),
]
Factor = Annotated[str, Meta(title="a number such as 1.5", pattern=r"^[0-9]+(\.[0-9]+)?\Z", max_length=40)]
Description = Annotated[str, Meta(max_length=65535)]


class NewFlavor(Body):
    """The flavor to create."""

    versions = {"rxtx_factor": until(101), "description": since(55)}

    name: Text
    ram: Whole
    vcpus: Whole
    disk: Whole
    id: FlavorId | int | float | None = None
    ephemeral: Whole = field(default=0, name="OS-FLV-EXT-DATA:ephemeral")
    swap: Whole = 0
    rxtx_factor: float | Factor | UnsetType = UNSET
    is_public: Flag = field(default=True, name="os-flavor-access:is_public")
    description: Description | None | UnsetType = UNSET


class Create(Body):
    """The body of a create."""

    flavor: NewFlavor


class NewDescription(Body):
    """The only field of a flavor that can change."""

    description: Description | None


class Update(Body):
    """The body of an update."""

    flavor: NewDescription


class ListQuery(Paged):
    """Filters and order of a list."""

    versions = {"name": since(102)}

    is_public: str | UnsetType = UNSET
    min_ram: str | UnsetType = field(default=UNSET, name="minRam")
    min_disk: str | UnsetType = field(default=UNSET, name="minDisk")
    name: str | UnsetType = UNSET
    sort_key: str = "flavorid"
    sort_dir: str = "asc"


class Flavors:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, random: Random, max_limit: int, notifier: Announcer) -> None:
        self._database = database
        self._clock = clock
        self._random = random
        self._max_limit = max_limit
        self._notifier = notifier

    async def index(self, request: Request) -> dict[str, Any]:
        """List flavors by name."""
        return await self._list(request, BRIEF, "flavors")

    async def detail(self, request: Request) -> dict[str, Any]:
        """List flavors with all fields."""
        return await self._list(request, FULL, "flavors/detail")

    async def _list(self, request: Request, view: View, path: str) -> dict[str, Any]:
        query: ListQuery = request.query
        limit, marker = query.page(self._max_limit)
        admin = request.context.is_admin
        rows = await self._database.read(
            flavors.list_,
            is_public=_is_public(query.is_public) if admin else True,
            min_ram=_number(query.min_ram, "minRam"),
            min_disk=_number(query.min_disk, "minDisk"),
            name=None if isinstance(query.name, UnsetType) else query.name,
            sort_key=_sort_key(query, request.minor),
            descending=query.sort_dir == "desc",
            project_id=request.context.project_id,
            marker=marker,
            limit=limit,
        )
        links = Links(request)
        shape = view.at(request.minor, _flags(request))
        body: dict[str, Any] = {"flavors": [shape(row, links) for row in rows]}
        if limit and len(rows) == limit:
            body["flavors_links"] = links.next(request, path, rows[-1].flavorid)
        return body

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show a flavor that the caller may use."""
        project = None if request.context.is_admin else request.context.project_id
        return self._shown(request, await self._database.read(flavors.row, id, project))

    def _shown(self, request: Request, row: FlavorRow) -> dict[str, Any]:
        return {"flavor": FULL.at(request.minor, _flags(request))(row, Links(request))}

    async def create(self, request: Request) -> dict[str, Any]:
        """Create a flavor."""
        asked: NewFlavor = request.body.flavor
        factor = 1.0 if isinstance(asked.rxtx_factor, UnsetType) else float(asked.rxtx_factor)
        if not 0 < factor <= 3.40282e38:
            raise Invalid("Invalid input for field/attribute rxtx_factor: it must be more than 0.")
        flavor = Flavor(
            id=new_uuid(self._random) if asked.id is None else str(asked.id),
            name=inputs.name(asked.name, strip=request.is_v2),
            ram=inputs.whole(asked.ram, "ram", 1),
            vcpus=inputs.whole(asked.vcpus, "vcpus", 1),
            disk=inputs.whole(asked.disk, "disk"),
            ephemeral=inputs.whole(asked.ephemeral, "OS-FLV-EXT-DATA:ephemeral"),
            swap=inputs.whole(asked.swap, "swap"),
            rxtx_factor=factor,
            is_public=inputs.flag(asked.is_public),
            description=_description(asked.description),
        )
        row = await self._database.write(flavors.insert, flavor, micros(self._clock.now()))
        self._notifier.announce(request.context.for_bus(), partial(resources.flavor, "create", row, []))
        return self._shown(request, row)

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Change a flavor's description."""
        description = _description(request.body.flavor.description)
        row, projects = await self._database.write(
            lambda conn: (flavors.set_description(conn, id, description), flavors.access(conn, id))
        )
        self._notifier.announce(request.context.for_bus(), partial(resources.flavor, "update", row, projects))
        return self._shown(request, row)

    async def delete(self, request: Request, id: str) -> None:
        """Delete a flavor; servers keep their copy of it."""
        row = await self._database.write(_deleted, id)
        self._notifier.announce(request.context.for_bus(), partial(resources.flavor, "delete", row, None))


def _deleted(conn: sa.Connection, id: str) -> FlavorRow:
    row = flavors.row(conn, id)
    flavors.delete(conn, id)
    return row


async def announce_update(notifier: Announcer, database: Database, request: Request, id: str) -> None:
    """Tell that a flavor was changed."""
    if not notifier.enabled:
        return
    try:
        row, projects = await database.read(lambda conn: (flavors.row(conn, id), flavors.access(conn, id)))
    except NotFound:  # it was deleted meanwhile
        return
    notifier.announce(request.context.for_bus(), partial(resources.flavor, "update", row, projects))


def _flags(request: Request) -> frozenset[str]:
    shown = request.minor >= 61 and request.allows(rule=SHOWS_SPECS)
    return _WITH_SPECS if shown else _NOTHING


_NOTHING: frozenset[str] = frozenset()
_WITH_SPECS = frozenset({"specs"})


def _description(value: str | None | UnsetType) -> str | None:
    return None if isinstance(value, UnsetType) else inputs.printable(value, "description")


def _is_public(value: str | UnsetType) -> bool | None:
    if isinstance(value, UnsetType):
        return True
    if value.strip().lower() in ("none", ""):
        return None
    return inputs.boolean(value, "is_public")


def _number(value: str | UnsetType, name: str) -> int | None:
    if isinstance(value, UnsetType):
        return None
    try:
        return max(-inputs.MAX_INT, min(inputs.MAX_INT, int(value)))
    except ValueError:
        raise Invalid(f"Invalid {name} filter [{value[:64]}]: it must be a number.") from None


def _sort_key(query: ListQuery, minor: int) -> str:
    known = [key for key in flavors.SORT_KEYS if minor < 102 or key != "rxtx_factor"]
    if query.sort_key not in known:
        raise Invalid(f"Invalid input for query parameter sort_key: it must be one of {', '.join(known)}.")
    if query.sort_dir not in ("asc", "desc"):
        raise Invalid("Invalid input for query parameter sort_dir: it must be asc or desc.")
    return query.sort_key


def routes(database: Database, clock: Clock, random: Random, max_limit: int, notifier: Announcer) -> list[Route]:
    """Declare the routes of flavors."""
    handlers = Flavors(database, clock, random, max_limit, notifier)
    manage = "os_compute_api:os-flavor-manage"
    strict = Range(75)
    listed = partial(Route, method="GET", policy=AUTHENTICATED, query=ListQuery, strict_query=strict)
    return [
        listed(path="/flavors", handler=handlers.index, answer={"flavors": [BRIEF], "flavors_links?": LINKS}),
        listed(path="/flavors/detail", handler=handlers.detail, answer={"flavors": [FULL], "flavors_links?": LINKS}),
        Route(
            method="GET", path="/flavors/{id}", handler=handlers.show, policy=AUTHENTICATED,
            query=inputs.NoQuery, strict_query=inputs.STRICT, answer={"flavor": FULL},
        ),
        Route(
            method="POST", path="/flavors", handler=handlers.create, policy=f"{manage}:create", body=Create,
            answer={"flavor": FULL},
        ),
        Route(
            method="PUT", path="/flavors/{id}", handler=handlers.update, policy=f"{manage}:update",
            body=Update, versions=since(55), answer={"flavor": FULL},
        ),
        Route(
            method="DELETE", path="/flavors/{id}", handler=handlers.delete, policy=f"{manage}:delete",
            status=202,
        ),
    ]  # fmt: skip
