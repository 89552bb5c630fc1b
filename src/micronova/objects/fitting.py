"""Fitting an instance onto a host: which cells, CPUs, memory pages and PCI devices it gets. Pure functions.

Each NUMA node of a guest gets a cell of the host for itself. The cells are tried in an order that spreads instances:
first those with most free devices (or fewest, if the instance wants none), then those with most free dedicated CPUs (or
fewest shared vCPUs), then those with most free memory. The first combination that holds everything is taken. Dedicated
CPUs are taken core by core: as many threads of each core as every core that is needed has free.

The rules are those of Nova's `numa_fit_instance_to_host`; `make nova-numa` compares both on random hosts and instances.
"""

from collections.abc import Iterator, Mapping

from micronova.objects.device_fitting import choose_devices, free_devices
from micronova.objects.topology import (
    NOTHING_USED,
    Assignment,
    CellAssignment,
    CellRequest,
    CellUse,
    HostCell,
    NodeTopology,
    TopologyRequest,
    TopologyUse,
)

_UNUSED = CellUse()


def fit(topology: NodeTopology, use: TopologyUse, request: TopologyRequest) -> Assignment | None:
    """Return what an instance would hold of a host beside what others hold; None if it does not fit."""
    if not request.cells:
        devices = choose_devices(topology, use, request.devices, None)
        return None if devices is None else Assignment(devices=devices)
    tried: set[frozenset[int]] = set()
    for chosen in _Ways(_ordered_cells(topology, use, request), use, topology, request):
        places = frozenset(cell.host for cell, _ in chosen)
        if places in tried:
            continue
        tried.add(places)
        devices = choose_devices(topology, use, request.devices, places)
        if devices is not None:
            return Assignment(
                cells=tuple(cell for cell, _ in chosen),
                emulator=tuple(cpu for _, emulator in chosen for cpu in emulator),
                devices=devices,
            )
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
    return found + [f"The PCI device {address} is gone." for address in sorted(gone_devices)]


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


class _Ways:
    """The ways to give each cell of the guest a cell of the host, in the order of the host's cells.

    Whether one fits onto another is found when it is first asked for: the first way is often the last one needed.
    """

    def __init__(
        self, cells: list[HostCell], use: TopologyUse, topology: NodeTopology, request: TopologyRequest
    ) -> None:
        self._cells = cells
        self._use = use
        self._topology = topology
        self._request = request
        self._known: dict[tuple[int, int], _Fitted | None] = {}  # by the positions of guest's and host's cell

    def __iter__(self) -> Iterator[list[_Fitted]]:
        return self._extend([], [])

    def _fitted(self, position: int) -> Iterator[tuple[int, _Fitted]]:
        """Yield the cells of the host onto which a cell of the guest fits, by their positions."""
        request = self._request
        for number, cell in enumerate(self._cells):
            if (position, number) not in self._known:
                emulator = int(request.isolates_emulator and position == 0)
                held, wanted = self._use.cells.get(cell.id, _UNUSED), request.cells[position]
                found = _fit_cell(cell, held, wanted, emulator, self._topology, request)
                self._known[position, number] = found
            if (known := self._known[position, number]) is not None:
                yield number, known

    def _extend(self, taken_cells: list[int], chosen: list[_Fitted]) -> Iterator[list[_Fitted]]:
        if len(chosen) == len(self._request.cells):
            yield chosen
        elif self._is_possible(taken_cells):
            for number, found in self._fitted(len(chosen)):
                if number not in taken_cells:
                    yield from self._extend([*taken_cells, number], [*chosen, found])

    def _is_possible(self, taken_cells: list[int]) -> bool:
        """Return whether there are cells for the rest of the guest, which saves trying all ways when there are none."""
        places = dict.fromkeys(taken_cells, -1)

        def place(position: int, seen: set[int]) -> bool:
            for number, _ in self._fitted(position):
                if number not in seen and places.get(number) != -1:
                    seen.add(number)
                    if number not in places or place(places[number], seen):
                        places[number] = position
                        return True
            return False

        return all(place(position, set()) for position in range(len(taken_cells), len(self._request.cells)))


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
        # would be claimed by nobody.
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
        pinned = {*each.pins.values(), *(assignment.emulator if position == 0 else ())}
        size = smallest.get(each.host) if each.page_kib is None else each.page_kib
        pages = dict(held.pages)
        if size is not None:
            pages[size] = pages.get(size, 0) + sign * (each.memory_mb * 1024 // size)
        cells[each.host] = CellUse(
            cpus=max(0, held.cpus + sign * len(each.shared)),
            memory_mb=max(0, held.memory_mb + sign * each.memory_mb),
            pinned=tuple(sorted({*held.pinned} | pinned if sign > 0 else {*held.pinned} - pinned)),
            pages={size: count for size, count in sorted(pages.items()) if count > 0},
        )
    addresses = {device.address for device in assignment.devices}
    devices = {*use.devices} | addresses if sign > 0 else {*use.devices} - addresses
    functions = {**use.parents, **{each.address: each.parent for each in assignment.devices if each.parent is not None}}
    parents = {address: parent for address, parent in sorted(functions.items()) if address in devices}
    left = {id: held for id, held in sorted(cells.items()) if held != _UNUSED}
    return TopologyUse(cells=left, devices=tuple(sorted(devices)), parents=parents)


def total_use(topology: NodeTopology, assignments: Mapping[str, Assignment]) -> TopologyUse:
    """Return what all these instances hold together."""
    use = NOTHING_USED
    for assignment in assignments.values():
        use = taken(use, assignment, topology)
    return use
