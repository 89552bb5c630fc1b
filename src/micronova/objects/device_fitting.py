"""Choosing PCI devices of a host for an instance.

A virtual function and its physical function exclude each other: who has one of them keeps the other from everybody. A
request without a device type gets no physical function. One for devices that are, or are not, live_migratable gets none
of which the host does not say it. The affinity policy says where devices may be, if the instance has NUMA nodes:

| policy    | devices                                                                                        |
|-----------|------------------------------------------------------------------------------------------------|
| required  | in a cell of the instance                                                                      |
| socket    | in a cell of the instance, or in one of the same socket                                        |
| legacy    | in a cell of the instance, or of unknown place                                                 |
| preferred | anywhere                                                                                       |

Under each policy devices in a cell of the instance are taken first, then those of unknown place.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from micronova.objects.bounded_search import StepBudget, StepMeter, TooManySteps
from micronova.objects.topology import (
    LIVE_MIGRATABLE,
    AssignedDevice,
    DeviceRequest,
    NodeTopology,
    PciDevice,
    TopologyUse,
)

DevicePools: TypeAlias = tuple[tuple[PciDevice, int], ...]

log = logging.getLogger(__name__)

MOST_STEPS: Final = 50_000
"""Of the choices of devices on one host: well below 0.1 s."""


def free_devices(topology: NodeTopology, use: TopologyUse) -> list[PciDevice]:
    """Return the devices that are not held, whose physical function is not held, and of which no function is held."""
    held = set(use.devices)
    parents = {device.parent for device in topology.devices if device.address in held and device.parent is not None}
    parents.update(use.parents.values())  # a host may list a held virtual function no more
    return [
        device
        for device in topology.devices
        if device.address not in held and device.address not in parents and device.parent not in held
    ]


def device_pools(devices: Sequence[PciDevice]) -> DevicePools:
    """Return one of each kind of device that requests tell apart, with how many there are."""
    pools: dict[tuple[object, ...], list[PciDevice]] = {}
    for each in devices:
        pools.setdefault((each.vendor_id, each.product_id, each.dev_type, each.live_migratable), []).append(each)
    return tuple((few[0], len(few)) for few in pools.values())


def may_suffice(pools: DevicePools, requests: Sequence[DeviceRequest]) -> bool:
    """Return whether there are enough devices for each request by itself, wherever they are."""
    return all(
        sum(count for device, count in pools if _suitable((device,), request)) >= request.count for request in requests
    )


def choose_devices(
    topology: NodeTopology,
    use: TopologyUse,
    requests: Sequence[DeviceRequest],
    cells: frozenset[int] | None,
    meter: StepMeter | None = None,
) -> tuple[AssignedDevice, ...] | None:
    """Return devices for all requests of an instance that is in these host cells; None if there are not enough.

    A host on which none are found within `MOST_STEPS` counts as one without them. `meter` counts the steps.
    """
    try:
        suitable = suitable_devices(topology, use, requests)
        return search_devices(topology, suitable, requests, cells, StepBudget(MOST_STEPS, meter))
    except TooManySteps:
        count = sum(each.count for each in requests)
        log.warning("a request of %d PCI devices took too many steps; its host counts as one without them", count)
        return None


def suitable_devices(
    topology: NodeTopology, use: TopologyUse, requests: Sequence[DeviceRequest]
) -> list[list[PciDevice]]:
    """Return for each request the free devices that suit it, wherever they are."""
    free = free_devices(topology, use)
    return [_suitable(free, each) for each in requests]


def search_devices(
    topology: NodeTopology,
    suitable: Sequence[Sequence[PciDevice]],
    requests: Sequence[DeviceRequest],
    cells: frozenset[int] | None,
    budget: StepBudget,
) -> tuple[AssignedDevice, ...] | None:
    """Choose among suitable devices as `choose_devices` does; raise TooManySteps if the budget does not suffice."""
    if not requests:
        return ()
    candidates = [_candidates(few, each, cells, topology) for few, each in zip(suitable, requests, strict=True)]
    slots = [number for number, each in enumerate(requests) for _ in range(each.count)]
    chosen = _match(slots, candidates, budget)
    if chosen is None:
        return None
    return tuple(
        AssignedDevice(
            alias=requests[number].alias,
            address=device.address,
            parent=device.parent,
            live_migratable=requests[number].live_migratable,
        )
        for number, device in zip(slots, chosen, strict=True)
    )


class DeviceNeed(NamedTuple):
    """How many devices of a request have to come from the cells of the instance."""

    needed: int
    groups: tuple[tuple[int, frozenset[int]], ...]  # how many there are if one of these cells is taken; most first


def device_needs(topology: NodeTopology, use: TopologyUse, requests: Sequence[DeviceRequest]) -> list[DeviceNeed]:
    """Return what requests need of the cells at least; those that need nothing of them are left out.

    An instance in cells that meet all of this may still be without devices, if several requests want the same ones.
    """
    free, needs = free_devices(topology, use), []
    cells = {cell.id: cell.socket for cell in topology.cells}
    for request in requests:
        suitable = _suitable(free, request)
        anywhere = {"preferred": len(suitable), "legacy": sum(each.numa_node is None for each in suitable)}
        count = request.count - anywhere.get(request.policy, 0)
        if count <= 0:
            continue
        amounts = Counter[frozenset[int]]()
        for device in suitable if request.policy != "preferred" else ():
            if device.numa_node in cells:
                near = frozenset({device.numa_node})
                amounts[near | _cells_of_sockets(near, topology) if request.policy == "socket" else near] += 1
        needs.append(DeviceNeed(count, tuple((amount, ids) for ids, amount in amounts.most_common())))
    return needs


def _suitable(free: Sequence[PciDevice], request: DeviceRequest) -> list[PciDevice]:
    wants_functions = any(spec.get("dev_type") == "type-PF" for spec in request.specs)
    return [
        device for device in free if _matches(device, request) and (wants_functions or device.dev_type != "type-PF")
    ]


def _candidates(
    suitable: Sequence[PciDevice], request: DeviceRequest, cells: frozenset[int] | None, topology: NodeTopology
) -> Sequence[PciDevice]:
    if cells is None:
        return suitable
    near, unknown, far = (
        [each for each in suitable if each.numa_node in cells],
        [each for each in suitable if each.numa_node is None],
        [each for each in suitable if each.numa_node is not None and each.numa_node not in cells],
    )
    match request.policy:
        case "required":
            return near
        case "legacy":
            return near + unknown
        case "socket":
            same = _cells_of_sockets(cells, topology)
            return near + [each for each in far if each.numa_node in same]
        case _:
            return near + unknown + far


def _cells_of_sockets(cells: frozenset[int], topology: NodeTopology) -> frozenset[int]:
    """Return the cells of the sockets of these cells; none if the host does not say where its cells are."""
    if any(cell.socket is None for cell in topology.cells):
        return frozenset()
    sockets = {cell.socket for cell in topology.cells if cell.id in cells}
    return frozenset(cell.id for cell in topology.cells if cell.socket in sockets)


def _matches(device: PciDevice, request: DeviceRequest) -> bool:
    values = {
        "vendor_id": device.vendor_id,
        "product_id": device.product_id,
        "dev_type": device.dev_type,
        LIVE_MIGRATABLE: "" if device.live_migratable is None else device.live_migratable,
    }
    return any(
        all(str(values.get(name, "")).lower() == value.lower() for name, value in spec.items())
        for spec in request.specs
    )


def _match(
    slots: Sequence[int], candidates: Sequence[Sequence[PciDevice]], budget: StepBudget
) -> list[PciDevice] | None:
    """Give each slot one of the candidates of its request, so that none excludes another; None if that is impossible.

    The search goes back on a choice that leaves too little for later slots. Devices of one kind are alike to it: which
    requests they suit, where they are, and which physical function they are or belong to. So it tries one of each.
    Raise TooManySteps if that takes too long.
    """
    failed: set[tuple[int, frozenset[str]]] = set()
    suits: dict[str, list[int]] = {}
    for number, each in enumerate(candidates):
        for device in each:
            suits.setdefault(device.address, []).append(number)

    def kind(device: PciDevice) -> tuple[object, ...]:
        family = device.address if device.dev_type == "type-PF" else device.parent
        return tuple(suits[device.address]), family, device.numa_node

    def search(position: int, first: int, chosen: tuple[PciDevice, ...]) -> tuple[PciDevice, ...] | None:
        if position == len(slots):
            return chosen
        state = position, frozenset(device.address for device in chosen)
        if state in failed:
            return None
        offered = candidates[slots[position]]
        tried: set[tuple[object, ...]] = set()
        for index in range(first, len(offered)):
            device = offered[index]
            budget.spend(1 + len(chosen))
            if kind(device) in tried or any(_exclude(device, other) for other in chosen):
                continue
            tried.add(kind(device))
            # Slots of one request are alike: each takes a device after that of the slot before.
            alike = position + 1 < len(slots) and slots[position + 1] == slots[position]
            found = search(position + 1, index + 1 if alike else 0, (*chosen, device))
            if found is not None:
                return found
        failed.add(state)
        return None

    found = search(0, 0, ())
    return None if found is None else list(found)


def _exclude(one: PciDevice, other: PciDevice) -> bool:
    return one.address == other.address or one.parent == other.address or other.parent == one.address
