"""A weigher that keeps hosts with PCI devices free for instances that want them."""

from typing import Any

import numpy as np
import numpy.typing as npt

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import Scope
from micronova.scheduler.host_view import HostView
from micronova.scheduler.weights.base import HostWeigher

MOST_DEVICES = 100
"""With more free devices than this there is no lack of them."""


class PCIWeigher(HostWeigher):
    """Fewer free PCI devices are better: for those who want none, and for those who want some, so that they stack."""

    name = "PCIWeigher"
    setting = "pci_weight_multiplier"
    scope = Scope.HOST

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        if not hosts.has_devices():
            return None
        free = hosts.free_devices()
        return MOST_DEVICES - np.minimum(free, MOST_DEVICES - 1) if free.any() else None
