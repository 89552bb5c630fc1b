"""What clients ask of the service as a whole: availability zones, pools, capabilities, filters of lists, extensions."""

from typing import Any, Final

from micronova.embedded.common.query import last
from micronova.embedded.volume.api import attachments, backups, messages, snapshots, volumes
from micronova.embedded.volume.api.listing import QUERY_RULES
from micronova.embedded.volume.backend.capabilities import BACKEND, CAPABILITIES, satisfy
from micronova.embedded.volume.backend.files import Files
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.model import GIB
from micronova.embedded.volume.store import host_queries, service_queries, type_queries
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import AUTHENTICATED, Route
from micronova.http.versions import since
from micronova.objects.errors import NotFound

_ABOUT: Final = ("vendor_name", "volume_backend_name", "driver_version", "storage_protocol", "pool_name")
_FILTERS: Final = {
    "volume": sorted({*volumes.FILTERS, *volumes.FILTERS_SINCE}),
    "snapshot": sorted({*snapshots.FILTERS, *snapshots.FILTERS_SINCE}),
    "backup": sorted(backups.FILTERS),
    "attachment": sorted(attachments.FILTERS),
    "message": sorted(messages.FILTERS),
    "pool": ["name", "volume_type"],
    "volume_type": ["extra_specs", "is_public"],
}


class ServiceInfoHandlers:
    """The handlers of these routes."""

    def __init__(self, core: Core, files: Files) -> None:
        self._core = core
        self._files = files

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
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

    async def zones(self, request: Request) -> dict[str, Any]:
        """List availability zones."""
        rows = await self._core.database.read(service_queries.rows)
        now = self._core.now()
        up = any(row.binary == service_queries.VOLUME_SERVICE and not row.disabled and row.is_up(now) for row in rows)
        zone = {"zoneName": self._core.settings.availability_zone, "zoneState": {"available": up}}
        return {"availabilityZoneInfo": [zone]}

    async def pools(self, request: Request) -> dict[str, Any]:
        """Show the only pool, which is the back end."""
        text = last(request.raw_query, "detail")
        name = f"{self._core.host}#{BACKEND}"
        wanted = last(request.raw_query, "name") if request.minor >= 28 else None
        if wanted not in (None, name) or not await self._takes_type(request):
            return {"pools": []}
        shown: dict[str, Any] = {"name": name}
        if text is not None and (text == "" or QUERY_RULES.boolean("detail", text)):
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
        """Show what the back end of a host can do."""
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
