"""Weighers that prefer hosts by what they are, do and measure."""

from typing import Any

import numpy as np
import numpy.typing as npt

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import Scope
from micronova.scheduler.host_view import HostView
from micronova.scheduler.weights.base import HostWeigher, WeigherOptions


class BuildFailureWeigher(HostWeigher):
    """Fewer recent failed builds are better."""

    name = "BuildFailureWeigher"
    setting = "build_failure_weight_multiplier"
    scope = Scope.REQUEST
    lower_is_better = True

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        return None if hosts.uniform("failed_builds") else hosts.column("failed_builds")


class IoOpsWeigher(HostWeigher):
    """Hosts that work on more servers; the default multiplier is negative, so that fewer are better."""

    name = "IoOpsWeigher"
    setting = "io_ops_weight_multiplier"
    scope = Scope.HOST
    from_zero = True

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        return hosts.column("num_io_ops")


class NumInstancesWeigher(HostWeigher):
    """Hosts with more servers; a negative multiplier makes fewer better."""

    name = "NumInstancesWeigher"
    setting = "num_instances_weight_multiplier"
    scope = Scope.HOST

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        return hosts.column("num_instances")


class HypervisorVersionWeigher(HostWeigher):
    """Newer hypervisors are better."""

    name = "HypervisorVersionWeigher"
    setting = "hypervisor_version_weight_multiplier"
    scope = Scope.REQUEST

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        return None if hosts.uniform("hypervisor_version") else hosts.column("hypervisor_version")


class MetricsWeigher(HostWeigher):
    """The sum of the metrics that `metrics.weight_setting` names, each times its number."""

    name = "MetricsWeigher"
    setting = "metrics_weight_multiplier"
    scope = Scope.REQUEST

    def __init__(self, multiplier: float = 1.0, ratios: dict[str, float] | None = None, lacking: float = 0.0) -> None:
        super().__init__(multiplier)
        self._ratios = {name: ratio for name, ratio in (ratios or {}).items() if ratio}
        self._lacking = lacking  # the weight of hosts without one of the metrics

    @classmethod
    def of(cls, multiplier: float, options: WeigherOptions) -> "MetricsWeigher":
        return cls(multiplier, options.metrics.ratios(), options.metrics.weight_of_unavailable)

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        if not self._ratios:
            return None
        total = np.zeros(len(hosts))
        for name, ratio in self._ratios.items():
            total += hosts.metric(name) * ratio
        return np.where(np.isnan(total), self._lacking, total)


class ImagePropertiesWeigher(HostWeigher):
    """Hosts with more servers whose images have the same properties as the requested one."""

    name = "ImagePropertiesWeigher"
    setting = "image_props_weight_multiplier"
    scope = Scope.REQUEST

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        return hosts.by_host(spec.alike_images, dtype=np.float64) if spec.alike_images else None
