"""Tells what servers have read and written of their volumes; a periodic job of the whole cloud, with Nova's setting.

Hosts are asked, many at once, for the counters of those of their guests that have volumes. A host that does not answer,
or cannot measure its guests, is left out until the next run. Without a broker the job does
nothing.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from micronova.conductor.host_guests import HOSTS_AT_ONCE, HOSTS_PER_STEP, hosts_up
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.db import volume_usages
from micronova.notifications import resources
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.errors import MicronovaError, Unavailable

log = logging.getLogger(__name__)

NAME: Final = "volume_usage"
"""Of the job."""
SERVERS_AT_ONCE: Final = 100
"""Servers of a host in one question, and in one transaction."""
KEPT: Final = micros(90 * 86_400.0)
"""How long the counters of a volume that no server uses are kept."""


async def tell_volume_usage(dependencies: ConductorDependencies) -> None:
    """Send volume.usage for every volume of a server that runs."""
    engine = dependencies.engine
    if not dependencies.notifier.enabled:
        return
    hosts = await hosts_up(engine.database, engine.clock, dependencies.service_down_time)
    for start in range(0, len(hosts), HOSTS_PER_STEP):
        step = hosts[start : start + HOSTS_PER_STEP]
        servers = await engine.database.read(volume_usages.servers_with_volumes, step)
        waiting = iter(servers.items())
        workers = [_tell_of(dependencies, waiting) for _ in range(min(HOSTS_AT_ONCE, len(servers)))]
        for error in await asyncio.gather(*workers, return_exceptions=True):  # none goes on beside the next run
            if error is not None:
                raise error
    while await engine.database.write(volume_usages.purge, engine.now() - KEPT) == volume_usages.BATCH:
        pass


async def _tell_of(dependencies: ConductorDependencies, waiting: Iterator[tuple[str, list[str]]]) -> None:
    for host, uuids in waiting:
        for start in range(0, len(uuids), SERVERS_AT_ONCE):
            try:
                answered = await _tell_of_host(dependencies, host, uuids[start : start + SERVERS_AT_ONCE])
            except BaseException:
                for _ in waiting:  # the others end with the hosts that they have
                    pass
                raise
            if not answered:
                break


async def _tell_of_host(dependencies: ConductorDependencies, host: str, uuids: Sequence[str]) -> bool:
    """Return whether the host has answered."""
    engine, notifier = dependencies.engine, dependencies.notifier
    try:
        found = await dependencies.compute.get_volume_statistics(Context(), host, uuids)
    except MicronovaError as error:
        log.warning("host %s does not say how its servers use their volumes; it is asked again later: %s", host, error)
        return False
    measured = {uuid: found[uuid] for uuid in uuids if found.get(uuid)}
    if not measured:
        return True
    try:
        usages = await engine.database.write(volume_usages.record, host, measured, engine.now())
    except Unavailable:
        raise
    except Exception:  # a stolen host can answer what no database takes: it must not end the run for others
        log.exception("what host %s says of the volumes of its servers could not be recorded", host)
        return True
    for usage in usages:
        await notifier.wait_for_room()
        notifier.announce(Context(), partial(resources.volume_usage, usage, host))
    return True
