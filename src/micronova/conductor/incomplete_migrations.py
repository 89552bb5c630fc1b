"""Looks for guests that servers have left and hosts have not removed; a periodic job of the whole cloud.

A move that fails or is ended early, an evacuation, and a delete without its host leave a record by which the host
removes its guest (`db/departures.py`). The host tries again at each heartbeat until it succeeds. Here a conductor looks
whether one that is up has not succeeded for long: the log and `micronova status` name it.
"""

import logging
from collections import Counter

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.db import departures
from micronova.objects.errors import OperationFailed

log = logging.getLogger(__name__)

NAME = "incomplete_migrations"
DEFAULT_INTERVAL = 60.0
"""Seconds between two runs if the setting is 0."""
MOST = 1000
"""Guests that one run names."""
MOST_NAMED = 5
"""Hosts that the error names."""


async def find_incomplete_migrations(dependencies: ConductorDependencies) -> None:
    """Log the guests that hosts which are up should have removed `service_down_time` ago; raise if there are any."""
    engine = dependencies.engine
    left = await engine.database.read(departures.overdue, engine.now(), dependencies.service_down_time, MOST)
    if not left:
        return
    for each in left:
        log.warning("host %s has not removed its guest of server %s", each["host"], each["instance_uuid"])
    counts = Counter(each["host"] for each in left)
    names = ", ".join(f"{host} ({number})" for host, number in counts.most_common(MOST_NAMED))
    more = f" and {len(counts) - MOST_NAMED} more" if len(counts) > MOST_NAMED else ""
    raise OperationFailed(f"Hosts have not removed guests that servers have left: {names}{more}.")
