"""Version documents, resources, extensions, availability zones and service providers: documents without rows."""

from collections.abc import Sequence
from typing import Any

from micronova.embedded.network.core import Core
from micronova.embedded.network.extensions import EXTENSIONS
from micronova.embedded.network.listing import filters_of, unknown_filter
from micronova.embedded.network.routing import checked_route
from micronova.http.request import Request
from micronova.http.service import AUTHENTICATED, Route
from micronova.objects.errors import NotFound


class Documents:
    """Version documents, extensions, availability zones."""

    def __init__(self, core: Core, resources: Sequence[tuple[str, str]]) -> None:
        """`resources` are the names of resources, each with that of its collection in paths."""
        self.core = core
        self._resources = resources

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(method="GET", path="/", handler=self.versions, policy=None),
            Route(method="GET", path="/v2.0", handler=self.resources, policy=AUTHENTICATED),
            Route(method="GET", path="/v2.0/extensions", handler=self.extensions, policy=AUTHENTICATED),
            Route(method="GET", path="/v2.0/extensions/{alias}", handler=self.extension, policy=AUTHENTICATED),
            checked_route("GET", "/v2.0/availability_zones", self.zones, "get_availability_zone"),
            checked_route("GET", "/v2.0/service-providers", self.providers, "get_service_provider"),
        ]

    async def versions(self, request: Request) -> dict[str, Any]:
        """GET /: the version."""
        link = {"rel": "self", "href": f"{request.base_url}/v2.0/"}
        return {"versions": [{"id": "v2.0", "status": "CURRENT", "links": [link]}]}

    async def resources(self, request: Request) -> dict[str, Any]:
        """GET /v2.0: the URLs of the collections."""
        return {
            "resources": [
                {
                    "name": name,
                    "collection": collection,
                    "links": [{"rel": "self", "href": f"{request.base_url}/v2.0/{collection}"}],
                }
                for name, collection in self._resources
            ]
        }

    async def extensions(self, request: Request) -> dict[str, Any]:
        """GET /v2.0/extensions."""
        return {"extensions": [_extension(alias) for alias in EXTENSIONS]}

    async def extension(self, request: Request, alias: str) -> dict[str, Any]:
        """GET /v2.0/extensions/{alias}."""
        if alias not in EXTENSIONS:
            raise NotFound(f"Extensions not found: {alias[:64]}.", type="ExtensionsNotFound")
        return {"extension": _extension(alias)}

    async def zones(self, request: Request) -> dict[str, Any]:
        """GET /v2.0/availability_zones: one for networks and one for routers."""
        request.authorize({})
        name = self.core.settings.availability_zone
        found = [{"name": name, "resource": kind, "state": "available"} for kind in ("network", "router")]
        for filter_, values in filters_of(request.raw_query).items():
            if filter_ not in ("name", "resource", "state"):
                raise unknown_filter(filter_)
            found = [zone for zone in found if zone[filter_] in values]
        return {"availability_zones": found}

    async def providers(self, request: Request) -> dict[str, Any]:
        """GET /v2.0/service-providers: none."""
        request.authorize({})
        return {"service_providers": []}


def _extension(alias: str) -> dict[str, Any]:
    return {
        "alias": alias,
        "name": EXTENSIONS[alias][0],
        "description": EXTENSIONS[alias][1],
        "updated": "2026-01-01T00:00:00-00:00",
        "links": [],
    }
