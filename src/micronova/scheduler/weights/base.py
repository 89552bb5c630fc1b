"""The contract of a weigher: a vector over the hosts that passed; the largest weighted sum wins.

To add one: subclass `HostWeigher`, let the weight of a host depend on that host (and the request) alone, give
it the narrowest `scope` that is true, and name it in `weights/registry.py` or as an entry point of
`micronova.weighers`.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy.typing as npt

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import Scope
from micronova.scheduler.host_table import HostView


class HostWeigher(ABC):
    """Says how well each host suits, in units of its own: all are brought to 0…1 before they are summed."""

    name: ClassVar[str] = ""
    scope: ClassVar[Scope] = Scope.ALL

    def __init__(self, multiplier: float = 1.0) -> None:
        self.multiplier = multiplier  # negative: the other way round

    @abstractmethod
    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        """Give a number per host, more is better; None if the request does not concern this weigher."""
