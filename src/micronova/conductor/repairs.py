"""The repairs that the audit offers, by name."""

from collections import ChainMap
from typing import Any

import msgspec

from micronova.conductor.findings import claims, counters, guests, images, misplaced_guests, network, servers, volumes
from micronova.conductor.findings.finding import Repair, RepairDependencies, RepairKind
from micronova.objects.errors import NotFound

REPAIRS: ChainMap[str, RepairKind[Any]] = ChainMap(
    *(dict(part.REPAIRS) for part in (claims, counters, guests, images, misplaced_guests, network, servers, volumes))
)


async def repair(dependencies: RepairDependencies, wanted: Repair) -> str:
    """Make a repair; return what was changed, "" if there is nothing to do any more.

    Raise Conflict if it would be wrong by now: an operation works on the server, or things have changed.
    """
    kind = REPAIRS.get(wanted.name)
    try:
        about = None if kind is None else msgspec.convert(wanted.about, kind.about)
    except msgspec.ValidationError:
        about = None
    if kind is None or about is None:
        raise NotFound(f"There is no such repair {wanted.name!r}: the cloud runs another release than this command.")
    return await kind.run(dependencies, about)
