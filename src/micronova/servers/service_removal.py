"""The removal of services, with what belongs to a compute host: nodes, departures, its network agent, its queue."""

import logging
from functools import partial

import sqlalchemy as sa

from micronova.clients.network.client import NetworkClient
from micronova.compute.rpcapi import ComputeAPI
from micronova.db import aggregates, departures, nodes, server_migrations, services
from micronova.db.engine import Database
from micronova.db.services import ServiceRow
from micronova.db.tables import instances
from micronova.notifications import resources
from micronova.notifications.notifier import Announcer, NoNotifications
from micronova.objects.context import Context
from micronova.objects.errors import Conflict
from micronova.objects.service_names import COMPUTE
from micronova.rpc.errors import RpcError

log = logging.getLogger(__name__)


class ServiceRemoval:
    """Deletes services."""

    def __init__(
        self,
        *,
        database: Database,
        compute: ComputeAPI,
        network_client: NetworkClient | None,
        notifier: Announcer | None = None,
    ) -> None:
        self._database = database
        self._compute = compute
        self._network_client = network_client
        self._notifier: Announcer = notifier or NoNotifications()

    async def delete(self, key: str | int, context: Context | None = None) -> None:
        """Delete a service (by uuid or number); raise Conflict if it is a compute host with servers.

        What other services have goes first: if one does not answer, the request can be repeated. A host that lives
        registers again.
        """
        found = await self._database.read(_deletable, key)
        if found.binary == COMPUTE and self._network_client is not None:
            await self._network_client.delete_network_agents(found.host)
        await self._database.write(_delete, key)
        self._notifier.announce(context or Context(), partial(resources.service, "delete", found))
        if found.binary == COMPUTE:
            try:
                await self._compute.delete_queue(found.host)
            except RpcError as error:
                log.warning("the queue of the removed host %s stays; delete it at the broker: %s", found.host, error)


def _deletable(conn: sa.Connection, key: str | int) -> ServiceRow:
    found = services.get(conn, key)
    held = sa.select(instances.c.uuid).where(instances.c.host == found.host).limit(1)
    if found.binary == COMPUTE and (conn.execute(held).first() or server_migrations.any_on_host(conn, found.host)):
        raise Conflict(
            "Unable to delete compute service that is hosting instances. Migrate or delete the instances first."
        )
    return found


def _delete(conn: sa.Connection, key: str | int) -> None:
    found = _deletable(conn, key)
    if found.binary == COMPUTE:
        nodes.delete_of_host(conn, found.host)
        aggregates.forget_host(conn, found.host)
        departures.delete_of_host(conn, found.host)
    services.delete(conn, found.uuid)
