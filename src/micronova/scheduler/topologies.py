"""NUMA cells and PCI devices of hosts, and what is held of them: stored once for all hosts that have the same.

Whether the cells of hosts suit a request is found for all kinds of hosts at once. Where that does not decide, each kind
is asked once. When what is held of a host changes, the results of all others stay as they are.

A request may ask for something that takes long to find on each kind of host. So the kinds are asked before the
decision, some at a time, and only until the request has used up its steps. A decision tells the kinds that were not
asked from those without room; the next preparation goes on with them.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from micronova.objects.bounded_search import StepMeter
from micronova.objects.device_fitting import DevicePools, device_pools, free_devices, may_suffice
from micronova.objects.topology import (
    DeviceRequest,
    NodeTopology,
    TopologyRequest,
    TopologyUse,
    decode_topology,
    decode_use,
)
from micronova.scheduler.cell_columns import Bools, CellColumns, Codes
from micronova.scheduler.interning import Interner

Passes: TypeAlias = Callable[[NodeTopology, TopologyUse, StepMeter], bool]

log = logging.getLogger(__name__)

MOST_STEPS_AT_ONCE: Final = 20_000
"""Steps of one stretch of work without a pause: about 0.1 s. A decision is one stretch. The first `FREE_STEPS` of each
kind of host are not counted, and the last kind may exceed the limit."""
MOST_STEPS_OF_A_REQUEST: Final = 400_000
"""Steps of all stretches before the decision about a request, counted likewise: about 2 s."""
FREE_STEPS: Final = 200  # for a kind of host, however many there were before; nearly all take less
LONGEST_AT_ONCE: Final = 0.05
"""Seconds of one stretch, which the last kind of host may exceed. Steps alone do not bound the time: to read what a
host with many devices has takes longer than to compare it."""
LONGEST_OF_A_REQUEST: Final = 2.0
"""Seconds of all stretches before the decision about a request."""

_Results: TypeAlias = tuple[npt.NDArray[np.int64], Bools]  # for which stamps of codes, and results

_FIRST_SIZE = 64
_MOST_REQUESTS = 64
_NOTHING = NodeTopology()


def _no_time() -> float:
    return 0.0


class Topologies:
    """Codes for the topologies of hosts, with what is held of them."""

    def __init__(self, monotonic: Callable[[], float] | None = None) -> None:
        """Measure by `monotonic` how long comparing takes; without it only steps are bounded."""
        self._monotonic = monotonic or _no_time
        self._interner: Interner[tuple[str, str]] = Interner()
        # By code: when it got its value, and how many devices are free.
        self._stamps = np.zeros(_FIRST_SIZE, np.int64)
        self._devices = np.zeros(_FIRST_SIZE, np.int64)
        self._pools: dict[int, DevicePools] = {}  # by code, of those with free devices
        self._cells = CellColumns(_FIRST_SIZE)
        # By request: for which stamps of codes the results are, and the results.
        self._results: dict[bytes, _Results] = {}
        self._left = MOST_STEPS_AT_ONCE  # steps of the decision

    def take(self, topology: str, held: str) -> int:
        """Return the code for one more host that has this; raise an error, and take none, if it cannot be read."""
        version = self._interner.version
        code = self._interner.take((topology, held), (topology, held))
        if self._interner.version != version:
            if code >= len(self._stamps):
                self._stamps, self._devices = _larger(self._stamps), _larger(self._devices)
            self._stamps[code] = self._interner.version
            try:
                value = self.value(code)
                free = free_devices(*value)
                self._devices[code] = len(free)
                if free:
                    self._pools[code] = device_pools(free)
                self._cells.set(code, *value)
            except BaseException:
                self.release(code)
                raise
        return code

    def release(self, code: int) -> None:
        """Let one host no longer have a code."""
        if self._interner.release(code):
            self._devices[code] = 0
            self._pools.pop(code, None)
            self._cells.clear(code)

    @property
    def nbytes(self) -> int:
        """The bytes of the columns of all codes, without the results that are kept."""
        return self._stamps.nbytes + self._devices.nbytes + self._cells.nbytes

    def texts(self, code: int) -> tuple[str, str]:
        """Return what a code stands for, as it is stored."""
        return self._interner.value(code)

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

    def suit(self, request: TopologyRequest, codes: Codes) -> Bools:
        """Return for each of these codes whether its cells suit a request (`CellColumns.suit`)."""
        return self._cells.suit(request, codes)

    def begin_decision(self) -> None:
        """Give the next decision its steps."""
        self._left = MOST_STEPS_AT_ONCE

    def count_steps(self, meter: StepMeter) -> None:
        """Count the steps of a search on one host among those of the decision."""
        self._left -= max(0, meter.steps - FREE_STEPS)

    async def ask(self, key: bytes, passes: Passes, codes: Codes, devices: Sequence[DeviceRequest] = ()) -> None:
        """Find out which of these codes pass, before `passing` is called, so that other tasks run meanwhile.

        Codes with too few of these devices do not pass.
        """
        spent, took = 0, 0.0
        while spent < MOST_STEPS_OF_A_REQUEST and took < LONGEST_OF_A_REQUEST:
            most = min(MOST_STEPS_AT_ONCE, MOST_STEPS_OF_A_REQUEST - spent)
            unasked, steps, seconds = self._ask(self._known(key), passes, codes, devices, most, LONGEST_AT_ONCE)
            if not unasked:
                return
            spent, took = spent + steps, took + seconds
            await asyncio.sleep(0)

    def passing(
        self, key: bytes, passes: Passes, codes: Codes, devices: Sequence[DeviceRequest] = ()
    ) -> tuple[Bools, Bools | None]:
        """Return for each of these codes whether it passes, and whether it was not asked; results are kept by key.

        Codes that are not known yet are asked, as far as the decision has steps left and no longer than a stretch
        takes. The second is None if all were.
        """
        stamps, found = known = self._known(key)
        unasked, steps, _ = self._ask(known, passes, codes, devices, self._left, LONGEST_AT_ONCE)
        self._left -= steps
        if not unasked:
            return found.take(codes), None
        log.warning("%d kinds of hosts were not compared with a request, which takes too long", unasked)
        asked: Bools = stamps.take(codes) == self._stamps.take(codes)
        return found.take(codes) & asked, ~asked

    def _known(self, key: bytes) -> _Results:
        known = self._results.get(key)
        if known is None or len(known[0]) != len(self._stamps):
            if len(self._results) >= _MOST_REQUESTS:
                self._results.clear()
            size = len(self._stamps)
            fresh = np.zeros(size, np.int64), np.zeros(size, np.bool_)
            if known is not None:
                fresh[0][: len(known[0])], fresh[1][: len(known[1])] = known
            known = self._results[key] = fresh
        return known

    def _ask(
        self, known: _Results, passes: Passes, codes: Codes, devices: Sequence[DeviceRequest], most: int, longest: float
    ) -> tuple[int, int, float]:
        """Ask about codes until steps or seconds are used up; return how many were not asked, the steps and seconds."""
        stamps, found = known
        unknown = codes[stamps.take(codes) != self._stamps.take(codes)]
        if not len(unknown):
            return 0, 0, 0.0
        # A code may have been released since the caller has read it.
        kinds = [code for code in np.unique(unknown).tolist() if self._interner.is_used(code)]
        spent, took, begun = 0, 0.0, self._monotonic()
        for number, code in enumerate(kinds):
            if spent >= most or took >= longest:
                return len(kinds) - number, spent, took
            meter = StepMeter()
            enough = may_suffice(self._pools.get(code, ()), devices)
            found[code] = enough and passes(*self.value(code), meter)
            stamps[code] = self._stamps[code]
            spent += max(0, meter.steps - FREE_STEPS)
            took = self._monotonic() - begun
        return 0, spent, took


def _larger(column: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    larger = np.zeros(2 * len(column), column.dtype)
    larger[: len(column)] = column
    return larger
