"""The addresses of servers, by network."""

from functools import partial
from typing import Any

from micronova.api import inputs
from micronova.api.compute.server_lookup import authorized_server
from micronova.api.compute.server_views import plain_addresses
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import NotFound


def routes(database: Database) -> list[Route]:
    """Declare the routes of addresses."""

    async def index(request: Request, id: str) -> dict[str, Any]:
        """List a server's addresses."""
        return {"addresses": plain_addresses(await authorized_server(database, request, id))}

    async def show(request: Request, id: str, label: str) -> dict[str, Any]:
        """List a server's addresses in one network."""
        found = plain_addresses(await authorized_server(database, request, id))
        if label not in found:
            raise NotFound(f"Instance is not a member of network {label[:64]}")
        return {label: found[label]}

    path, rule = "/servers/{id}/ips", "os_compute_api:ips"
    addresses = [{"version": int, "addr": str}]
    route = partial(Route, method="GET", checks_policy=True, query=inputs.NoQuery, strict_query=inputs.STRICT)
    return [
        route(path=path, handler=index, policy=f"{rule}:index", answer={"addresses": {"*": addresses}}),
        route(path=f"{path}/{{label}}", handler=show, policy=f"{rule}:show", answer={"*": addresses}),
    ]
