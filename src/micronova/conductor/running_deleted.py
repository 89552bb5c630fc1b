"""Finds guests of servers that are deleted; a periodic job of the whole cloud, with Nova's settings.

A delete removes the guest, or leaves a record by which its host removes the guest when it is back. But a guest can
return: a host is restored from a backup, or its service was deleted, with those records, before it came back. Here
conductors ask the hosts which guests they have. For one whose server is among the deleted ones, and which is not newer
than that, "reap" leaves such a record again, and "shutdown" lets the host switch it off. A guest of a server that the
database does not know stays: `micronova audit` lists it.
"""

import logging
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from micronova.conductor.host_guests import HOSTS_PER_STEP, guests_of_all, hosts_up, no_progress
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.db import departures, instances
from micronova.objects import power_state
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.errors import MicronovaError, Unavailable
from micronova.objects.orders import Guest

log = logging.getLogger(__name__)

NAME = "running_deleted"
_THEN = {
    "reap": "it is removed",
    "shutdown": "it is switched off",
    "log": "destroy it by hand, or set running_deleted_instance_action",
}
_TO_STOP = frozenset({power_state.RUNNING, power_state.PAUSED})
_REQUEST = "req-running-deleted"
SERVERS_AT_ONCE = 1000
"""Guests whose servers are looked up in one statement."""


async def find_running_deleted(dependencies: ConductorDependencies, timeout: float, action: str) -> None:
    """Log the guests of servers that were deleted more than `timeout` seconds ago.

    With the action "reap" hosts remove them, with "shutdown" hosts switch them off.
    """
    engine = dependencies.engine
    before = engine.now() - micros(timeout)  # of what is deleted from now on, the guests may go at any moment
    hosts = await hosts_up(engine.database, engine.clock, dependencies.service_down_time)
    for start in range(0, len(hosts), HOSTS_PER_STEP):  # not the guests of all hosts at once
        answers = await guests_of_all(dependencies.compute, hosts[start : start + HOSTS_PER_STEP], no_progress)
        for host, guests in answers.items():
            if isinstance(guests, str):
                log.warning("host %s does not say which guests it has; it is asked again later: %s", host, guests)
                continue
            try:
                await _look_at(dependencies, host, guests, before, action)
            except Unavailable:
                raise
            except Exception:  # a stolen host can answer what no database takes: it must not protect other hosts
                log.exception("the guests of host %s could not be compared with the deleted servers", host)


async def _look_at(
    dependencies: ConductorDependencies, host: str, guests: Sequence[Guest], before: int, action: str
) -> None:
    """Do that for the guests of one host."""
    engine = dependencies.engine
    held = {guest.uuid: guest for guest in guests}
    ids = list(held)
    for start in range(0, len(ids), SERVERS_AT_ONCE):
        part = {id: held[id] for id in ids[start : start + SERVERS_AT_ONCE]}
        found = await engine.database.read(_deleted, host, part, before)
        for uuid, epoch in found.items():
            if action == "shutdown" and held[uuid].power_state not in _TO_STOP:
                continue  # it is off already
            log.warning("host %s has a guest of server %s, which is deleted: %s", host, uuid, _THEN[action])
            if action == "reap":
                await engine.database.write(departures.record, host, uuid, epoch, engine.now())
            elif action == "shutdown":
                try:
                    await dependencies.compute.stop_guest(Context(request_id=_REQUEST), host, uuid, epoch)
                except MicronovaError as error:
                    log.warning("host %s did not switch it off, and is asked again later: %s", host, error)
                    return


def _deleted(conn: sa.Connection, host: str, held: Mapping[str, Guest], before: int) -> dict[str, int]:
    """Return those guests, with their epochs, whose servers were deleted before, and that have no order to go."""
    leaving = {row["instance_uuid"] for row in departures.of_hosts(conn, [host])}
    return {
        uuid: held[uuid].epoch
        for uuid, epoch in instances.deleted_before(conn, held, before).items()
        if uuid not in leaving and held[uuid].epoch <= epoch
    }
