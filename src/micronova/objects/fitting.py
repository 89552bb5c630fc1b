"""Fitting an instance onto a host: which cells, CPUs, memory pages and PCI devices it gets. Pure functions.

Each NUMA node of a guest gets a cell of the host for itself. The cells are tried in an order that spreads instances:
first those with most free devices (or fewest, if the instance wants none), then those with most free dedicated CPUs (or
fewest shared vCPUs), then those with most free memory. The first combination that holds everything is taken. Dedicated
CPUs are taken core by core: as many threads of each core as every core that is needed has free.

The rules are those of Nova's `numa_fit_instance_to_host`; `make nova-numa` compares both on random hosts and instances.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from micronova.objects import device_fitting
from micronova.objects.bounded_search import Matching, StepBudget, StepMeter, TooManySteps, bits
from micronova.objects.device_fitting import (
    choose_devices,
    device_needs,
    free_devices,
    search_devices,
    suitable_devices,
)
from micronova.objects.topology import (
    NOTHING_USED,
    AssignedDevice,
    Assignment,
    CellAssignment,
    CellRequest,
    CellUse,
    HostCell,
    NodeTopology,
    PciDevice,
    TopologyRequest,
    TopologyUse,
)

log = logging.getLogger(__name__)

MOST_STEPS: Final = 20_000
"""Of one search: about 0.1 s. Nearly all requests take less than a hundred."""

_DEVICES_PER_STEP: Final = 16  # that are looked at in about the time of a step

_UNUSED = CellUse()


def fit(
    topology: NodeTopology, use: TopologyUse, request: TopologyRequest, meter: StepMeter | None = None
) -> Assignment | None:
    """Return what an instance would hold of a host beside what others hold; None if it does not fit.

    The work is bounded: a host onto which no way is found within `MOST_STEPS` counts as one without room. `meter`
    counts the steps.
    """
    if not request.cells:
        devices = choose_devices(topology, use, request.devices, None, meter)
        return None if devices is None else Assignment(devices=devices)
    try:
        return _Search(topology, use, request, meter).find()
    except TooManySteps:
        log.warning("a request of %d NUMA nodes took too many steps; its host counts as full", len(request.cells))
        return None


def taken(use: TopologyUse, assignment: Assignment, topology: NodeTopology) -> TopologyUse:
    """Return what is held when an instance holds this as well."""
    return _changed(use, assignment, topology, 1)


def given_back(use: TopologyUse, assignment: Assignment, topology: NodeTopology) -> TopologyUse:
    """Return what is held when an instance no longer holds this."""
    return _changed(use, assignment, topology, -1)


def lacking(topology: NodeTopology, use: TopologyUse) -> list[str]:
    """Return what instances hold that the host does not have, or has less of: a sentence for each."""
    cells = {cell.id: cell for cell in topology.cells}
    found = []
    for id, held in sorted(use.cells.items()):
        cell = cells.get(id)
        if cell is None:
            found.append(f"NUMA node {id} is gone, of which instances hold {held.memory_mb} MB.")
            continue
        if gone := sorted(set(held.pinned) - set(cell.dedicated)):
            found.append(f"NUMA node {id} no longer has the dedicated CPUs {', '.join(map(str, gone))}.")
        pages = {each.size_kib: each.total - each.reserved for each in cell.pages}
        for size, count in sorted(held.pages.items()):
            # Ordinary memory may be given out more than once.
            if size != _smallest(cell) and count > pages.get(size, 0):
                found.append(f"NUMA node {id} has {pages.get(size, 0)} pages of {size} KiB; instances hold {count}.")
    gone_devices = set(use.devices) - {device.address for device in topology.devices}
    found += [f"The PCI device {address} is gone." for address in sorted(gone_devices)]
    totals = {(each.name, each.mdev_type): each.total for each in topology.mdevs}
    for parent, types in sorted(use.mdevs.items()):
        for mdev_type, count in sorted(types.items()):
            if count > (total := totals.get((parent, mdev_type), 0)):
                found.append(
                    f"The device {parent} has {total} mediated devices of the type {mdev_type}; instances hold {count}."
                )
    return found


# --- cells ---


def _ordered_cells(topology: NodeTopology, use: TopologyUse, request: TopologyRequest) -> list[HostCell]:
    cells = list(topology.cells)
    if len(cells) <= len(request.cells):
        return cells
    devices: dict[int | None, int] = {}
    for device in free_devices(topology, use):
        devices[device.numa_node] = devices.get(device.numa_node, 0) + 1

    def order(cell: HostCell) -> tuple[int, int, int]:
        held = use.cells.get(cell.id, _UNUSED)
        near = devices.get(cell.id, 0)
        busy = held.cpus if not request.is_pinned else -len(_free_cpus(cell, held))
        return -near if request.devices else near, busy, held.memory_mb - cell.memory_mb

    return sorted(cells, key=order)


_Fitted = tuple[CellAssignment, tuple[int, ...]]  # with the CPUs of the emulator


class _Search:
    """Looks for the first way to give each cell of the guest a cell of the host, in the order of the host's cells.

    Cells are numbers here, and sets of them are the bits of an integer. A cell of the host is taken only if there are
    cells for the rest of the guest afterwards, and devices near them. Whether a set of cells leads to a way does not
    depend on their order, so each set is tried once.
    """

    def __init__(
        self, topology: NodeTopology, use: TopologyUse, request: TopologyRequest, meter: StepMeter | None
    ) -> None:
        self._topology = topology
        self._use = use
        self._request = request
        self._cells = _ordered_cells(topology, use, request)
        self._budget = StepBudget(MOST_STEPS, meter)
        self._device_budget = StepBudget(device_fitting.MOST_STEPS, meter)  # of all cells together
        self._known: dict[tuple[int, int, int, int, int], _Fitted | None] = {}
        self._options: list[int] = []  # by position of the guest's cell: cells of the host that can take it
        self._takers: list[int] = []  # by cell of the host: positions of the guest's cells that it can take
        self._needs: list[_Need] = []
        self._suitable: list[list[PciDevice]] | None = None  # by request of devices; found if they are needed
        self._failed: set[int] = set()  # sets of cells after which there is no way

    def find(self) -> Assignment | None:
        """Return the assignment, None if there is none."""
        # The first cells that fit are nearly always a way. Then most cells need not be looked at.
        first = self._first_fitting()
        if first is not None and (found := self._assignment(first)) is not None:
            return found
        count = len(self._request.cells)
        self._options = [self._fitting(position) for position in range(count)]
        self._takers = [
            sum(1 << position for position in range(count) if self._options[position] >> number & 1)
            for number in range(len(self._cells))
        ]
        numbers = {cell.id: 1 << number for number, cell in enumerate(self._cells)}
        self._needs = [
            _Need(each.needed, [(amount, sum(numbers[id] for id in ids)) for amount, ids in each.groups])
            for each in device_needs(self._topology, self._use, self._request.devices)
        ]
        return self._extend(0, ()) if self._is_possible(0, 0) else None

    def _first_fitting(self) -> tuple[int, ...] | None:
        chosen: tuple[int, ...] = ()
        for position in range(len(self._request.cells)):
            numbers = (each for each in range(len(self._cells)) if each not in chosen)
            number = next((each for each in numbers if self._fitted(position, each) is not None), None)
            if number is None:
                return None
            chosen = (*chosen, number)
        return chosen

    def _extend(self, taken_cells: int, chosen: tuple[int, ...]) -> Assignment | None:
        position = len(chosen)
        if position == len(self._request.cells):
            return self._assignment(chosen)
        for number in bits(self._options[position] & ~taken_cells):
            now = taken_cells | 1 << number
            if now in self._failed or not self._is_possible(position + 1, now):
                continue
            found = self._extend(now, (*chosen, number))
            if found is not None:
                return found
            self._failed.add(now)
        return None

    def _is_possible(self, position: int, taken_cells: int) -> bool:
        """Return whether there are cells for the rest of the guest, and cells with enough devices for each request."""
        rest = Matching(self._budget)
        if not all(rest.add(options & ~taken_cells) for options in self._options[position:]):
            return False
        return all(self._can_meet(need, position, taken_cells) for need in self._needs)

    def _can_meet(self, need: "_Need", position: int, taken_cells: int) -> bool:
        """Return whether the cells taken and the best that the rest of the guest can take have enough devices.

        A way for all of the rest of the guest can be changed so that it includes any cells that the rest can take.
        """
        needed, reached = need.needed, Matching(self._budget)
        for amount, cells in need.groups:
            if needed <= 0:
                break
            if cells & taken_cells:
                needed -= amount
        for amount, cells in need.groups:
            if needed <= 0:
                break
            if cells & taken_cells:
                continue
            takers = 0
            for number in bits(cells):
                self._budget.spend()
                takers |= self._takers[number]
            if reached.add(takers >> position):
                needed -= amount
        return needed <= 0

    def _fitting(self, position: int) -> int:
        return sum(1 << n for n in range(len(self._cells)) if self._fitted(position, n) is not None)

    def _fitted(self, position: int, number: int) -> _Fitted | None:
        """Return what a cell of the guest would hold of a cell of the host, None if it does not fit."""
        request, cell = self._request, self._cells[number]
        wanted, emulator = request.cells[position], int(request.isolates_emulator and position == 0)
        # Cells of the guest that want the same fit onto the same cells of the host.
        key = number, wanted.memory_mb, len(wanted.shared), len(wanted.pinned), emulator
        if key not in self._known:
            held = self._use.cells.get(cell.id, _UNUSED)
            self._known[key] = _fit_cell(cell, held, wanted, emulator, self._topology, request)
        known = self._known[key]
        if known is None:
            return None
        assigned, emulator_cpus = known
        pins = dict(zip(sorted(wanted.pinned), assigned.pins.values(), strict=True))
        return msgspec.structs.replace(assigned, id=wanted.id, shared=wanted.shared, pins=pins), emulator_cpus

    def _assignment(self, chosen: tuple[int, ...]) -> Assignment | None:
        """Return the assignment with these cells of the host, None if devices are missing."""
        devices: tuple[AssignedDevice, ...] | None = ()
        if self._request.devices:
            if self._suitable is None:
                self._suitable = suitable_devices(self._topology, self._use, self._request.devices)
            self._budget.spend(1 + sum(map(len, self._suitable)) // _DEVICES_PER_STEP)
            places = frozenset(self._cells[number].id for number in chosen)
            devices = search_devices(self._topology, self._suitable, self._request.devices, places, self._device_budget)
        if devices is None:
            return None
        fitted = [found for position, n in enumerate(chosen) if (found := self._fitted(position, n)) is not None]
        return Assignment(
            cells=tuple(cell for cell, _ in fitted),
            emulator=tuple(cpu for _, emulator in fitted for cpu in emulator),
            devices=devices,
        )


class _Need(NamedTuple):
    """Devices that have to come from the cells of the guest."""

    needed: int
    groups: list[tuple[int, int]]  # how many there are if one of these cells is taken; most first


def _fit_cell(
    cell: HostCell, held: CellUse, wanted: CellRequest, emulator: int, topology: NodeTopology, request: TopologyRequest
) -> _Fitted | None:
    """Return what one cell of the guest would hold of one cell of the host, None if it does not fit."""
    page = _page_size(cell, held, wanted, request)
    if page is None and request.page_size is not None:
        return None
    if request.page_size is None and not _has_memory(cell, held, wanted, request):
        return None
    pins: dict[int, int] = {}
    emulator_cpus: tuple[int, ...] = ()
    if request.has_shared and len(wanted.shared) > len(cell.shared):
        return None
    if request.is_pinned:
        packed = _pack(cell, held, len(wanted.pinned), emulator, request.thread_policy)
        if packed is None:
            return None
        pins, emulator_cpus = dict(zip(sorted(wanted.pinned), packed[0], strict=True)), packed[1]
    if request.has_shared and (
        held.cpus + len(wanted.shared) > len(cell.shared) * topology.cpu_allocation_ratio
        or held.memory_mb + wanted.memory_mb > cell.memory_mb * topology.ram_allocation_ratio
    ):
        return None
    assigned = CellAssignment(
        id=wanted.id, host=cell.id, memory_mb=wanted.memory_mb, shared=wanted.shared, pins=pins, page_kib=page
    )
    return assigned, emulator_cpus


# --- memory ---


def _smallest(cell: HostCell) -> int | None:
    return min((each.size_kib for each in cell.pages), default=None)


def _free_pages(cell: HostCell, held: CellUse) -> dict[int, int]:
    """Return the free pages by size, the largest size first."""
    sizes = {each.size_kib: each.total - each.reserved - held.pages.get(each.size_kib, 0) for each in cell.pages}
    return dict(sorted(sizes.items(), reverse=True)) if len(sizes) > 1 else sizes


def _page_size(cell: HostCell, held: CellUse, wanted: CellRequest, request: TopologyRequest) -> int | None:
    """Return the size of the pages that the memory gets, if a size was asked for and the cell has enough."""
    if request.page_size is None:
        return None
    free = _free_pages(cell, held)
    sizes = list(free)
    match request.page_size:
        case "small":
            sizes = sizes[-1:]
        case "large":
            sizes = sizes[:-1]
        case "any":
            pass
        case size:
            sizes = [each for each in sizes if each == size]
    kib = wanted.memory_mb * 1024
    return next((size for size in sizes if kib % size == 0 and kib // size <= free[size]), None)


def _has_memory(cell: HostCell, held: CellUse, wanted: CellRequest, request: TopologyRequest) -> bool:
    """Return whether the cell has ordinary memory. A single instance never gets more than the cell has."""
    kib, size = wanted.memory_mb * 1024, _smallest(cell)
    if size is not None:
        pages = next(each for each in cell.pages if each.size_kib == size)
        free = pages.total - pages.reserved - held.pages.get(size, 0) if request.is_pinned else pages.total
        return kib % size == 0 and kib <= free * size
    used = held.memory_mb if request.is_pinned else 0
    return cell.memory_mb - used >= wanted.memory_mb


# --- dedicated CPUs ---


def _free_cpus(cell: HostCell, held: CellUse) -> list[int]:
    pinned = set(held.pinned)
    return [cpu for cpu in cell.dedicated if cpu not in pinned]


def _pack(
    cell: HostCell, held: CellUse, count: int, emulator: int, policy: str
) -> tuple[list[int], tuple[int, ...]] | None:
    """Return the host CPUs of so many vCPUs, and of the emulator; None if there are too few."""
    free = set(_free_cpus(cell, held))
    if count + emulator > len(free) or (emulator and not count):
        return None
    siblings = cell.siblings or tuple((cpu,) for cpu in cell.dedicated)
    threads_per_core = max(map(len, siblings), default=1)
    cores = [core for each in siblings if (core := [cpu for cpu in each if cpu in free])]
    if policy == "isolate":
        # A vCPU would have to get a whole core. Cores of several threads are not given out so: their other threads
        # would stay unused.
        if threads_per_core > 1:
            return None
        return _with_emulator([cpu for core in cores for cpu in core], count, emulator, cores) if count else None
    if policy == "require" and threads_per_core == 1:
        return None
    for threads in range(max(map(len, cores), default=0), 1 if policy == "require" else 0, -1):
        usable = [cpu for core in cores if len(core) >= threads for cpu in core[:threads]]
        if len(usable) >= count:
            found = _with_emulator(usable, count, emulator, cores)
            if found is not None:
                return found
    if policy == "require":
        return None
    return _with_emulator([cpu for core in cores for cpu in core], count, emulator, cores)


def _with_emulator(
    usable: list[int], count: int, emulator: int, cores: list[list[int]]
) -> tuple[list[int], tuple[int, ...]] | None:
    if len(usable) < count:
        return None
    pins, used = usable[:count], set(usable[:count])
    rest = [cpu for core in cores for cpu in core if cpu not in used] if emulator else []
    return None if len(rest) < emulator else (pins, tuple(rest[:emulator]))


# --- what is held ---


def _changed(use: TopologyUse, assignment: Assignment, topology: NodeTopology, sign: int) -> TopologyUse:
    cells = dict(use.cells)
    smallest = {cell.id: _smallest(cell) for cell in topology.cells}
    for position, each in enumerate(assignment.cells):
        held = cells.get(each.host, _UNUSED)
        # An instance never gives to a cell: a record of less than nothing counts as nothing, so that a claim and its
        # release are inverses.
        memory_mb = max(0, each.memory_mb)
        pinned = {*each.pins.values(), *(assignment.emulator if position == 0 else ())}
        size = smallest.get(each.host) if each.page_kib is None else each.page_kib
        pages = dict(held.pages)
        if size is not None:
            pages[size] = pages.get(size, 0) + sign * (memory_mb * 1024 // size)
        cells[each.host] = CellUse(
            cpus=max(0, held.cpus + sign * len(each.shared)),
            memory_mb=max(0, held.memory_mb + sign * memory_mb),
            pinned=tuple(sorted({*held.pinned} | pinned if sign > 0 else {*held.pinned} - pinned)),
            pages={size: count for size, count in sorted(pages.items()) if count > 0},
        )
    addresses = {device.address for device in assignment.devices}
    devices = {*use.devices} | addresses if sign > 0 else {*use.devices} - addresses
    functions = {**use.parents, **{each.address: each.parent for each in assignment.devices if each.parent is not None}}
    parents = {address: parent for address, parent in sorted(functions.items()) if address in devices}
    left = {id: held for id, held in sorted(cells.items()) if held != _UNUSED}
    return TopologyUse(
        cells=left, devices=tuple(sorted(devices)), parents=parents, mdevs=_changed_mdevs(use, assignment, sign)
    )


def _changed_mdevs(use: TopologyUse, assignment: Assignment, sign: int) -> dict[str, dict[str, int]]:
    if not assignment.mdevs:
        return use.mdevs
    counts = Counter({(parent, name): count for parent, types in use.mdevs.items() for name, count in types.items()})
    for each in assignment.mdevs:
        counts[each.parent, each.mdev_type] += sign
    found: dict[str, dict[str, int]] = {}
    for (parent, name), count in sorted(counts.items()):
        if count > 0:
            found.setdefault(parent, {})[name] = count
    return found


def total_use(topology: NodeTopology, assignments: Mapping[str, Assignment]) -> TopologyUse:
    """Return what all these instances hold together."""
    use = NOTHING_USED
    for assignment in assignments.values():
        use = taken(use, assignment, topology)
    return use
