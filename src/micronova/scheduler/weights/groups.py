"""Weighers for server groups with the policies soft-affinity and soft-anti-affinity."""

from typing import Any

import numpy.typing as npt

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import Scope
from micronova.scheduler.host_view import HostView
from micronova.scheduler.weights.base import HostWeigher


class ServerGroupSoftAffinityWeigher(HostWeigher):
    """More members of the group on the host are better."""

    name = "ServerGroupSoftAffinityWeigher"
    setting = "soft_affinity_weight_multiplier"
    scope = Scope.HOST

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        if spec.server_group is None or spec.server_group.policy != "soft-affinity":
            return None
        return hosts.by_host(spec.server_group.hosts)


class ServerGroupSoftAntiAffinityWeigher(HostWeigher):
    """Fewer members of the group on the host are better."""

    name = "ServerGroupSoftAntiAffinityWeigher"
    setting = "soft_anti_affinity_weight_multiplier"
    scope = Scope.HOST

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        if spec.server_group is None or spec.server_group.policy != "soft-anti-affinity":
            return None
        return -hosts.by_host(spec.server_group.hosts)
