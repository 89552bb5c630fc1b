"""The versions of the API: the documents that clients read to find them.

The documents need no token. The API's resources are below /v3 and /v3/PROJECT.
"""

from typing import Any, Final

from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import Versions

LEAST, NEWEST = 0, 71  # the minor numbers of our microversions
VERSIONS: Final = Versions("volume", 3, LEAST, NEWEST)


def _document(request: Request) -> dict[str, Any]:
    root = request.base_url.removesuffix(request.service.prefix)
    return {
        "id": "v3.0",
        "status": "CURRENT",
        "version": f"3.{NEWEST}",
        "min_version": f"3.{LEAST}",
        "updated": "2023-08-31T00:00:00Z",
        "links": [
            {"rel": "describedby", "type": "text/html", "href": "https://docs.openstack.org/"},
            {"rel": "self", "href": f"{root}/v3/"},
        ],
        "media-types": [{"base": "application/json", "type": "application/vnd.openstack.volume+json;version=3"}],
    }


async def index(request: Request) -> dict[str, Any]:
    """List the versions."""
    return {"versions": [_document(request)]}


def root_routes() -> list[Route]:
    """Declare the routes above the versions, for a service without prefix and microversions."""
    return [Route(method="GET", path="", handler=index, policy=None, status=300)]


def routes() -> list[Route]:
    """Declare the route of /v3 itself."""
    return [Route(method="GET", path="", handler=index, policy=None)]
