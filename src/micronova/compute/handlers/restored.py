"""Orders of a database that was restored from a backup: it has forgotten what this host has done since."""

from typing import Final

from micronova.compute.handlers.shared import note_if_newer
from micronova.compute.host import Host
from micronova.compute.work import Work

MAKES: Final = frozenset({"build", "rebuild", "finish_resize", "post_live_migration_at_destination"})
"""Kinds of orders that make a guest where there is none. A guest that this host once had may be on another by now."""

COSTS: Final = MAKES | {"resize_instance", "finish_revert_resize", "confirm_resize", "revert_resize", "shelve_offload"}
"""Kinds of orders that replace or remove disks of a guest, or what a resize has kept of it."""


async def would_cost_newer_guest(host: Host, work: Work) -> bool:
    """Return whether an order of a database that is behind could cost a guest what the database has forgotten.

    A delete is no such order: the server ends with all that it has.
    """
    kind = work.order.kind
    if not work.database_is_behind or kind not in COSTS:
        return False
    guest = await host.driver.info(work.order.instance.uuid)
    return kind in MAKES if guest is None else note_if_newer(guest, host, work)
