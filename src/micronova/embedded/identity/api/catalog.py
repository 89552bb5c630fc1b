"""/v3/regions, /v3/services and /v3/endpoints: the contents of the catalog."""

from typing import Any

from msgspec import Struct

from micronova.embedded.identity import attributes
from micronova.embedded.identity.api import views
from micronova.embedded.identity.api.common import V3, collection, page, route
from micronova.embedded.identity.attributes import (
    INTERFACES,
    EndpointAttributes,
    EndpointChanges,
    RegionAttributes,
    RegionChanges,
    ServiceAttributes,
    ServiceChanges,
)
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import catalog
from micronova.embedded.identity.store.kinds import ENDPOINTS, REGIONS, SERVICES
from micronova.http.request import Request
from micronova.http.service import Handler, Route
from micronova.objects.errors import Invalid


class RegionBody(Struct):
    """A body that holds a region."""

    region: dict[str, Any]


class ServiceBody(Struct):
    """A body that holds a service."""

    service: dict[str, Any]


class EndpointBody(Struct):
    """A body that holds an endpoint."""

    endpoint: dict[str, Any]


def _routes(
    noun: str,
    body: type[Struct],
    index: Handler,
    create: Handler,
    show: Handler,
    update: Handler,
    delete: Handler,
) -> list[Route]:
    path, one = f"{V3}/{noun}s", f"{V3}/{noun}s/{{{noun}_id}}"
    return [
        route("GET", path, index, f"list_{noun}s"),
        route("POST", path, create, f"create_{noun}", status=201, body=body),
        route("GET", one, show, f"get_{noun}"),
        route("PATCH", one, update, f"update_{noun}", body=body),
        route("DELETE", one, delete, f"delete_{noun}", status=204),
    ]


class RegionsAPI:
    """Regions."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        one = f"{V3}/regions/{{region_id}}"
        return [
            *_routes("region", RegionBody, self.index, self.create, self.show, self.update, self.delete),
            route("PUT", one, self.put, "create_region", status=201, body=RegionBody),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List regions."""
        listed = await self._core.database.read(catalog.list_regions, request.raw_query, page(request))
        return collection(request, "regions", [views.region(request, row) for row in listed.rows], listed)

    async def show(self, request: Request, region_id: str) -> dict[str, Any]:
        """Show a region."""
        return {"region": views.region(request, await self._core.database.read(REGIONS.get, region_id))}

    async def create(self, request: Request) -> dict[str, Any]:
        """Create a region; the body may contain its id."""
        wanted, extra = attributes.read(request.body.region, RegionAttributes, "region")
        return await self._make(request, wanted.id or self._core.new_id(), wanted, extra)

    async def put(self, request: Request, region_id: str) -> dict[str, Any]:
        """Create a region with the id in the path."""
        wanted, extra = attributes.read({"id": region_id, **request.body.region}, RegionAttributes, "region")
        if wanted.id != region_id:
            raise Invalid("Invalid input for field/attribute region.id: the path says another id.")
        return await self._make(request, region_id, wanted, extra)

    async def _make(
        self, request: Request, region_id: str, wanted: RegionAttributes, extra: dict[str, Any]
    ) -> dict[str, Any]:
        row = await self._core.write(catalog.create_region, region_id, wanted, extra, self._core.now())
        return {"region": views.region(request, row)}

    async def update(self, request: Request, region_id: str) -> dict[str, Any]:
        """Change a region."""
        wanted, extra = attributes.changes(request.body.region, RegionChanges, "region")
        row = await self._core.write(catalog.change_region, region_id, wanted, extra)
        return {"region": views.region(request, row)}

    async def delete(self, request: Request, region_id: str) -> None:
        """Delete a region."""
        await self._core.write(catalog.delete_region, region_id)


class ServicesAPI:
    """Services of the catalog."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        return _routes("service", ServiceBody, self.index, self.create, self.show, self.update, self.delete)

    async def index(self, request: Request) -> dict[str, Any]:
        """List services."""
        listed = await self._core.database.read(catalog.list_services, request.raw_query, page(request))
        return collection(request, "services", [views.service(request, row) for row in listed.rows], listed)

    async def show(self, request: Request, service_id: str) -> dict[str, Any]:
        """Show a service."""
        return {"service": views.service(request, await self._core.database.read(SERVICES.get, service_id))}

    async def create(self, request: Request) -> dict[str, Any]:
        """Create a service."""
        wanted, extra = attributes.read(request.body.service, ServiceAttributes, "service")
        row = await self._core.write(catalog.create_service, self._core.new_id(), wanted, extra, self._core.now())
        return {"service": views.service(request, row)}

    async def update(self, request: Request, service_id: str) -> dict[str, Any]:
        """Change a service."""
        wanted, extra = attributes.changes(request.body.service, ServiceChanges, "service")
        row = await self._core.write(catalog.change_service, service_id, wanted, extra)
        return {"service": views.service(request, row)}

    async def delete(self, request: Request, service_id: str) -> None:
        """Delete a service with its endpoints."""
        await self._core.write(catalog.delete_service, service_id)


class EndpointsAPI:
    """Endpoints."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        return _routes("endpoint", EndpointBody, self.index, self.create, self.show, self.update, self.delete)

    async def index(self, request: Request) -> dict[str, Any]:
        """List endpoints."""
        interface = request.raw_query.get("interface", ["public"])[-1]
        if interface not in INTERFACES:
            raise Invalid(f"Invalid input for query parameter interface: it is one of {', '.join(INTERFACES)}.")
        listed = await self._core.database.read(catalog.list_endpoints, request.raw_query, page(request))
        return collection(
            request, "endpoints", [views.endpoint(self._core, request, row) for row in listed.rows], listed
        )

    async def show(self, request: Request, endpoint_id: str) -> dict[str, Any]:
        """Show an endpoint."""
        return {
            "endpoint": views.endpoint(self._core, request, await self._core.database.read(ENDPOINTS.get, endpoint_id))
        }

    async def create(self, request: Request) -> dict[str, Any]:
        """Create an endpoint."""
        wanted, extra = attributes.read(request.body.endpoint, EndpointAttributes, "endpoint")
        row = await self._core.write(catalog.create_endpoint, self._core.new_id(), wanted, extra, self._core.now())
        return {"endpoint": views.endpoint(self._core, request, row)}

    async def update(self, request: Request, endpoint_id: str) -> dict[str, Any]:
        """Change an endpoint."""
        wanted, extra = attributes.changes(request.body.endpoint, EndpointChanges, "endpoint")
        row = await self._core.write(catalog.change_endpoint, endpoint_id, wanted, extra, self._core.now())
        return {"endpoint": views.endpoint(self._core, request, row)}

    async def delete(self, request: Request, endpoint_id: str) -> None:
        """Delete an endpoint."""
        await self._core.write(catalog.delete_endpoint, endpoint_id)
