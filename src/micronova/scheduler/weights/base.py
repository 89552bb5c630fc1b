"""The contract of a weigher: hosts in, a vector of weights out. The host with the largest weighted sum is selected.

The weight of a host depends only on that host and the request. CONTRIBUTING.md has the checklist to add a weigher.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from micronova.conf.control import FilterSchedulerSettings, MetricsSettings
from micronova.objects.scheduling import HostState, RequestSpec
from micronova.scheduler.aggregate_metadata import lowest_of
from micronova.scheduler.filters.base import Scope
from micronova.scheduler.host_columns import Aggregates, Floats
from micronova.scheduler.host_view import HostView


class WeigherOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of weighers."""

    settings: FilterSchedulerSettings = FilterSchedulerSettings()
    metrics: MetricsSettings = MetricsSettings()


class HostWeigher(ABC):
    """Weighs hosts in any unit; the weights are scaled to 0…1 before they are multiplied and summed.

    The lowest weight becomes 0 and the highest 1. With `from_zero` it is the weight 0 that becomes 0: then it counts
    how much a host has, not only that it has more than the others. A weight below counts as 0.
    """

    name: ClassVar[str] = ""
    scope: ClassVar[Scope] = Scope.ALL
    from_zero: ClassVar[bool] = False
    setting: ClassVar[str] = ""  # the multiplier in the settings and in the metadata of aggregates
    lower_is_better: ClassVar[bool] = False  # the multiplier is negated

    def __init__(self, multiplier: float = 1.0) -> None:
        self.multiplier = multiplier  # a negative one reverses the preference
        self._key = ("multiplier", self.setting, multiplier, self.lower_is_better)

    @classmethod
    def of(cls, multiplier: float, options: WeigherOptions) -> "HostWeigher":
        """Return a weigher with these settings."""
        return cls(multiplier)

    def multipliers(self, hosts: HostView) -> Floats | float:
        """Return the multiplier of each host, or one for all: that of its aggregates, or that of the settings."""
        return hosts.numbers_by_aggregates(self._key, self._multiplier) if self.setting else self._multiplier(())

    def _multiplier(self, aggregates: Aggregates) -> float:
        found = lowest_of(aggregates, self.setting, self.multiplier)
        return -found if self.lower_is_better else found

    @abstractmethod
    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        """Return a number per host, or None if the request does not concern this weigher.

        A positive multiplier prefers high numbers, or low ones with `lower_is_better`.
        """


def weigher_of(name: str, function: Callable[[HostState, RequestSpec], float], multiplier: float) -> HostWeigher:
    """Return a weigher that asks a plain function about each host."""

    class OfFunction(HostWeigher):
        def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
            return np.fromiter((function(hosts.state(p), spec) for p in range(len(hosts))), np.float64, len(hosts))

    OfFunction.name = name
    return OfFunction(multiplier)
