"""The paths under which clients reach the compute API."""

from collections.abc import Sequence

from micronova.http.asgi import App, Receive, Scope, Send
from micronova.http.mount import below_project
from micronova.http.service import Route


def dispatch(api: App, version_documents: App, routes: Sequence[Route]) -> App:
    """Return the application that is mounted at /compute.

    The API's resources are below /v2.1, /v2.1/PROJECT, /v2 and /v2/PROJECT; `below_project` says what is taken for a
    project. /v2 has the same resources with relaxed validation and without microversions. Paths above the versions go
    to the version documents.
    """
    resources = frozenset(route.path.split("/")[1] for route in routes if route.path)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        version, _, rest = scope["path"].lstrip("/").partition("/")
        if version not in ("v2", "v2.1"):
            await version_documents(scope, receive, send)
            return
        inner = dict(scope)
        inner["micronova.path"] = scope["path"]  # as the client wrote it, which access rules are about
        if version == "v2":
            inner["micronova.is_v2"] = True
        project, rest = below_project(rest, resources)
        if project:
            inner["micronova.project"] = project
        inner["path"] = f"/v2.1/{rest}" if rest else "/v2.1"
        await api(inner, receive, send)

    return app
