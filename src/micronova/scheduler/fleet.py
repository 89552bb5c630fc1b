"""All hosts of a table with their use, and with what a dry run decided about each."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from micronova.objects.fleet import LONGEST_NAME, NOT_CONSIDERED, NOT_REFUSED, Fleet, HostUse, State, Use, by_number
from micronova.objects.scheduling import Selection
from micronova.scheduler.filter_scheduler import RemovedBy
from micronova.scheduler.host_table import HostTable
from micronova.scheduler.host_view import HostView

_UP, _DOWN, _DISABLED = 0, 1, 2
_STATES: tuple[State, ...] = ("up", "down", "disabled")


def fleet_of(
    table: HostTable,
    now: float,
    service_down_time: float,
    removed_by: RemovedBy | None = None,
    filters: Sequence[str] = (),
    selections: Sequence[Selection] = (),
) -> Fleet:
    """Return all hosts of a table; `removed_by`, the names of the filters and `selections` are those of a dry run."""
    hosts = table.view()
    zones = sorted({each.zone for each in table.selections})
    number_of = {zone: number for number, zone in enumerate(zones)}
    refused = np.full(len(hosts), NOT_REFUSED)
    if removed_by is not None and removed_by.hosts is not None:
        refused = np.full(len(hosts), NOT_CONSIDERED)
        refused[removed_by.hosts.rows] = removed_by.steps
    chosen = Counter(each.node_uuid for each in selections)
    found = [
        HostUse(
            _shortened(place),
            number_of[place.zone],
            _STATES[state],
            servers,
            vcpus,
            memory,
            disk,
            refused_by,
            chosen[place.node_uuid],
        )
        for place, state, servers, vcpus, memory, disk, refused_by in zip(
            table.selections,
            _states(hosts, now - service_down_time),
            hosts.column("num_instances").tolist(),
            _uses(hosts, "VCPU"),
            _uses(hosts, "MEMORY_MB"),
            _uses(hosts, "DISK_GB"),
            refused.tolist(),
            strict=True,
        )
    ]
    found.sort(key=lambda each: (each.zone, by_number(each.host)))
    return Fleet(zones=tuple(zones), hosts=tuple(found), filters=tuple(filters))


def _states(hosts: HostView, oldest: float) -> list[int]:
    """Return the states as ComputeFilter sees them; a host that is disabled and down counts as down."""
    states = np.where(hosts.column("enabled"), _UP, _DISABLED)
    found: list[int] = np.where(hosts.up_since(oldest), states, _DOWN).tolist()
    return found


def _uses(hosts: HostView, resource_class: str) -> list[Use]:
    used, capacity = hosts.used(resource_class).tolist(), hosts.capacity(resource_class).tolist()
    return [Use(int(taken), int(most)) for taken, most in zip(used, capacity, strict=True)]


def _shortened(place: Selection) -> str:
    """Return the name of a node's host, with the node's own name if it has another."""
    name = place.host if place.node == place.host else f"{place.host} {place.node}"
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
