"""Weighers that prefer hosts with free resources (or, with a negative multiplier, full ones) and without failures."""

from typing import Any

import numpy.typing as npt

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import Scope
from micronova.scheduler.host_table import HostView
from micronova.scheduler.weights.base import HostWeigher


class RAMWeigher(HostWeigher):
    """More free memory is better."""

    name = "RAMWeigher"
    scope = Scope.HOST

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        return hosts.free("MEMORY_MB")


class CPUWeigher(HostWeigher):
    """More free CPUs are better."""

    name = "CPUWeigher"
    scope = Scope.HOST

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        return hosts.free("VCPU")


class DiskWeigher(HostWeigher):
    """More free disk is better."""

    name = "DiskWeigher"
    scope = Scope.HOST

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        return hosts.free("DISK_GB")


class BuildFailureWeigher(HostWeigher):
    """Fewer recent failed builds are better."""

    name = "BuildFailureWeigher"
    scope = Scope.REQUEST

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        failed = hosts.column("failed_builds")
        return -failed if failed.any() else None
