"""Choosing PCI devices of a host for an instance.

A virtual function and its physical function exclude each other: who has one of them keeps the other from everybody. A
request without a device type gets no physical function. The affinity policy says where devices may be, if the instance
has NUMA nodes:

| policy    | devices                                                                                        |
|-----------|------------------------------------------------------------------------------------------------|
| required  | in a cell of the instance                                                                      |
| socket    | in a cell of the instance, or in one of the same socket                                        |
| legacy    | in a cell of the instance, or of unknown place                                                 |
| preferred | anywhere                                                                                       |

Under each policy devices in a cell of the instance are taken first, then those of unknown place.
"""

from collections.abc import Sequence

from micronova.objects.topology import AssignedDevice, DeviceRequest, NodeTopology, PciDevice, TopologyUse


def free_devices(topology: NodeTopology, use: TopologyUse) -> list[PciDevice]:
    """Return the devices that nobody has and that no device of somebody excludes."""
    held = set(use.devices)
    parents = {device.parent for device in topology.devices if device.address in held and device.parent is not None}
    return [
        device
        for device in topology.devices
        if device.address not in held and device.address not in parents and device.parent not in held
    ]


def choose_devices(
    topology: NodeTopology, use: TopologyUse, requests: Sequence[DeviceRequest], cells: frozenset[int] | None
) -> tuple[AssignedDevice, ...] | None:
    """Return devices for all requests of an instance that is in these host cells; None if there are not enough."""
    if not requests:
        return ()
    free = free_devices(topology, use)
    candidates = [_candidates(free, each, cells, topology) for each in requests]
    slots = [number for number, each in enumerate(requests) for _ in range(each.count)]
    chosen = _match(slots, candidates)
    if chosen is None:
        return None
    return tuple(
        AssignedDevice(alias=requests[number].alias, address=device.address)
        for number, device in zip(slots, chosen, strict=True)
    )


def _candidates(
    free: Sequence[PciDevice], request: DeviceRequest, cells: frozenset[int] | None, topology: NodeTopology
) -> list[PciDevice]:
    wants_functions = any(spec.get("dev_type") == "type-PF" for spec in request.specs)
    suitable = [
        device for device in free if _matches(device, request) and (wants_functions or device.dev_type != "type-PF")
    ]
    if cells is None:
        return suitable
    near = [device for device in suitable if device.numa_node in cells]
    unknown = [device for device in suitable if device.numa_node is None]
    match request.policy:
        case "required":
            return near
        case "legacy":
            return near + unknown
        case "socket":
            same = _cells_of_sockets(cells, topology)
            return near + [each for each in suitable if each.numa_node in same and each not in near]
        case _:
            return near + unknown + [each for each in suitable if each not in near and each not in unknown]


def _cells_of_sockets(cells: frozenset[int], topology: NodeTopology) -> frozenset[int]:
    """Return the cells of the sockets of these cells; none if the host does not say where its cells are."""
    if any(cell.socket is None for cell in topology.cells):
        return frozenset()
    sockets = {cell.socket for cell in topology.cells if cell.id in cells}
    return frozenset(cell.id for cell in topology.cells if cell.socket in sockets)


def _matches(device: PciDevice, request: DeviceRequest) -> bool:
    values = {"vendor_id": device.vendor_id, "product_id": device.product_id, "dev_type": device.dev_type}
    return any(
        all(str(values.get(name, "")).lower() == value.lower() for name, value in spec.items())
        for spec in request.specs
    )


def _match(slots: Sequence[int], candidates: Sequence[Sequence[PciDevice]]) -> list[PciDevice] | None:
    """Give each slot one of the candidates of its request, so that none excludes another; None if that is impossible.

    The search goes back on a choice that leaves too little for later slots.
    """
    failed: set[tuple[int, frozenset[str]]] = set()

    def search(position: int, chosen: tuple[PciDevice, ...]) -> tuple[PciDevice, ...] | None:
        if position == len(slots):
            return chosen
        state = position, frozenset(device.address for device in chosen)
        if state in failed:
            return None
        # Slots of one request are alike: each takes a device after that of the slot before.
        offered = candidates[slots[position]]
        first = 0
        if position and slots[position - 1] == slots[position]:
            first = offered.index(chosen[-1]) + 1
        left = sum(slot == slots[position] for slot in slots[position:])
        tried: set[tuple[object, ...]] = set()
        for device in offered[first : len(offered) - left + 1]:
            kind = _kind(device, candidates)
            if kind in tried or any(_exclude(device, other) for other in chosen):
                continue
            tried.add(kind)
            found = search(position + 1, (*chosen, device))
            if found is not None:
                return found
        failed.add(state)
        return None

    found = search(0, ())
    return None if found is None else list(found)


def _kind(device: PciDevice, candidates: Sequence[Sequence[PciDevice]]) -> tuple[object, ...]:
    """Return what distinguishes a device from others for the search: which requests it suits, and its function."""
    family = device.address if device.dev_type == "type-PF" else device.parent
    return tuple(device in each for each in candidates), family, device.numa_node


def _exclude(one: PciDevice, other: PciDevice) -> bool:
    return one.address == other.address or one.parent == other.address or other.parent == one.address
