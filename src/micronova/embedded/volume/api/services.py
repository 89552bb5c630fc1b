"""The services that operators know from Cinder.

The process that serves the API also does the work of Cinder's scheduler, volume and backup services. Each host with the
role has a row for each of them, with what an operator has set.
"""

from typing import Any

from micronova.embedded.common.query import last
from micronova.embedded.volume.api.request_bodies import Body, Text
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.store import service_queries
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Invalid, NotFound


class ServiceBody(Body):
    """The body that enables or disables a service."""

    host: Text
    binary: Text | None = None
    service: Text | None = None
    cluster: Text | None = None
    disabled_reason: Text | None = None


class HostBody(Body):
    """The body that freezes or thaws a host."""

    host: Text
    cluster: Text | None = None


class ServiceHandlers:
    """The handlers of services."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        rule, change = "volume_extension:services:index", "volume_extension:services:update"
        return [
            Route(method="GET", path="/os-services", handler=self.index, policy=rule),
            Route(method="PUT", path="/os-services/enable", handler=self.enable, policy=change, body=ServiceBody),
            Route(method="PUT", path="/os-services/disable", handler=self.disable, policy=change, body=ServiceBody),
            Route(
                method="PUT",
                path="/os-services/disable-log-reason",
                handler=self.disable_with_reason,
                policy=change,
                body=ServiceBody,
            ),
            Route(
                method="PUT",
                path="/os-services/freeze",
                handler=self.freeze,
                policy="volume:freeze_host",
                body=HostBody,
                status=202,
            ),
            Route(
                method="PUT",
                path="/os-services/thaw",
                handler=self.thaw,
                policy="volume:thaw_host",
                body=HostBody,
                status=202,
            ),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List services."""
        rows = await self._core.database.read(service_queries.rows)
        query, now = request.raw_query, self._core.now()
        binary = last(query, "binary") or last(query, "service")
        host = last(query, "host")
        shown = []
        for row in rows:
            if binary not in (None, row.binary) or (
                host is not None and host not in (row.host, service_queries.machine(row.host))
            ):
                continue
            one: dict[str, Any] = {
                "binary": row.binary,
                "host": row.host,
                "zone": self._core.settings.availability_zone,
                "status": "disabled" if row.disabled else "enabled",
                "state": "up" if row.is_up(now) else "down",
                "updated_at": iso_micros(row.seen_at),
                "disabled_reason": row.disabled_reason,
            }
            if row.binary == service_queries.VOLUME_SERVICE:
                one |= {"replication_status": "disabled", "active_backend_id": None, "frozen": row.frozen}
                if request.minor >= 49:
                    one["backend_state"] = one["state"]
            if request.minor >= 7:
                one["cluster"] = None
            shown.append(one)
        return {"services": shown}

    async def enable(self, request: Request) -> dict[str, Any]:
        """Enable a service."""
        return await self._set(request, False, None)

    async def disable(self, request: Request) -> dict[str, Any]:
        """Keep new volumes from a service."""
        return await self._set(request, True, None)

    async def disable_with_reason(self, request: Request) -> dict[str, Any]:
        """Keep new volumes from a service, and say why."""
        reason = (request.body.disabled_reason or "").strip()
        if not reason:
            raise Invalid("Invalid input for field/attribute disabled_reason: it is missing.")
        return await self._set(request, True, reason)

    async def _set(self, request: Request, disabled: bool, reason: str | None) -> dict[str, Any]:
        body: ServiceBody = request.body
        binary = body.binary or body.service
        if not binary:
            raise Invalid("Missing required element 'binary' in request body.")
        if not await self._core.database.write(service_queries.set_disabled, binary, body.host, disabled, reason):
            raise NotFound(f"Service {binary[:64]} on host {body.host[:64]} could not be found.")
        shown: dict[str, Any] = {
            "host": body.host,
            "service": binary,
            "binary": binary,
            "disabled": disabled,
            "status": "disabled" if disabled else "enabled",
        }
        return shown | ({"disabled_reason": reason} if reason else {})

    async def freeze(self, request: Request) -> None:
        """Keep all resources of a host as they are."""
        await self._set_frozen(request.body.host, True)

    async def thaw(self, request: Request) -> None:
        """Let the resources of a host be changed again."""
        await self._set_frozen(request.body.host, False)

    async def _set_frozen(self, host: str, frozen: bool) -> None:
        if not await self._core.database.write(service_queries.set_frozen, host.partition("#")[0], frozen):
            raise Invalid(f"There is no volume service on host {host[:64]}.")
