"""Filters on NUMA cells, dedicated CPUs, memory pages and PCI devices.

The claim finds the assignment of an instance anew by what is held then, so two schedulers cannot both use the last one.
These filters are always in effect, also for a host that an admin named: a claim on a host without these cannot succeed.
"""

import msgspec

from micronova.objects.device_fitting import choose_devices
from micronova.objects.fitting import fit
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import RequestSpec
from micronova.objects.topology import TopologyRequest
from micronova.objects.topology_request import topology_request
from micronova.placement import extra_specs
from micronova.scheduler.cell_columns import decides
from micronova.scheduler.filters.base import FilterOptions, HostFilter, Scope
from micronova.scheduler.filters.resources import has_free
from micronova.scheduler.host_table import Bools, HostView


class _TopologyFilter(HostFilter):
    """Reads a request once, although it is asked again for each instance."""

    scope = Scope.HOST
    always = True

    def __init__(self, options: FilterOptions) -> None:
        super().__init__(options)
        self._last: tuple[Flavor | None, ImageMeta | None, TopologyRequest | None, bytes] = (None, None, None, b"")

    def _request(self, spec: RequestSpec) -> tuple[TopologyRequest | None, bytes]:
        flavor, image, request, key = self._last
        if flavor is not spec.flavor or image is not spec.image:
            request = topology_request(spec.flavor, spec.image, self.options.pci_aliases)
            key = self.name.encode() + msgspec.msgpack.encode(request)
            self._last = spec.flavor, spec.image, request, key
        return request, key


class NUMATopologyFilter(_TopologyFilter):
    """Passes hosts whose NUMA cells hold those of the guest, with its dedicated CPUs, pages and PCI devices."""

    name = "NUMATopologyFilter"
    predicate = "has NUMA nodes with the CPUs and the memory that the flavor asks for"

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        request, key = self._request(spec)
        if request is None or not request.cells:
            return None
        wanted = request
        # Hosts that have the amounts at all: only for these an assignment is looked for.
        suited = hosts.with_cells(wanted)
        if wanted.devices:
            suited &= hosts.free_devices() >= sum(each.count for each in wanted.devices)
        for name, amount in extra_specs.node_resources(spec.flavor, spec.image).items():
            free = has_free(hosts, name, amount)
            if free is not None:
                suited &= free
        if decides(wanted):
            return suited
        return hosts.by_topology(key, lambda topology, use: fit(topology, use, wanted) is not None, suited)


class PciPassthroughFilter(_TopologyFilter):
    """Passes hosts with enough free PCI devices of the aliases that the flavor names."""

    name = "PciPassthroughFilter"
    predicate = "has the PCI devices free that the flavor asks for"
    extra_specs = frozenset({"pci_passthrough"})

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        request, key = self._request(spec)
        if request is None or not request.devices:
            return None
        devices = request.devices
        return hosts.by_topology(
            key, lambda topology, use: choose_devices(topology, use, devices, None) is not None, None
        )
