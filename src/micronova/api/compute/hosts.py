"""Hosts: the oldest API for services and nodes (until 2.42)."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.api.compute.services import INTERNAL_ZONE, read_services
from micronova.api.inputs import Body, NoQuery, Query
from micronova.db import nodes, services
from micronova.db.engine import Database
from micronova.db.services import ServiceChanges, ServiceRow
from micronova.db.tables import instances
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import until
from micronova.notifications import resources
from micronova.notifications.notifier import Announcer
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Invalid, NotFound, NotSupported
from micronova.objects.instance import FlavorData
from micronova.objects.service_names import COMPUTE

Switch = Literal["enable", "disable", "Enable", "Disable", "ENABLE", "DISABLE"]

_RESOURCE = {"host": str, "project": str, "cpu": int, "memory_mb": int, "disk_gb": int}


class ListQuery(Query):
    """A zone's hosts only."""

    zone: str | UnsetType = UNSET


class Update(Body):
    """What to change of a host."""

    status: Switch | UnsetType = UNSET
    maintenance_mode: Switch | UnsetType = UNSET


class Hosts:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, default_zone: str, notifier: Announcer) -> None:
        self._database = database
        self._clock = clock
        self._default_zone = default_zone
        self._notifier = notifier

    async def index(self, request: Request) -> dict[str, Any]:
        """List the enabled hosts with their services."""
        rows, zones = await read_services(self._database)
        wanted = request.query.zone
        shown = [
            {
                "host_name": row.host,
                "service": row.binary.removeprefix("nova-"),
                "zone": zones.get(row.host, self._default_zone) if row.binary == COMPUTE else INTERNAL_ZONE,
            }
            for row in rows
            if not row.disabled
        ]
        if not isinstance(wanted, UnsetType) and wanted:
            shown = [each for each in shown if each["zone"] == wanted]
        return {"hosts": shown}

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show a host's resources, in total, used, and by project."""
        totals, shares = await self._database.read(_resources, id)
        return {"host": [{"resource": {"host": id, **each}} for each in (*totals, *shares)]}

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Enable or disable a host for new servers."""
        asked: Update = request.body
        if isinstance(asked.status, UnsetType) and isinstance(asked.maintenance_mode, UnsetType):
            raise Invalid("Invalid input: 'status' or 'maintenance_mode' is a required property.")
        shown: dict[str, Any] = {"host": id}
        disabled = None
        if not isinstance(asked.status, UnsetType):
            disabled = asked.status.lower() == "disable"
            shown["status"] = "disabled" if disabled else "enabled"
        maintenance = not isinstance(asked.maintenance_mode, UnsetType)
        row = await self._database.write(self._switch, id, disabled, maintenance)
        if row is not None:
            self._notifier.announce(request.context.for_bus(), partial(resources.service, "update", row))
        return shown

    def _switch(self, conn: sa.Connection, host: str, disabled: bool | None, maintenance: bool) -> ServiceRow | None:
        found = _find(conn, host)
        if maintenance:
            raise NotSupported("No driver of ours has a maintenance mode.")
        if disabled is None:
            return None
        values: ServiceChanges = {"disabled": disabled, "disabled_reason": None}
        return services.update(conn, found.uuid, values, micros(self._clock.now()))

    async def power(self, request: Request, id: str) -> None:
        """Raise NotSupported: no driver of ours starts, stops or reboots hosts."""
        await self._database.read(_find, id)
        raise NotSupported("Hosts are not started, shut down or rebooted through this API.")


def _find(conn: sa.Connection, host: str) -> ServiceRow:
    try:
        return services.find(conn, host, COMPUTE)
    except NotFound:
        raise NotFound(f"Compute host {host} could not be found.") from None


def _resources(conn: sa.Connection, host: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    held = nodes.list_(conn, host=host)
    if not held:
        raise NotFound(f"Compute host {host} could not be found.")
    i = instances.c
    each = conn.execute(sa.select(i.project_id, i.flavor).where(i.host == host).order_by(i.project_id)).all()
    projects: dict[str, list[FlavorData]] = {}
    for row in each:
        projects.setdefault(row.project_id, []).append(row.flavor)
    totals = [
        {
            "project": f"({name})",
            "cpu": sum(getattr(node, f"vcpus_{number}") for node in held for number in numbers),
            "memory_mb": sum(getattr(node, f"memory_mb_{number}") for node in held for number in numbers),
            "disk_gb": sum(getattr(node, f"local_gb_{number}") for node in held for number in numbers),
        }
        for name, numbers in (("total", ("total",)), ("used_now", ("claimed", "reserved")))
    ]
    totals.append(_share("(used_max)", (row.flavor for row in each)))
    return totals, [_share(project, flavors) for project, flavors in projects.items()]


def _share(project: str, flavors: Iterable[FlavorData]) -> dict[str, Any]:
    sizes = list(flavors)
    return {
        "project": project,
        "cpu": sum(size["vcpus"] for size in sizes),
        "memory_mb": sum(size["ram"] for size in sizes),
        "disk_gb": sum(size["disk"] + size.get("ephemeral", 0) for size in sizes),
    }


def routes(database: Database, clock: Clock, default_zone: str, notifier: Announcer) -> list[Route]:
    """Declare the routes of hosts."""
    handlers = Hosts(database, clock, default_zone, notifier)
    one, rule = "/os-hosts/{id}", "os_compute_api:os-hosts"
    old = partial(Route, versions=until(42))
    power = partial(old, method="GET", handler=handlers.power, query=NoQuery, errors=(501,))
    return [
        old(
            method="GET",
            path="/os-hosts",
            handler=handlers.index,
            policy=f"{rule}:list",
            query=ListQuery,
            answer={"hosts": [{"host_name": str, "service": str, "zone": str}]},
        ),
        old(
            method="GET",
            path=one,
            handler=handlers.show,
            policy=f"{rule}:show",
            query=NoQuery,
            answer={"host": [{"resource": _RESOURCE}]},
        ),
        old(
            method="PUT",
            path=one,
            handler=handlers.update,
            policy=f"{rule}:update",
            body=Update,
            errors=(501,),
            answer={"host": str, "status?": Literal["enabled", "disabled"]},
        ),
        power(path=f"{one}/startup", policy=f"{rule}:start"),
        power(path=f"{one}/shutdown", policy=f"{rule}:shutdown"),
        power(path=f"{one}/reboot", policy=f"{rule}:reboot"),
    ]
