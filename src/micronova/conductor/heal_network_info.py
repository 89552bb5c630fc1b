"""Reads the interfaces of servers anew from the network service; a periodic job of the whole cloud.

The network service tells compute by events when a port changes, and compute keeps what it shows. An event that was
lost, or that a network service does not send, leaves old addresses. With `heal_instance_info_cache_interval` servers
are compared with their ports, some at each run, in the order of their ids; each conductor goes on from where its own
last run ended. A run ends early while the network service does not answer. A server on which something is being done
is left to the next round.
"""

import logging

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.db import instances, network_info, services
from micronova.objects.errors import MicronovaError, Unavailable
from micronova.objects.instance import InstanceRow
from micronova.objects.service_names import COMPUTE

log = logging.getLogger(__name__)

LEAST, MOST = 100, 1000
"""Servers that one run reads: one for each host that is up, but at least and at most so many."""
GIVES_UP = 3
"""Servers in a row for which the network service does not answer: the run ends, and the next goes on behind them."""


class NetworkInfoHealing:
    """Goes through the servers, again and again."""

    def __init__(self, dependencies: ConductorDependencies) -> None:
        self._dependencies = dependencies
        self._after = ""  # the id of the last server of the run before

    async def run(self) -> None:
        """Read the interfaces of the next servers."""
        client, engine = self._dependencies.network_client, self._dependencies.engine
        if client is None:
            return
        up = await engine.database.read(services.count_up, COMPUTE, engine.now(), self._dependencies.service_down_time)
        limit = min(max(LEAST, up), MOST)
        rows = await engine.database.read(instances.at_rest_after, self._after, limit)
        failures = 0
        for row in rows:
            self._after = row["uuid"]
            failures = 0 if await self._heal(row) else failures + 1
            if failures == GIVES_UP:
                log.warning("no interfaces are read before the next run: the network service does not answer")
                return
        if len(rows) < limit:
            self._after = ""

    async def _heal(self, row: InstanceRow) -> bool:
        """Return whether the network service has answered."""
        client, engine = self._dependencies.network_client, self._dependencies.engine
        assert client is not None
        uuid = row["uuid"]
        try:
            found = await client.network_info(uuid)
            groups = await client.security_groups.names_of(uuid)
        except MicronovaError as error:
            log.warning("the interfaces of server %s could not be read; they are read again later: %s", uuid, error)
            return not isinstance(error, Unavailable)
        written = await engine.database.write(network_info.record, uuid, row["updated_at"], found, groups, engine.now())
        if written == "changed":
            log.info("the recorded interfaces of server %s differed from the network service and were replaced", uuid)
        return True
