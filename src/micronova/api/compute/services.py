"""Services: the processes of the cloud; an administrator enables and disables compute hosts here."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.api import inputs
from micronova.api.inputs import Body, Flag, HostName, Query, Text
from micronova.api.view import Field, View
from micronova.db import aggregates, services
from micronova.db.engine import Database
from micronova.db.services import ServiceChanges, ServiceRow
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import Range, since, until
from micronova.notifications import resources
from micronova.notifications.notifier import Announcer
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Invalid, NotFound
from micronova.objects.service_names import COMPUTE
from micronova.servers.service_removal import ServiceRemoval

INTERNAL_ZONE = "internal"  # the zone of all services but compute hosts
PART = 500  # services that are read at a time
_API = ("nova-osapi_compute", "nova-metadata")  # they answer HTTP and send no heartbeats, so they are not listed


class Facts:
    """What the view of a service needs besides its row: the zones of hosts and the time."""

    __slots__ = ("_down_time", "_now", "_zone", "_zones")

    def __init__(self, zones: dict[str, str], default_zone: str, now: int, down_time: float) -> None:
        self._zones = zones
        self._zone = default_zone
        self._now = now
        self._down_time = down_time

    def zone(self, row: ServiceRow) -> str:
        """Return the zone that a service is in."""
        return self._zones.get(row.host, self._zone) if row.binary == COMPUTE else INTERNAL_ZONE

    def state(self, row: ServiceRow) -> str:
        """Return `up` or `down`."""
        return "up" if services.is_up(row, self._now, self._down_time) else "down"


def status(row: ServiceRow) -> str:
    """Return `enabled` or `disabled`."""
    return "disabled" if row.disabled else "enabled"


VIEW = View(
    Field("id", "id", until(52), type=int),
    Field("id", "uuid", since(53), type=str),
    Field("binary", "binary", type=str),
    Field("host", "host", type=str),
    Field("zone", lambda row, facts: facts.zone(row), type=str),
    Field("status", lambda row, facts: status(row), type=Literal["enabled", "disabled"]),
    Field("state", lambda row, facts: facts.state(row), type=Literal["up", "down"]),
    Field("updated_at", lambda row, facts: iso_micros(row.last_seen_at), type=str | None),
    Field("disabled_reason", "disabled_reason", type=str | None),
    Field("forced_down", "forced_down", since(11), type=bool),
)

_OLD = {"host": str, "binary": str, "status?": str, "disabled_reason?": str, "forced_down?": bool}


class ListQuery(Query):
    """Filters of a list."""

    host: str | UnsetType = UNSET
    binary: str | UnsetType = UNSET


class OldUpdate(Body):
    """The body of enable, disable, disable-log-reason and force-down, until 2.52."""

    versions = {"forced_down": since(11)}

    host: HostName
    binary: Text
    disabled_reason: Text | UnsetType = UNSET
    forced_down: Flag | UnsetType = UNSET


class Update(Body):
    """The fields of a service to change (since 2.53)."""

    status: Literal["enabled", "disabled"] | UnsetType = UNSET
    disabled_reason: Text | UnsetType = UNSET
    forced_down: Flag | UnsetType = UNSET


async def read_services(
    database: Database, *, host: str | None = None, binary: str | None = None
) -> tuple[list[ServiceRow], dict[str, str]]:
    """Read services and the zones of their hosts in parts, so that other requests are answered in between."""
    rows: list[ServiceRow] = []
    zones: dict[str, str] = {}

    def read(conn: sa.Connection, after: int) -> tuple[Sequence[ServiceRow], dict[str, str]]:
        page = services.list_(conn, host=host, binary=binary, after=after, limit=PART)
        return page, aggregates.zones(conn, {row.host for row in page})

    while True:
        page, of_page = await database.read(read, rows[-1].id if rows else 0)
        rows += page
        zones |= of_page
        if len(page) < PART:
            return rows, zones


class Services:
    """The handlers."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        removal: ServiceRemoval,
        down_time: float,
        default_zone: str,
        notifier: Announcer,
    ) -> None:
        self._database = database
        self._clock = clock
        self._removal = removal
        self._down_time = down_time
        self._default_zone = default_zone
        self._notifier = notifier

    def _facts(self, zones: dict[str, str]) -> Facts:
        return Facts(zones, self._default_zone, micros(self._clock.now()), self._down_time)

    async def index(self, request: Request) -> dict[str, Any]:
        """List services."""
        query: ListQuery = request.query
        host = None if isinstance(query.host, UnsetType) or not query.host else query.host
        binary = None if isinstance(query.binary, UnsetType) or not query.binary else query.binary
        rows, zones = await read_services(self._database, host=host, binary=binary)
        shape, facts = VIEW.at(request.minor), self._facts(zones)
        return {"services": [shape(row, facts) for row in rows if row.binary not in _API]}

    async def act(self, request: Request, id: str) -> dict[str, Any]:
        """Enable, disable or force down the service of a host: the path names the action (until 2.52)."""
        asked: OldUpdate = request.body
        reason = None if isinstance(asked.disabled_reason, UnsetType) else asked.disabled_reason
        shown: dict[str, Any] = {"host": asked.host, "binary": asked.binary}
        values: ServiceChanges
        if id == "enable":
            values = {"disabled": False, "disabled_reason": None}
        elif id == "disable":
            values = {"disabled": True, "disabled_reason": None}
        elif id == "disable-log-reason":
            if reason is None:
                raise Invalid("Missing disabled_reason: disable-log-reason says why.")
            values = {"disabled": True, "disabled_reason": reason}
            shown["disabled_reason"] = reason
        elif id == "force-down" and request.minor >= 11:
            if isinstance(asked.forced_down, UnsetType):
                raise Invalid("Missing forced_down: force-down says whether.")
            values = {"forced_down": inputs.flag(asked.forced_down)}
        else:
            raise NotFound("Unknown action")
        if "disabled" in values:
            shown["status"] = "disabled" if values["disabled"] else "enabled"
        else:
            shown["forced_down"] = values["forced_down"]
        _only_compute(asked.binary)
        row, zones = await self._database.write(self._update_by_host, asked.host, asked.binary, values)
        self._announce(request, row, zones)
        return {"service": shown}

    def _announce(self, request: Request, row: ServiceRow, zones: dict[str, str]) -> None:
        zone = zones.get(row.host, self._default_zone)
        self._notifier.announce(request.context.for_bus(), partial(resources.service, "update", row, zone))

    def _update_by_host(
        self, conn: sa.Connection, host: str, binary: str, values: ServiceChanges
    ) -> tuple[ServiceRow, dict[str, str]]:
        return self._update(conn, services.find(conn, host, binary).uuid, values)

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Enable, disable or force down a service by its uuid (since 2.53)."""
        if not inputs.is_uuid(id):
            raise Invalid(f"Invalid uuid {id[:64]}")
        asked: Update = request.body
        reason = None if isinstance(asked.disabled_reason, UnsetType) else asked.disabled_reason
        values: ServiceChanges = {}
        if not isinstance(asked.status, UnsetType):
            if asked.status == "enabled" and reason:
                raise Invalid("Specifying 'disabled_reason' with status 'enabled' is invalid.")
            values = {"disabled": asked.status == "disabled", "disabled_reason": reason}
        if not isinstance(asked.forced_down, UnsetType):
            values["forced_down"] = inputs.flag(asked.forced_down)
        if not values:
            raise Invalid("No updates were requested. Fields 'status' or 'forced_down' should be specified.")
        row, zones = await self._database.write(self._update, id, values)
        self._announce(request, row, zones)
        return {"service": VIEW.at(request.minor)(row, self._facts(zones))}

    def _update(self, conn: sa.Connection, service: str, values: ServiceChanges) -> tuple[ServiceRow, dict[str, str]]:
        _only_compute(services.get(conn, service).binary)
        row = services.update(conn, service, values, micros(self._clock.now()))
        return row, aggregates.zones(conn, [row.host])

    async def delete(self, request: Request, id: str) -> None:
        """Delete a service; a compute host must hold no servers, and what belongs to it is deleted with it."""
        key: str | int | None = id if request.minor >= 53 else inputs.numeric_id(id)
        if key is None or (isinstance(key, str) and not inputs.is_uuid(key)):
            kind = "number" if key is None else "uuid"
            raise Invalid(f"Invalid id {id[:64]}: it must be a {kind}.")
        await self._removal.delete(key, request.context.for_bus())


def _only_compute(binary: str) -> None:
    if binary != COMPUTE:
        raise Invalid(f"Updating a {binary} service is not supported. Only nova-compute services can be updated.")


def routes(
    database: Database,
    clock: Clock,
    removal: ServiceRemoval,
    service_down_time: float,
    default_zone: str,
    notifier: Announcer,
) -> list[Route]:
    """Declare the routes of services."""
    handlers = Services(database, clock, removal, service_down_time, default_zone, notifier)
    one, rule = "/os-services/{id}", "os_compute_api:os-services"
    return [
        Route(
            method="GET", path="/os-services", handler=handlers.index, policy=f"{rule}:list",
            query=ListQuery, strict_query=Range(75), answer={"services": [VIEW]},
        ),
        Route(
            method="PUT", path=one, handler=handlers.act, policy=f"{rule}:update", body=OldUpdate,
            versions=until(52), answer={"service": _OLD},
        ),
        Route(
            method="PUT", path=one, handler=handlers.update, policy=f"{rule}:update", body=Update,
            versions=since(53), answer={"service": VIEW},
        ),
        Route(method="DELETE", path=one, handler=handlers.delete, policy=f"{rule}:delete", status=204),
    ]  # fmt: skip
