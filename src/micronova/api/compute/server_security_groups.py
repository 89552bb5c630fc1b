"""The security groups of servers, in the form that they had before Neutron."""

from typing import Any

from micronova.api.compute import security_group_views as views
from micronova.api.compute.networks import network_service
from micronova.api.compute.server_lookup import authorized_server
from micronova.api.inputs import STRICT, NoQuery
from micronova.clients.network.client import NetworkClient
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.servers.security_groups import ServerSecurityGroups


class SecurityGroupHandlers:
    """The handlers."""

    def __init__(self, database: Database, groups: ServerSecurityGroups, network_client: NetworkClient | None) -> None:
        self._database = database
        self._groups = groups
        self._network_client = network_client

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """List the groups of a server."""
        row = await authorized_server(self._database, request, id)
        found = await self._groups.list_(request.context, row)
        known = await views.sources(network_service(self._network_client, request), found)
        return {"security_groups": [views.shown(group, known) for group in found]}


def routes(database: Database, groups: ServerSecurityGroups, network_client: NetworkClient | None) -> list[Route]:
    """Declare the routes."""
    handlers = SecurityGroupHandlers(database, groups, network_client)
    return [
        Route(
            method="GET", path="/servers/{id}/os-security-groups", handler=handlers.index,
            policy="os_compute_api:os-security-groups:list", checks_policy=True, query=NoQuery, strict_query=STRICT,
            answer={"security_groups": [views.GROUP]}, errors=(501,),
        )
    ]  # fmt: skip
