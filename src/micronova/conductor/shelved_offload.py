"""Takes servers from their hosts that have been shelved for `shelved_offload_time`; a periodic job of the whole cloud.

A run looks at some servers, in the order of their ids, and the next one continues after them.

A server that another operation changes, or that cannot leave, is left to the next run. Without its image it cannot
leave: no operation begins, so that its owner does not get a failed instance action in each run. The lock of a server
does not matter, as in Nova.
"""

import logging
from uuid import UUID

import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.made_images import COMPLETE, MadeImages
from micronova.conductor.own_requests import MOST_BEGUN, TOGETHER, accept_own, record_on
from micronova.db import instances, periodic_jobs
from micronova.objects import shelved, states
from micronova.objects.clock import micros
from micronova.objects.instance import InstanceRow
from micronova.objects.operations import Payload

log = logging.getLogger(__name__)

NAMESPACE = UUID("a4c1d3f0-52c4-4f57-9f0e-5b1c1f6e2d90")
"""Of the ids of these operations and requests, which follow from the instance and its epoch."""
NAME = "offload_shelved"
"""Of the job."""


async def offload_overdue(dependencies: ConductorDependencies, after: float) -> None:
    """Offload the servers that were shelved more than `after` seconds ago; raise Unavailable without image service."""
    engine, images = dependencies.engine, MadeImages(dependencies.image_client)
    before, last = engine.now() - micros(after), await engine.database.read(periodic_jobs.place, NAME)
    for _ in range(MOST_BEGUN // TOGETHER):
        found = await engine.database.read(instances.shelved_before, before, TOGETHER, after=last)
        rows = await engine.database.read(instances.get_many, found)
        leaving = [id for id, row in sorted(rows.items()) if await _may_leave(images, row)]
        if begun := await record_on(engine.database, leaving, _begin, dependencies, before):
            log.info("%d servers that have been shelved for more than %g s are offloaded", len(begun), after)
        last = found[-1] if len(found) == TOGETHER else ""
        await engine.database.write(periodic_jobs.keep_place, NAME, last)
        if not last:
            return


async def _may_leave(images: MadeImages, row: InstanceRow) -> bool:
    """Return whether the image of a server is complete: it is all that would be left of the server's disk."""
    image = shelved.image_of(row)
    if image is not None and await images.status(image) == COMPLETE:
        return True
    log.warning("server %s stays on its host: its image %s cannot be used; unshelve the server", row["uuid"], image)
    return False


def _begin(conn: sa.Connection, id: str, dependencies: ConductorDependencies, before: int) -> list[str]:
    """Record the operation, unless the server is not to be offloaded now."""
    row = instances.lock(conn, id)
    if row is None or row["host"] is None or (row["vm_state"], row["task_state"]) != (states.SHELVED, None):
        return []
    if (row["system_metadata"] or {}).get(shelved.SHELVED_AT, "~") >= shelved.instant(before):
        return []
    return accept_own(
        conn,
        dependencies,
        row,
        {"task_state": states.SHELVING_OFFLOADING},
        namespace=NAMESPACE,
        kind="shelve_offload",
        payload=Payload(),
    )
