"""SimpleCIDRAffinityFilter: hosts whose address is near one that the request names."""

import ipaddress
from collections.abc import Mapping, Sequence

from micronova.objects.errors import Invalid
from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.host_columns import Bools
from micronova.scheduler.host_view import HostView

_DEFAULT_CIDR = "/24"


class SimpleCIDRAffinityFilter(HostFilter):
    """Passes hosts in the network of the hint `build_near_host_ip`; the hint `cidr` is its prefix, `/24` by default."""

    name = "SimpleCIDRAffinityFilter"
    predicate = "has an address in the requested network"
    lack = "have other addresses"
    scope = Scope.REQUEST
    hints = frozenset({"build_near_host_ip", "cidr"})

    def check(self, hints: Mapping[str, Sequence[str]], extra_specs: Mapping[str, str]) -> None:
        network_of(hints)

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        network = network_of(spec.hints)
        return None if network is None else hosts.in_network(network)


def network_of(hints: Mapping[str, Sequence[str]]) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Return the network that the hints name, None if they name none; raise Invalid if it is no network."""
    near, prefix = hints.get("build_near_host_ip"), hints.get("cidr")
    if not near:
        if prefix:
            raise Invalid("The scheduler hint cidr needs the hint build_near_host_ip, an IP address of a host.")
        return None
    address, cidr = ", ".join(near), ", ".join(prefix or [_DEFAULT_CIDR])
    if cidr.startswith("/"):
        try:
            return ipaddress.ip_network(address + cidr, strict=False)
        except ValueError:
            pass
    raise Invalid(
        f"The scheduler hints build_near_host_ip {address} and cidr {cidr} name no network: the first must be an IP "
        "address, the second the length of a prefix such as /24."
    )
