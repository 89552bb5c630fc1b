"""The contract of a weigher: hosts in, a vector of weights out. The host with the largest weighted sum is selected.

The weight of a host depends only on that host and the request. CONTRIBUTING.md has the checklist to add a weigher.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy.typing as npt

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import Scope
from micronova.scheduler.host_table import HostView


class HostWeigher(ABC):
    """Weighs hosts in any unit; the weights are scaled to 0…1 before they are summed."""

    name: ClassVar[str] = ""
    scope: ClassVar[Scope] = Scope.ALL

    def __init__(self, multiplier: float = 1.0) -> None:
        self.multiplier = multiplier  # negative prefers the hosts with the smallest weight

    @abstractmethod
    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        """Return a number per host (more is better), or None if the request does not concern this weigher."""
