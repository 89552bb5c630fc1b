"""The hosts that passed the filters, ranked by the weighted sum of the weighers.

A ranking lasts while the instances of one request are placed. After each, only what changed is weighed again.
"""

import logging
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import Scope
from micronova.scheduler.host_columns import Bools, Floats
from micronova.scheduler.host_table import HostTable
from micronova.scheduler.host_view import HostView
from micronova.scheduler.weights.base import HostWeigher

log = logging.getLogger(__name__)


class _Raw:
    """Weights as a weigher gives them, with the smallest and the largest; 0 if there are none."""

    __slots__ = ("high", "low", "weights")

    def __init__(self, weights: npt.NDArray[Any]) -> None:
        self.weights = weights
        self.low, self.high = (float(weights.min()), float(weights.max())) if len(weights) else (0.0, 0.0)

    def copy(self) -> "_Raw":
        """Return weights that can be changed."""
        return _Raw(np.array(self.weights, np.float64))


class _Weights:
    """One weigher's raw weights, and the same scaled to 0…1 and multiplied."""

    __slots__ = ("_multipliers", "high", "low", "raw", "scaled", "weigher")

    def __init__(self, weigher: HostWeigher, raw: _Raw, multipliers: Floats | float) -> None:
        self.weigher = weigher
        self._multipliers = multipliers
        self.low = self.high = 0.0
        self.scaled: Floats | None = None  # None while all hosts have the weight 0, which decides nothing
        self.set(raw)

    def set(self, raw: _Raw) -> None:
        """Set new raw weights of all hosts."""
        self.raw = np.maximum(raw.weights, 0) if self.weigher.from_zero and raw.low < 0 else raw.weights
        self._scale(raw.low, raw.high)

    def _scale(self, low: float, high: float) -> None:
        self.scaled = None
        self.low, self.high = 0.0 if self.weigher.from_zero else low, high
        if self.high > self.low:
            factor = self._multipliers / (self.high - self.low)
            self.scaled = (self.raw - self.low) * factor if self.low else self.raw * factor

    def _scale_again(self) -> None:
        if len(self.raw):
            self._scale(float(self.raw.min()), float(self.raw.max()))
        else:
            self.scaled = None

    def keep(self, positions: npt.NDArray[np.intp]) -> None:
        """Keep only the hosts at these positions."""
        self.raw = self.raw.take(positions)
        if not isinstance(self._multipliers, float):
            self._multipliers = self._multipliers.take(positions)
        self._scale_again()

    def _multiplier(self, position: int) -> float:
        return self._multipliers if isinstance(self._multipliers, float) else float(self._multipliers[position])

    def change(self, positions: list[int], numbers: list[float]) -> bool:
        """Set new raw weights of a few hosts; return whether the range changed and all were scaled again."""
        moved = False
        for position, number in zip(positions, numbers, strict=True):
            old = self.raw[position]
            if self.weigher.from_zero:
                number = max(number, 0.0)
            if number != old:
                self.raw[position] = number
                lowest = old <= self.low and not self.weigher.from_zero
                moved = moved or lowest or old >= self.high or not self.low <= number <= self.high
                if self.scaled is not None:
                    share = (number - self.low) / (self.high - self.low)
                    self.scaled[position] = share * self._multiplier(position)
        if moved:
            self._scale_again()
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
            multipliers = weigher.multipliers(self.hosts)
            if isinstance(multipliers, float) and not multipliers:
                continue
            raw = _weigh(weigher, self.hosts, spec)
            if raw is None:
                if not (lasting and weigher.scope is Scope.ALL):
                    continue
                raw = _Raw(np.zeros(len(self.hosts)))  # it may distinguish hosts once an instance is placed
            self._parts.append(_Weights(weigher, raw.copy() if lasting else raw, multipliers))
        self.totals = self._sum()

    def __len__(self) -> int:
        return len(self.totals)

    def row(self, position: int) -> int:
        """Return the table's row at a position."""
        return self.hosts.row(position)

    def contributions(self, position: int) -> dict[str, float]:
        """Return what each weigher added to a host's weight."""
        return {_name(part.weigher): float(part.scaled[position]) for part in self._parts if part.scaled is not None}

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
        positions = np.flatnonzero(mask)  # faster than the mask for each of them
        self.hosts = self.hosts.at(positions)
        for part in self._parts:
            part.keep(positions)
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
                part.set(_Raw(np.zeros(len(self))) if raw is None else raw.copy())
                all_changed = True
            elif scope is Scope.HOST:
                numbers = _weigh_few(part.weigher, few, spec)
                if numbers is not None and part.change(positions, numbers):
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


def _weigh(weigher: HostWeigher, hosts: HostView, spec: RequestSpec) -> _Raw | None:
    """Return a weigher's weights, None if it fails, which is reported."""
    try:
        raw = weigher.weigh(hosts, spec)
        if raw is None:
            return None
        _check_form(raw, hosts)
        found = _Raw(raw)
        _check_finite((found.low, found.high))  # NaN is the smallest and the largest number
        return found
    except Exception:  # a plugin may raise anything; the decision goes on without it
        _report(weigher)
        return None


def _weigh_few(weigher: HostWeigher, hosts: HostView, spec: RequestSpec) -> list[float] | None:
    """Return the weights as `_weigh` does, of a few hosts, for which lists are faster."""
    try:
        raw = weigher.weigh(hosts, spec)
        if raw is None:
            return None
        _check_form(raw, hosts)
        numbers: list[float] = raw.tolist()
        _check_finite(numbers)
        return numbers
    except Exception:  # as above
        _report(weigher)
        return None


def _check_form(raw: npt.NDArray[Any], hosts: HostView) -> None:
    if raw.shape != (len(hosts),) or raw.dtype.kind not in "iuf":
        raise ValueError("a weigher gives one number per host")


def _check_finite(numbers: Iterable[float]) -> None:
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a weigher gives finite numbers")


def _report(weigher: HostWeigher) -> None:
    log.exception("the weigher %s failed; its weights are ignored", _name(weigher))


def _name(weigher: HostWeigher) -> str:
    return weigher.name or type(weigher).__name__
