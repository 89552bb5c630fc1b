"""The services that operators know from Cinder, availability zones, pools, capabilities, hosts' state, and extensions.

The process that serves the API also does the work of Cinder's scheduler, volume and backup services. Each host with the
role has a row for each of them, with what an operator has set.
"""

from typing import Any, Final

from micronova.embedded.common.query import last
from micronova.embedded.volume.api.attachments import FILTERS as ATTACHMENT_FILTERS
from micronova.embedded.volume.api.backups import FILTERS as BACKUP_FILTERS
from micronova.embedded.volume.api.listing import RULES
from micronova.embedded.volume.api.request_bodies import Body, Text
from micronova.embedded.volume.api.snapshots import FILTERS as SNAPSHOT_FILTERS
from micronova.embedded.volume.api.volumes import FILTERS as VOLUME_FILTERS
from micronova.embedded.volume.backend.capabilities import BACKEND, CAPABILITIES, satisfy
from micronova.embedded.volume.backend.files import Files
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.model import GIB
from micronova.embedded.volume.store import host_queries, service_queries, type_queries
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import AUTHENTICATED, Route
from micronova.http.versions import since
from micronova.objects.errors import Invalid, NotFound

_ABOUT: Final = ("vendor_name", "volume_backend_name", "driver_version", "storage_protocol", "pool_name")
_FILTERS: Final = {
    "volume": sorted({*VOLUME_FILTERS, "created_at", "updated_at", "consumes_quota"}),
    "snapshot": sorted({*SNAPSHOT_FILTERS, "consumes_quota"}),
    "backup": sorted(BACKUP_FILTERS),
    "attachment": sorted(ATTACHMENT_FILTERS),
    "message": ["event_id", "message_level", "request_id", "resource_type", "resource_uuid"],
    "pool": ["name", "volume_type"],
    "volume_type": ["extra_specs", "is_public"],
}


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
    """The handlers."""

    def __init__(self, core: Core, files: Files) -> None:
        self._core = core
        self._files = files

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
            Route(method="GET", path="/os-availability-zone", handler=self.zones, policy=AUTHENTICATED),
            Route(
                method="GET",
                path="/scheduler-stats/get_pools",
                handler=self.pools,
                policy="scheduler_extension:scheduler_stats:get_pools",
            ),
            Route(
                method="GET",
                path="/capabilities/{backend}",
                handler=self.capabilities,
                policy="volume_extension:capabilities",
            ),
            Route(
                method="GET",
                path="/resource_filters",
                handler=self.filters,
                policy=AUTHENTICATED,
                versions=since(33),
            ),
            Route(method="GET", path="/extensions", handler=self.extensions, policy=AUTHENTICATED),
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

    async def zones(self, request: Request) -> dict[str, Any]:
        """List availability zones."""
        rows = await self._core.database.read(service_queries.rows)
        now = self._core.now()
        up = any(row.binary == service_queries.VOLUME_SERVICE and not row.disabled and row.is_up(now) for row in rows)
        zone = {"zoneName": self._core.settings.availability_zone, "zoneState": {"available": up}}
        return {"availabilityZoneInfo": [zone]}

    async def pools(self, request: Request) -> dict[str, Any]:
        """Show the back end as the pool that it is."""
        text = last(request.raw_query, "detail")
        name = f"{self._core.host}#{BACKEND}"
        wanted = last(request.raw_query, "name") if request.minor >= 28 else None
        if wanted not in (None, name) or not await self._takes_type(request):
            return {"pools": []}
        shown: dict[str, Any] = {"name": name}
        if text is not None and (text == "" or RULES.boolean("detail", text)):
            total, free = await self._files.free()
            allocated = await self._core.database.read(host_queries.allocated, self._core.host)
            shown["capabilities"] = {
                **CAPABILITIES,
                "timestamp": iso_micros(self._core.now()),
                "total_capacity_gb": round(total / GIB, 2),
                "free_capacity_gb": round(free / GIB, 2),
                "allocated_capacity_gb": allocated,
                "provisioned_capacity_gb": allocated,
                "max_over_subscription_ratio": "auto",
                "reserved_percentage": 0,
                "location_info": None,
                "backend_state": "up",
            }
        return {"pools": [shown]}

    async def _takes_type(self, request: Request) -> bool:
        """Return whether the back end takes volumes of the type that a request for pools names; raise NotFound."""
        named = last(request.raw_query, "volume_type") if request.minor >= 35 else None
        if named is None:
            return True
        context = request.context
        found = await self._core.database.read(type_queries.usable, named, context.project_id, context.is_admin)
        if found is None:
            raise NotFound(f"Volume type {named[:64]} could not be found.")
        return satisfy(found.extra_specs)

    async def capabilities(self, request: Request, backend: str) -> dict[str, Any]:
        """Say what the back end of a host can do."""
        if backend not in (self._core.host, f"{self._core.host}#{BACKEND}"):
            raise NotFound(f"Capabilities of backend {backend[:64]} could not be found.")
        return {
            "namespace": f"OS::Storage::Capabilities::{self._core.host}",
            **{name: CAPABILITIES[name] for name in _ABOUT},
            "display_name": None,
            "description": None,
            "visibility": None,
            "replication_targets": [],
            "properties": {},
        }

    async def filters(self, request: Request) -> dict[str, Any]:
        """List the filters of lists."""
        wanted = last(request.raw_query, "resource")
        return {
            "resource_filters": [
                {"resource": resource, "filters": names}
                for resource, names in _FILTERS.items()
                if wanted in (None, resource)
            ]
        }

    async def extensions(self, request: Request) -> dict[str, Any]:
        """List the extensions of the API, all of which have become part of it."""
        return {"extensions": [{"alias": alias, "name": name, **_EXTENSION} for alias, name in EXTENSIONS.items()]}


_EXTENSION: Final = {"description": "", "links": [], "updated": "2013-01-01T00:00:00+00:00"}
EXTENSIONS: Final = {
    "os-admin-actions": "AdminActions",
    "os-availability-zone": "AvailabilityZones",
    "backups": "Backups",
    "capabilities": "Capabilities",
    "os-extended-snapshot-attributes": "ExtendedSnapshotAttributes",
    "os-hosts": "Hosts",
    "qos-specs": "Qos_specs_manage",
    "os-quota-class-sets": "QuotaClasses",
    "os-quota-sets": "Quotas",
    "scheduler-stats": "Scheduler_stats",
    "os-services": "Services",
    "os-types-extra-specs": "TypesExtraSpecs",
    "os-types-manage": "TypesManage",
    "os-used-limits": "UsedLimits",
    "os-volume-actions": "VolumeActions",
    "os-vol-host-attr": "VolumeHostAttribute",
    "os-vol-image-meta": "VolumeImageMetadata",
    "os-vol-mig-status-attr": "VolumeMigStatusAttribute",
    "os-vol-tenant-attr": "VolumeTenantAttribute",
    "os-volume-transfer": "VolumeTransfer",
    "encryption": "VolumeTypeEncryption",
    "os-volume-type-access": "VolumeTypeAccess",
}
