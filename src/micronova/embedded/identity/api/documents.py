"""Version documents."""

from typing import Any

from micronova.embedded.identity.api.common import V3
from micronova.http.request import Request, Response
from micronova.http.service import Route

VERSION = "v3.14"


class DocumentsAPI:
    """Version documents."""

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(method="GET", path="/", handler=self.versions, policy=None, status=300),
            Route(method="GET", path=V3, handler=self.version, policy=None),
        ]

    def _version(self, request: Request) -> dict[str, Any]:
        return {
            "id": VERSION,
            "status": "stable",
            "updated": "2020-04-07T00:00:00Z",
            "links": [{"rel": "self", "href": f"{request.base_url}{V3}/"}],
            "media-types": [{"base": "application/json", "type": "application/vnd.openstack.identity-v3+json"}],
        }

    async def versions(self, request: Request) -> Response:
        """Return the list of versions, which contains one."""
        body = {"versions": {"values": [self._version(request)]}}
        return Response(body=body, headers={"location": f"{request.base_url}{V3}/", "vary": "X-Auth-Token"})

    async def version(self, request: Request) -> Response:
        """Return the version document of v3."""
        return Response(body={"version": self._version(request)}, headers={"vary": "X-Auth-Token"})
