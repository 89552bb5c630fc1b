"""NUMA cells and PCI devices of hosts, and what is held of them: stored once for all hosts that have the same.

Whether the cells of hosts suit a request is found for all kinds of hosts at once. Where that does not decide, each kind
is asked once. When what is held of a host changes, the results of all others stay as they are.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from micronova.objects.device_fitting import free_devices
from micronova.objects.topology import NodeTopology, TopologyRequest, TopologyUse, decode_topology, decode_use
from micronova.scheduler.cell_columns import CellColumns
from micronova.scheduler.interning import Interner

Codes: TypeAlias = npt.NDArray[np.intp]
Passes: TypeAlias = Callable[[NodeTopology, TopologyUse], bool]

_FIRST_SIZE = 64
_MOST_REQUESTS = 64
_NOTHING = NodeTopology()


class Topologies:
    """Codes for the topologies of hosts, with what is held of them."""

    def __init__(self) -> None:
        self._interner = Interner()
        # By code: when it got its value, and how many devices are free.
        self._stamps = np.zeros(_FIRST_SIZE, np.int64)
        self._devices = np.zeros(_FIRST_SIZE, np.int64)
        self._cells = CellColumns(_FIRST_SIZE)
        # By request: for which stamps of codes the results are, and the results.
        self._results: dict[bytes, tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]] = {}

    def take(self, topology: str, held: str) -> int:
        """Return the code for one more host that has this."""
        version = self._interner.version
        code = self._interner.take((topology, held), (topology, held))
        if self._interner.version != version:
            if code >= len(self._stamps):
                self._stamps, self._devices = _larger(self._stamps), _larger(self._devices)
            self._stamps[code] = self._interner.version
            value = self.value(code)
            self._devices[code] = len(free_devices(*value))
            self._cells.set(code, *value)
        return code

    def release(self, code: int) -> None:
        """Let one host no longer have a code."""
        self._interner.release(code)

    def texts(self, code: int) -> tuple[str, str]:
        """Return what a code stands for, as it is stored."""
        texts: tuple[str, str] = self._interner.values[code][1]
        return texts

    def value(self, code: int) -> tuple[NodeTopology, TopologyUse]:
        """Return what a code stands for."""
        topology, held = self.texts(code)
        return decode_topology(topology) if topology else _NOTHING, decode_use(held)

    def has_devices(self) -> bool:
        """Return False if no host has a free device; True if one has, or had some time ago."""
        return bool(self._devices.any())

    def devices(self, codes: Codes) -> npt.NDArray[np.int64]:
        """Return how many devices are free on hosts with these codes."""
        return self._devices.take(codes)

    def suit(self, request: TopologyRequest, codes: Codes) -> npt.NDArray[np.bool_]:
        """Return for each of these codes whether its cells suit a request (`CellColumns.suit`)."""
        return self._cells.suit(request, codes)

    def passing(self, key: bytes, passes: Passes, codes: Codes) -> npt.NDArray[np.bool_]:
        """Return for each of these codes whether it passes; results are kept by key."""
        known = self._results.get(key)
        if known is None or len(known[0]) != len(self._stamps):
            if len(self._results) >= _MOST_REQUESTS:
                self._results.clear()
            size = len(self._stamps)
            fresh = np.zeros(size, np.int64), np.zeros(size, np.bool_)
            if known is not None:
                fresh[0][: len(known[0])], fresh[1][: len(known[1])] = known
            known = self._results[key] = fresh
        stamps, found = known
        unknown = codes[stamps.take(codes) != self._stamps.take(codes)]
        for code in np.unique(unknown).tolist() if len(unknown) else ():
            found[code] = passes(*self.value(code))
            stamps[code] = self._stamps[code]
        return found.take(codes)


def _larger(column: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    larger = np.zeros(2 * len(column), column.dtype)
    larger[: len(column)] = column
    return larger
