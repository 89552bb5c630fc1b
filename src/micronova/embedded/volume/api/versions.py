"""The versions of the API: the documents that clients read to find them, and the paths below which they are.

The documents need no token. The API's resources are below /v3 and /v3/PROJECT.
"""

from collections.abc import Sequence
from typing import Any, Final

from micronova.http.asgi import App, Receive, Scope, Send
from micronova.http.mount import below_project
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


def dispatch(api: App, version_documents: App, routes: Sequence[Route]) -> App:
    """Return the application that is mounted at /volume; `below_project` says what is taken for a project."""
    resources = frozenset(route.path.split("/")[1] for route in routes if route.path)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        version, _, rest = scope["path"].lstrip("/").partition("/")
        if version != "v3":
            await version_documents(scope, receive, send)
            return
        inner = dict(scope)
        inner["micronova.path"] = scope["path"]  # as the client wrote it, which access rules are about
        project, rest = below_project(rest, resources)
        if project:
            inner["micronova.project"] = project
        inner["path"] = f"/v3/{rest}" if rest else "/v3"
        await api(inner, receive, send)

    return app
