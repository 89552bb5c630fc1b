"""Availability zones and, for administrators, the services that run in them."""

from functools import partial
from typing import Any

from micronova.api.compute.services import INTERNAL_ZONE, read_services
from micronova.api.inputs import STRICT, NoQuery
from micronova.db import aggregates, services
from micronova.db.engine import Database
from micronova.db.services import ServiceRow
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.clock import Clock, micros
from micronova.objects.service_names import COMPUTE


class AvailabilityZones:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, down_time: float, default_zone: str) -> None:
        self._database = database
        self._clock = clock
        self._down_time = down_time
        self._default_zone = default_zone

    async def _services(self) -> dict[str, list[ServiceRow]]:
        """Return the services by zone; a zone is available while one of them is enabled."""
        rows, zones = await read_services(self._database)
        found: dict[str, list[ServiceRow]] = {}
        for row in rows:
            zone = zones.get(row.host, self._default_zone) if row.binary == COMPUTE else INTERNAL_ZONE
            found.setdefault(zone, []).append(row)
        return dict(sorted(found.items(), key=lambda item: (not _available(item[1]), item[0])))

    async def index(self, request: Request) -> dict[str, Any]:
        """List zones by name."""
        zones = await self._database.read(aggregates.zones_available, self._default_zone)
        return {
            "availabilityZoneInfo": [
                {"zoneName": zone, "zoneState": {"available": available}, "hosts": None}
                for zone, available in sorted(zones.items(), key=lambda item: (not item[1], item[0]))
            ]
        }

    async def detail(self, request: Request) -> dict[str, Any]:
        """List zones with their hosts and services."""
        now = micros(self._clock.now())
        shown = []
        for zone, rows in (await self._services()).items():
            hosts: dict[str, dict[str, Any]] | None = None
            if _available(rows):
                hosts = {}
                for row in rows:
                    if not row.disabled:
                        hosts.setdefault(row.host, {})[row.binary] = {
                            "available": services.is_up(row, now, self._down_time),
                            "active": True,
                            "updated_at": iso_micros(row.last_seen_at),
                        }
            shown.append({"zoneName": zone, "zoneState": {"available": hosts is not None}, "hosts": hosts})
        return {"availabilityZoneInfo": shown}


def _available(rows: list[ServiceRow]) -> bool:
    return any(not row.disabled for row in rows)


_SERVICE = {"available": bool, "active": bool, "updated_at": str | None}


def _answer(hosts: Any) -> Any:
    return {"availabilityZoneInfo": [{"zoneName": str, "zoneState": {"available": bool}, "hosts": hosts}]}


def routes(database: Database, clock: Clock, service_down_time: float, default_zone: str) -> list[Route]:
    """Declare the routes of availability zones."""
    handlers = AvailabilityZones(database, clock, service_down_time, default_zone)
    root, rule = "/os-availability-zone", "os_compute_api:os-availability-zone"
    read = partial(Route, method="GET", query=NoQuery, strict_query=STRICT)
    return [
        read(path=root, handler=handlers.index, policy=f"{rule}:list", answer=_answer(None)),
        read(
            path=f"{root}/detail",
            handler=handlers.detail,
            policy=f"{rule}:detail",
            answer=_answer(({"*": {"*": _SERVICE}}, None)),
        ),
    ]
