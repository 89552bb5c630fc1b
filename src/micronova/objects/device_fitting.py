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
    parents.update(use.parents.values())  # a host may list a held virtual function no more
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
        AssignedDevice(alias=requests[number].alias, address=device.address, parent=device.parent)
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
    values = {"vendor_id": device.vendor_id, "product_id": device.product_id, "dev_type": device.dev_type}
    return any(
        all(str(values.get(name, "")).lower() == value.lower() for name, value in spec.items())
        for spec in request.specs
    )


def _match(slots: Sequence[int], candidates: Sequence[Sequence[PciDevice]]) -> list[PciDevice] | None:
    """Give each slot one of the candidates of its request, so that none excludes another; None if that is impossible.

    The search goes back on a choice that leaves too little for later slots. Devices of one kind are alike to it: which
    requests they suit, where they are, and which physical function they are or belong to. So it tries one of each.
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
