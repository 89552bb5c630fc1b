"""The security groups of servers that exist: those of their ports."""

from typing import Any

from micronova.clients.network.client import NetworkClient
from micronova.clients.network.security_groups import SecurityGroups
from micronova.db import instances
from micronova.db.engine import Database
from micronova.objects.clock import Clock, micros
from micronova.objects.context import RequestContext
from micronova.objects.errors import NotSupported
from micronova.objects.instance import InstanceRow


class ServerSecurityGroups:
    """Lists, adds and removes security groups of servers."""

    def __init__(self, *, database: Database, clock: Clock, network_client: NetworkClient | None) -> None:
        self._database = database
        self._clock = clock
        self._network_client = network_client

    async def list_(self, context: RequestContext, row: InstanceRow) -> list[dict[str, Any]]:
        """Return the security groups of a server's ports, with their rules."""
        return await self._security_groups().of_server(row["uuid"], context.token)

    async def add(self, context: RequestContext, row: InstanceRow, group: str) -> None:
        """Add a group to all ports of a server; a running guest is subject to its rules at once."""
        names = await self._security_groups().add(row["uuid"], group, token=context.token, project_id=row["project_id"])
        await self._record(row["uuid"], names)

    async def remove(self, context: RequestContext, row: InstanceRow, group: str) -> None:
        """Remove a group from all ports of a server."""
        names = await self._security_groups().remove(
            row["uuid"], group, token=context.token, project_id=row["project_id"]
        )
        await self._record(row["uuid"], names)

    def _security_groups(self) -> SecurityGroups:
        if self._network_client is None:
            raise NotSupported("There is no network service, and so there are no security groups.")
        return self._network_client.security_groups

    async def _record(self, uuid: str, names: list[str]) -> None:
        """Record the groups that the server shows."""
        await self._database.write(instances.update, uuid, micros(self._clock.now()), {"security_groups": names})
