"""Hosts: the services of each machine and what it stores, as Cinder's old API shows them."""

from collections import defaultdict
from typing import Any

import sqlalchemy as sa

from micronova.embedded.volume.api.request_bodies import Body, Text
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.store import host_queries, service_queries
from micronova.embedded.volume.tables import snapshots, volumes
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Invalid, NotFound

_TOTAL = "(total)"
_NOTHING = {"volume_count": 0, "total_volume_gb": 0, "snapshot_count": 0, "total_snapshot_gb": 0}


class HostChanges(Body):
    """The fields of a host that can change."""

    status: Text


class HostHandlers:
    """The handlers of hosts."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_, one, rule = "/os-hosts", "/os-hosts/{host}", "volume_extension:hosts"
        return [
            Route(method="GET", path=all_, handler=self.index, policy=rule),
            Route(method="GET", path=one, handler=self.show, policy=rule),
            Route(method="PUT", path=one, handler=self.update, policy=rule, body=HostChanges),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List the services with the hosts that they run on."""
        now = self._core.now()
        return {
            "hosts": [
                {
                    "host_name": row.host,
                    "service": row.binary,
                    "zone": self._core.settings.availability_zone,
                    "service-status": "available" if row.is_up(now) else "unavailable",
                    "service-state": "disabled" if row.disabled else "enabled",
                    "last-update": iso_micros(row.seen_at),
                }
                for row in await self._core.database.read(service_queries.rows)
            ]
        }

    async def show(self, request: Request, host: str) -> dict[str, Any]:
        """Show how much a host has, in all and by project."""
        used = await self._core.database.read(_used_by_project, host)
        total = {name: sum(of_project[name] for of_project in used.values()) for name in _NOTHING}
        return {
            "host": [
                {"resource": {"host": host, "project": project, **{name: str(number) for name, number in sums.items()}}}
                for project, sums in {_TOTAL: total, **used}.items()
            ]
        }

    async def update(self, request: Request, host: str) -> dict[str, Any]:
        """Enable or disable the volume service of a host: a disabled one makes no new volumes."""
        status = request.body.status.strip().lower()
        if status not in ("enable", "disable"):
            raise Invalid(f"Invalid status: '{status[:64]}' is neither enable nor disable.")
        disabled = status == "disable"
        binary = service_queries.VOLUME_SERVICE
        if not await self._core.database.write(service_queries.set_disabled, binary, host, disabled, None):
            raise _missing(host)
        return {"host": host, "status": f"{status}d"}


def _used_by_project(conn: sa.Connection, host: str) -> dict[str, dict[str, int]]:
    if service_queries.get(conn, service_queries.VOLUME_SERVICE, host) is None:
        raise _missing(host)
    used: dict[str, dict[str, int]] = defaultdict(_NOTHING.copy)
    for each in host_queries.sums(conn, volumes, host):
        used[each.project_id] |= {"volume_count": each.number, "total_volume_gb": each.size}
    for each in host_queries.sums(conn, snapshots, host):
        used[each.project_id] |= {"snapshot_count": each.number, "total_snapshot_gb": each.size}
    return dict(sorted(used.items()))


def _missing(host: str) -> NotFound:
    return NotFound(f"Host {host[:64]} could not be found.")
