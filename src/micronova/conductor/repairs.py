"""The repairs that the audit offers, by name."""

from collections import ChainMap

from micronova.conductor.findings import claims, counters, guests, images, network, servers, strangers, volumes
from micronova.conductor.findings.finding import Means, Repair, Repairer
from micronova.objects.errors import NotFound

REPAIRS: ChainMap[str, Repairer] = ChainMap(
    *(part.REPAIRS for part in (claims, counters, guests, images, network, servers, strangers, volumes))
)


async def repair(means: Means, wanted: Repair) -> str:
    """Make a repair; return what was changed, "" if there is nothing to do any more.

    Raise Conflict if it would be wrong by now: an operation works on the server, or things have changed.
    """
    if wanted.name not in REPAIRS:
        raise NotFound(f"There is no repair {wanted.name!r}: the cloud runs another release than this command.")
    return await REPAIRS[wanted.name](means, wanted.about)
