"""Weighers that prefer hosts with free resources (or, with a negative multiplier, full ones)."""

from typing import Any

import numpy.typing as npt

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import Scope
from micronova.scheduler.host_view import HostView
from micronova.scheduler.weights.base import HostWeigher


class RAMWeigher(HostWeigher):
    """More free memory is better."""

    name = "RAMWeigher"
    setting = "ram_weight_multiplier"
    scope = Scope.HOST
    from_zero = True

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        return hosts.free("MEMORY_MB")


class CPUWeigher(HostWeigher):
    """More free CPUs are better."""

    name = "CPUWeigher"
    setting = "cpu_weight_multiplier"
    scope = Scope.HOST
    from_zero = True

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        return hosts.free("VCPU")


class DiskWeigher(HostWeigher):
    """More free disk is better."""

    name = "DiskWeigher"
    setting = "disk_weight_multiplier"
    scope = Scope.HOST
    from_zero = True

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        return hosts.free("DISK_GB")
