"""Filters on NUMA cells, dedicated CPUs, memory pages and PCI devices.

The claim finds the assignment of an instance anew by what is held then, so two schedulers cannot both use the last one.
These filters are always in effect, also for a host that an admin named: a claim on a host without these cannot succeed.
"""

from collections.abc import Sequence

import msgspec

from micronova.objects.device_fitting import choose_devices
from micronova.objects.fitting import fit
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import RequestSpec
from micronova.objects.topology import DeviceRequest, TopologyRequest
from micronova.objects.topology_request import topology_request
from micronova.placement import extra_specs
from micronova.scheduler.cell_columns import decides
from micronova.scheduler.filters.base import Compared, FilterOptions, HostFilter, Scope
from micronova.scheduler.filters.resources import has_free
from micronova.scheduler.host_columns import Bools
from micronova.scheduler.host_view import HostView
from micronova.scheduler.topologies import Passes


class _TopologyFilter(HostFilter):
    """Reads a request once, although it is asked again for each instance."""

    scope = Scope.HOST
    always = True
    asks_remaining = True

    def __init__(self, options: FilterOptions) -> None:
        super().__init__(options)
        self._last: tuple[Flavor | None, ImageMeta | None, TopologyRequest | None, bytes] = (None, None, None, b"")

    def concerns(self, spec: RequestSpec) -> bool:
        return self._request(spec)[0] is not None

    def _by_topology(
        self, hosts: HostView, key: bytes, passes: Passes, among: Bools | None, devices: Sequence[DeviceRequest]
    ) -> Compared:
        return Compared(*hosts.by_topology(key, passes, among, devices))

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
    lack = "have no such NUMA nodes free"

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | Compared | None:
        request, key = self._request(spec)
        if request is None or not request.cells:
            return None
        suited = self._suited(hosts, spec, request)
        return suited if decides(request) else self._by_topology(hosts, key, _fits(request), suited, request.devices)

    async def prepare(self, hosts: HostView, spec: RequestSpec) -> None:
        request, key = self._request(spec)
        if request is not None and request.cells and not decides(request):
            await hosts.ask_topologies(key, _fits(request), self._suited(hosts, spec, request), request.devices)

    def _suited(self, hosts: HostView, spec: RequestSpec, request: TopologyRequest) -> Bools:
        """Return which hosts have the amounts at all: only for these an assignment is looked for."""
        suited = hosts.with_cells(request)
        if request.devices:
            suited &= hosts.free_devices() >= sum(each.count for each in request.devices)
        for name, amount in extra_specs.node_resources(spec.flavor, spec.image).items():
            free = has_free(hosts, name, amount)
            if free is not None:
                suited &= free
        return suited


class PciPassthroughFilter(_TopologyFilter):
    """Passes hosts with enough free PCI devices of the aliases that the flavor names."""

    name = "PciPassthroughFilter"
    predicate = "has the PCI devices free that the flavor asks for"
    lack = "have no such PCI devices free"
    extra_specs = frozenset({"pci_passthrough"})

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | Compared | None:
        request, key = self._request(spec)
        if request is None or not request.devices:
            return None
        return self._by_topology(hosts, key, _has_devices(request), None, request.devices)

    async def prepare(self, hosts: HostView, spec: RequestSpec) -> None:
        request, key = self._request(spec)
        if request is not None and request.devices:
            await hosts.ask_topologies(key, _has_devices(request), None, request.devices)


def _fits(request: TopologyRequest) -> Passes:
    return lambda topology, use, meter: fit(topology, use, request, meter) is not None


def _has_devices(request: TopologyRequest) -> Passes:
    return lambda topology, use, meter: choose_devices(topology, use, request.devices, None, meter) is not None
