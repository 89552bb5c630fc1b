"""Reads the interfaces of servers anew from the network service; a periodic job of the whole cloud.

The network service tells compute by events when a port changes, and compute keeps what it shows. An event that was
lost, or that a network service does not send, leaves old addresses. With `heal_instance_info_cache_interval` servers
are compared with their ports, some at each run, in the order of their ids; the next run continues after them, on
whatever conductor. A run ends early while the network service does not answer. A server on which something is being
done is left to the next round.
"""

import logging

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.db import instances, network_info, periodic_jobs, services
from micronova.objects.errors import MicronovaError, Unavailable
from micronova.objects.service_names import COMPUTE

log = logging.getLogger(__name__)

NAME = "heal_network_info"
"""Of the job."""
LEAST, MOST = 100, 1000
"""Servers that one run reads: one for each host that is up, within these limits."""
GIVES_UP = 3
"""Servers in a row for which the network service does not answer: the run ends, and the next continues after them."""


async def heal_network_info(dependencies: ConductorDependencies) -> None:
    """Read the interfaces of the next servers."""
    engine = dependencies.engine
    if dependencies.network_client is None:
        return
    up = await engine.database.read(services.count_up, COMPUTE, engine.now(), dependencies.service_down_time)
    left, failures = min(max(LEAST, up), MOST), 0
    after = await engine.database.read(periodic_jobs.place, NAME)
    while left > 0:
        wanted = min(left, LEAST)
        rows = await engine.database.read(instances.at_rest_after, after, wanted)
        left -= wanted
        after = ""
        for number, row in enumerate(rows, start=1):
            failures = 0 if await _heal(dependencies, row) else failures + 1
            if failures == GIVES_UP or number == wanted:
                after = row["uuid"]
                break
        await engine.database.write(periodic_jobs.keep_place, NAME, after)
        if failures == GIVES_UP:
            log.warning("no interfaces are read before the next run: the network service does not answer")
            return
        if not after:
            return


async def _heal(dependencies: ConductorDependencies, row: instances.InterfacesRow) -> bool:
    """Return whether the network service has answered."""
    client, engine = dependencies.network_client, dependencies.engine
    assert client is not None
    uuid = row["uuid"]
    try:
        found = await client.network_info(uuid)
        groups = await client.security_groups.names_of(uuid)
    except MicronovaError as error:
        log.warning("the interfaces of server %s could not be read; they are read again later: %s", uuid, error)
        return not isinstance(error, Unavailable)
    if not network_info.differences(row, found, groups):
        return True  # without a lock, as for most servers
    written = await engine.database.write(network_info.record, uuid, row["updated_at"], found, groups, engine.now())
    if written == "changed":
        log.info("the recorded interfaces of server %s differed from the network service and were replaced", uuid)
    return True
