"""The hosts that passed the filters, ranked by the weighted sum of the weighers.

A ranking lasts while the instances of one request are placed. After each, only what changed is weighed again.
"""

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import Scope
from micronova.scheduler.host_table import Bools, Floats, HostTable, HostView
from micronova.scheduler.weights.base import HostWeigher

log = logging.getLogger(__name__)


class _Weights:
    """One weigher's raw weights, and the same scaled to 0…1 and multiplied."""

    __slots__ = ("factor", "high", "low", "raw", "scaled", "weigher")

    def __init__(self, weigher: HostWeigher, raw: npt.NDArray[Any]) -> None:
        self.weigher = weigher
        self.raw = raw
        self.low = self.high = self.factor = 0.0
        self.scaled: Floats | None = None  # None while all hosts have the same weight, which decides nothing
        self.scale()

    def scale(self) -> None:
        self.scaled = None
        if len(self.raw):
            self.low, self.high = float(self.raw.min()), float(self.raw.max())
            if self.high > self.low:
                self.factor = self.weigher.multiplier / (self.high - self.low)
                scaled: Floats = self.raw - self.low
                scaled *= self.factor
                self.scaled = scaled

    def change(self, positions: list[int], numbers: npt.NDArray[Any]) -> bool:
        """Set new raw weights of a few hosts; return whether the range changed and all were scaled again."""
        moved = False
        for position, number in zip(positions, numbers.tolist(), strict=True):
            old = self.raw[position]
            if number != old:
                self.raw[position] = number
                moved = moved or old <= self.low or old >= self.high or not self.low <= number <= self.high
                if self.scaled is not None:
                    self.scaled[position] = (number - self.low) * self.factor
        if moved:
            self.scale()
        return moved


class Ranking:
    """Hosts with their weights. A position is an index in the ranking, a row an index in the table."""

    def __init__(
        self,
        table: HostTable,
        hosts: HostView,
        weighers: Iterable[HostWeigher],
        spec: RequestSpec,
        lasting: bool,
    ) -> None:
        self._table = table
        self.hosts = hosts
        self._parts: list[_Weights] = []
        for weigher in weighers:
            raw = _weigh(weigher, self.hosts, spec)
            if raw is None:
                if not (lasting and weigher.scope is Scope.ALL):
                    continue
                raw = np.zeros(len(self.hosts))  # it may distinguish hosts once an instance is placed
            self._parts.append(_Weights(weigher, np.array(raw, np.float64) if lasting else raw))
        self.totals = self._sum()

    def __len__(self) -> int:
        return len(self.totals)

    def row(self, position: int) -> int:
        """Return the table's row at a position."""
        return self.hosts.row(position)

    def contributions(self, position: int) -> dict[str, float]:
        """Return what each weigher added to a host's weight."""
        return {
            part.weigher.name or type(part.weigher).__name__: float(part.scaled[position])
            for part in self._parts
            if part.scaled is not None
        }

    def positions_of(self, host: str) -> list[int]:
        """Return the positions of a host's nodes that are still ranked."""
        rows, ranked = self._table.rows_of_host(host), self.hosts.rows
        if isinstance(ranked, slice):
            return rows if not ranked.start else [row - ranked.start for row in rows]
        found = []
        for row in rows:
            place = int(ranked.searchsorted(row))
            if place < len(ranked) and ranked[place] == row:
                found.append(place)
        return found

    def keep(self, mask: Bools) -> None:
        """Keep only the hosts of the mask, and scale their weights anew."""
        self.hosts = self.hosts.only(mask)
        for part in self._parts:
            part.raw = part.raw[mask]
            part.scale()
        self.totals = self._sum()

    def weigh_again(self, positions: list[int], spec: RequestSpec) -> None:
        """Update the weights after an instance was placed on the hosts at these positions."""
        if not len(self):
            return
        few = self._table.view(np.array([self.row(position) for position in positions], np.intp))
        all_changed = False
        for part in self._parts:
            scope = part.weigher.scope
            if scope is Scope.ALL:
                raw = _weigh(part.weigher, self.hosts, spec)
                part.raw = np.zeros(len(self)) if raw is None else np.array(raw, np.float64)
                part.scale()
                all_changed = True
            elif scope is Scope.HOST:
                raw = _weigh(part.weigher, few, spec)
                if raw is not None and part.change(positions, raw):
                    all_changed = True
        if all_changed:
            self.totals = self._sum()
        else:
            for position in positions:
                scaled = [part.scaled[position] for part in self._parts if part.scaled is not None]
                self.totals[position] = sum(scaled)

    def best(self, count: int, *, without_host: str = "") -> list[int]:
        """Return the rows of the best hosts, one row per host."""
        left = self.totals.copy()
        left[self.positions_of(without_host)] = -np.inf
        rows: list[int] = []
        while len(rows) < count and len(left):
            position = int(left.argmax())
            if left[position] == -np.inf:
                break
            row = self.row(position)
            rows.append(row)
            left[self.positions_of(self._table.selections[row].host)] = -np.inf
        return rows

    def _sum(self) -> Floats:
        scaled = [part.scaled for part in self._parts if part.scaled is not None]
        if not scaled:
            return np.zeros(len(self.hosts))
        total = scaled[0].copy()
        for each in scaled[1:]:
            total += each
        return total


def _weigh(weigher: HostWeigher, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
    """Return a weigher's weights, None if it fails, which is reported."""
    try:
        raw = weigher.weigh(hosts, spec)
        if raw is None:
            return None
        if raw.shape != (len(hosts),) or not (raw.dtype.kind in "iu" or np.isfinite(raw).all()):
            raise ValueError("a weigher gives one finite number per host")
        return raw
    except Exception:  # a plugin may raise anything; the decision goes on without it
        log.exception("the weigher %s failed; its weights are ignored", weigher.name or type(weigher).__name__)
        return None
