"""Filters that keep the members of a server group on different hosts, or on one host.

They use the members that the scheduler read. The claim counts them again in its transaction, so that two schedulers
cannot both add the last member. What claims enforce is asked in any case, also about forced hosts.
"""

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.host_columns import Bools
from micronova.scheduler.host_view import HostView


class ServerGroupAntiAffinityFilter(HostFilter):
    """Removes hosts that have as many members of the group as its rule allows."""

    name = "ServerGroupAntiAffinityFilter"
    always = True
    lack = "have members of the group"
    scope = Scope.HOST

    def describe(self, spec: RequestSpec) -> str:
        most = spec.server_group.max_server_per_host if spec.server_group else 1
        few = "is without a member" if most == 1 else f"has fewer than {most} members"
        return f"{few} of the anti-affinity group"

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        group = spec.server_group
        if group is None or group.policy != "anti-affinity":
            return None
        return hosts.by_host(group.hosts) < group.max_server_per_host


class ServerGroupAffinityFilter(HostFilter):
    """Passes only hosts with members of the group, if there are any."""

    name = "ServerGroupAffinityFilter"
    always = True
    predicate = "has the other members of the affinity group"
    lack = "have no member of the group"
    scope = Scope.ALL  # the first member changes the mask of all other hosts

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        group = spec.server_group
        if group is None or group.policy != "affinity" or not any(group.hosts.values()):
            return None
        return hosts.by_host(group.hosts) > 0
