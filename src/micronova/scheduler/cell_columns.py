"""The NUMA cells of all kinds of hosts as columns: a request is compared with the cells of all kinds at once.

The rules are those of `objects/fitting.py`. Whether the nodes of a guest have cells of a host for themselves follows
from Hall's theorem: of each set of its nodes, at least as many cells must suit one of them as the set has nodes.

What hosts report decides how large the columns are. So the few hosts with very many cells have columns of their own,
and a size of memory pages has a column only while a host has such pages.
"""

from collections import Counter
from itertools import chain, combinations
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from micronova.objects.topology import CellUse, HostCell, NodeTopology, TopologyRequest, TopologyUse

Codes: TypeAlias = npt.NDArray[np.intp]
Bools: TypeAlias = npt.NDArray[np.bool_]
_Node: TypeAlias = tuple[int, int, int, int]  # shared and pinned vCPUs, CPUs of the emulator, MB of memory

_MOST_KINDS_OF_NODES = 4  # of one guest; there are 2**n sets of n
_MOST_CELLS = 8  # of a host whose cells are in the columns of most hosts
_FIRST_WIDE = 4
_UNUSED = CellUse()
_NO_CELLS = NodeTopology()
_WHOLE = ("free_cpus", "shared_cpus", "cpus_held", "memory_mb", "memory_held", "page_kib", "pages", "free_pages")
_LIMITS = ("most_cpus", "most_memory")


class CellColumns:
    """What is free in the cells of hosts, by code. A cell that a host does not have fits no node of a guest."""

    def __init__(self, size: int) -> None:
        self._most = _Columns(size)
        self._wide = _Columns(_FIRST_WIDE)
        self._wide_rows = np.full(size, -1, np.intp)  # by code: row in the columns of hosts with many cells
        self._wide_free: list[int] = []  # rows that were given back
        self._wide_used = 0  # rows that codes have

    def set(self, code: int, topology: NodeTopology, use: TopologyUse) -> None:
        """Set the cells that a code stands for."""
        if (size := len(self._wide_rows)) <= code:
            self._wide_rows = np.concatenate((self._wide_rows, np.full(max(size, code + 1 - size), -1, np.intp)))
        if len(topology.cells) <= _MOST_CELLS:
            self._clear_wide(code)
            self._most.set(code, topology, use)
            return
        self._most.set(code, _NO_CELLS, use)  # the code has a row there, too
        self._wide.set(self._wide_row(code), topology, use)

    def clear(self, code: int) -> None:
        """Forget the cells of a code that stands for nothing any more."""
        self._most.clear(code)
        self._clear_wide(code)

    def suit(self, request: TopologyRequest, codes: Codes) -> Bools:
        """Return for each of these codes whether its cells have the CPUs and the memory that a guest asks for.

        Others never fit. Those that suit fit, if `decides` says so.
        """
        found = self._most.suit(request, codes)
        if self._wide_used:
            rows = self._wide_rows.take(codes)
            wide = rows >= 0
            found[wide] = self._wide.suit(request, rows[wide])
        return found

    @property
    def nbytes(self) -> int:
        """The bytes of all columns."""
        return self._most.nbytes + self._wide.nbytes + self._wide_rows.nbytes

    def _wide_row(self, code: int) -> int:
        """Return the row of a code in the columns of hosts with many cells; it gets one if it has none."""
        row = int(self._wide_rows[code])
        if row < 0:
            row = self._wide_rows[code] = self._wide_free.pop() if self._wide_free else self._wide_used
            self._wide_used += 1
        return row

    def _clear_wide(self, code: int) -> None:
        row = int(self._wide_rows[code]) if code < len(self._wide_rows) else -1
        if row < 0:
            return
        self._wide.clear(row)
        self._wide_rows[code] = -1
        self._wide_free.append(row)
        self._wide_used -= 1
        if not self._wide_used:
            self._wide, self._wide_free = _Columns(_FIRST_WIDE), []


class _Columns:
    """Columns of some hosts, by row, which are as wide as the host with most cells."""

    def __init__(self, size: int) -> None:
        self._size, self._width = size, 1
        self._cells = np.zeros((size, 1), np.bool_)  # which exist
        self._columns: dict[str, npt.NDArray[Any]] = {name: np.zeros((size, 1), np.int64) for name in _WHOLE}
        self._columns |= {name: np.zeros((size, 1)) for name in _LIMITS}
        self._pages: dict[int, npt.NDArray[np.int64]] = {}  # by size in KiB: free ones, -1 where there are none
        self._sizes: dict[int, frozenset[int]] = {}  # by row: sizes of pages
        self._users: Counter[int] = Counter()  # by size of pages: rows

    @property
    def nbytes(self) -> int:
        """The bytes of all columns."""
        return sum(each.nbytes for each in (self._cells, *self._columns.values(), *self._pages.values()))

    def set(self, row: int, topology: NodeTopology, use: TopologyUse) -> None:
        """Set the cells of a row."""
        if row >= self._size or len(topology.cells) > self._width:
            self._grow(max(self._size, row + 1), max(self._width, len(topology.cells)))
        self._use_pages(row, frozenset(each.size_kib for cell in topology.cells for each in cell.pages))
        self._cells[row] = False
        for pages in self._pages.values():
            pages[row] = -1
        for number, cell in enumerate(topology.cells):
            held = use.cells.get(cell.id, _UNUSED)
            self._cells[row, number] = True
            for name, value in _figures(cell, held, topology).items():
                self._columns[name][row, number] = value
            for each in cell.pages:
                free = each.total - each.reserved - held.pages.get(each.size_kib, 0)
                self._pages[each.size_kib][row, number] = free

    def clear(self, row: int) -> None:
        """Let a row have no cells."""
        self._use_pages(row, frozenset())
        if row < self._size:  # it may not have been set, because its code was not
            self._cells[row] = False

    def _use_pages(self, row: int, sizes: frozenset[int]) -> None:
        """Make the columns of the sizes of pages that a row has, and drop those that no row has any more."""
        before = self._sizes.pop(row, frozenset())
        if sizes:
            self._sizes[row] = sizes
        for size in sizes - before:
            self._users[size] += 1
            if size not in self._pages:
                self._pages[size] = np.full((self._size, self._width), -1, np.int64)
        for size in before - sizes:
            self._users[size] -= 1
            if not self._users[size]:
                del self._users[size], self._pages[size]

    def suit(self, request: TopologyRequest, codes: Codes) -> Bools:
        """Return for each of these rows whether its cells suit; see `CellColumns.suit`."""
        nodes = Counter(
            (len(cell.shared), len(cell.pinned), int(request.isolates_emulator and number == 0), cell.memory_mb)
            for number, cell in enumerate(request.cells)
        )
        some = len(codes) < self._size
        rows = codes if some else slice(0, self._size)
        suited = [self._suit_node(node, request, rows) for node in nodes]
        counts = list(nodes.values())
        found: Bools = np.ones(len(suited[0]), np.bool_)
        for size in range(1, min(len(counts), _MOST_KINDS_OF_NODES) + 1):
            for chosen in combinations(range(len(counts)), size):
                together = np.logical_or.reduce([suited[number] for number in chosen])
                found &= together.sum(axis=1) >= sum(counts[number] for number in chosen)
        return found if some else found.take(codes)

    def _suit_node(self, node: _Node, request: TopologyRequest, rows: Codes | slice) -> Bools:
        """Return which cells suit one NUMA node of a guest."""
        shared, pinned, emulator, memory = node
        column = {name: values[rows] for name, values in self._columns.items()}
        found: Bools = self._cells[rows].copy()
        if request.is_pinned:
            if emulator and not pinned:
                return np.zeros_like(found)
            found &= column["free_cpus"] >= pinned + emulator
        if request.has_shared:
            found &= column["shared_cpus"] >= shared
            found &= column["cpus_held"] + shared <= column["most_cpus"]
            found &= column["memory_held"] + memory <= column["most_memory"]
        if request.page_size is not None:
            return found & self._has_pages(memory * 1024, request.page_size, rows)
        free = column["free_pages" if request.is_pinned else "pages"]
        size, kib = column["page_kib"], memory * 1024
        in_pages = (kib % np.maximum(size, 1) == 0) & (kib <= free * size)
        held = column["memory_held"] if request.is_pinned else 0
        return found & np.where(size > 0, in_pages, column["memory_mb"] - held >= memory)

    def _has_pages(self, kib: int, wanted: int | str, rows: Codes | slice) -> Bools:
        """Return which cells have enough free pages of a size that is asked for."""
        found: Bools = np.zeros_like(self._cells[rows])
        smallest = self._columns["page_kib"][rows]
        for size, free in self._pages.items():
            if kib % size or (isinstance(wanted, int) and wanted != size):
                continue
            enough = free[rows] >= kib // size
            if wanted == "small":
                enough &= smallest == size
            elif wanted == "large":
                enough &= smallest != size
            found |= enough
        return found

    def _grow(self, least: int, width: int) -> None:
        size = self._size
        while size < least:
            size *= 2
        shape = (size, width)
        self._cells = _larger(self._cells, shape, 0)
        self._columns = {name: _larger(values, shape, 0) for name, values in self._columns.items()}
        self._pages = {each: _larger(values, shape, -1) for each, values in self._pages.items()}
        self._size, self._width = shape


def decides(request: TopologyRequest) -> bool:
    """Return whether a guest fits a host if its cells suit: no devices, no threads to choose, few kinds of nodes."""
    kinds = {(len(cell.shared), len(cell.pinned), cell.memory_mb) for cell in request.cells}
    by_threads = request.is_pinned and request.thread_policy != "prefer"
    # The emulator makes the first node a kind of its own.
    return not request.devices and not by_threads and len(kinds) + request.isolates_emulator <= _MOST_KINDS_OF_NODES


def _figures(cell: HostCell, held: CellUse, topology: NodeTopology) -> dict[str, float]:
    free = set(cell.dedicated).difference(held.pinned)
    if cell.siblings:
        free.intersection_update(chain.from_iterable(cell.siblings))
    smallest = min((each.size_kib for each in cell.pages), default=0)
    pages = next((each for each in cell.pages if each.size_kib == smallest), None)
    return {
        "free_cpus": len(free),
        "shared_cpus": len(cell.shared),
        "cpus_held": held.cpus,
        "memory_mb": cell.memory_mb,
        "memory_held": held.memory_mb,
        "page_kib": smallest,
        "pages": pages.total if pages else 0,
        "free_pages": pages.total - pages.reserved - held.pages.get(smallest, 0) if pages else 0,
        "most_cpus": len(cell.shared) * topology.cpu_allocation_ratio,
        "most_memory": cell.memory_mb * topology.ram_allocation_ratio,
    }


def _larger(column: npt.NDArray[Any], shape: tuple[int, int], empty: int) -> npt.NDArray[Any]:
    larger = np.full(shape, empty, column.dtype)
    larger[: column.shape[0], : column.shape[1]] = column
    return larger
