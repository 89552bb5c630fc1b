"""Filters for hints that name other servers: be on one of their hosts, or on none of them.

`SERVER_HINTS` lists these hints. Only servers of the same project count. Of others a request learns nothing: they are
as if they did not exist.
"""

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.host_columns import Bools
from micronova.scheduler.host_view import HostView


class SameHostFilter(HostFilter):
    """Passes only the hosts of the servers that the hint `same_host` names."""

    name = "SameHostFilter"
    predicate = "has one of the servers of the hint same_host"
    lack = "have none of these servers"
    scope = Scope.REQUEST
    hints = frozenset({"same_host"})

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        if not spec.hints.get("same_host"):
            return None
        return hosts.on_hosts(spec.hinted_hosts.get("same_host", ()))


class DifferentHostFilter(HostFilter):
    """Removes the hosts of the servers that the hint `different_host` names."""

    name = "DifferentHostFilter"
    predicate = "is without the servers of the hint different_host"
    lack = "have one of these servers"
    scope = Scope.REQUEST
    hints = frozenset({"different_host"})

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        if not spec.hints.get("different_host"):
            return None
        return ~hosts.on_hosts(spec.hinted_hosts.get("different_host", ()))
