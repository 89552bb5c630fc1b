"""What flavor and image of an instance ask for of its host: amounts of resources, NUMA nodes, PCI devices."""

from collections.abc import Mapping

from micronova.objects.flavor import Flavor
from micronova.objects.guest_cpus import AMOUNT, CpuRequest, cpu_request
from micronova.objects.guest_properties import GuestProperties
from micronova.objects.image import ImageMeta
from micronova.objects.pci_devices import Alias, device_requests
from micronova.objects.remember_last import RememberLast
from micronova.objects.topology import CellRequest, TopologyRequest

# Extra specs and properties without which an instance has no NUMA nodes and no devices of its own.
_CONCERNED = ("hw:cpu_policy", AMOUNT, "hw:numa_nodes", "hw:mem_page_size", "pci_passthrough:alias")
_CONCERNED_IMAGE = ("hw_cpu_policy", "hw_numa_nodes", "hw_mem_page_size")


def is_concerned(flavor: Flavor, image: ImageMeta | None) -> bool:
    """Return whether an instance may have NUMA nodes, dedicated CPUs or PCI devices."""
    properties: Mapping[str, object] = {} if image is None else image.properties
    return any(name in flavor.extra_specs for name in _CONCERNED) or any(
        name in properties for name in _CONCERNED_IMAGE
    )


def resources_of(flavor: Flavor, image: ImageMeta | None) -> dict[str, int]:
    """Return the amounts that an instance claims by resource class; dedicated CPUs are PCPU, others VCPU."""
    amounts = flavor.resources()
    if not is_concerned(flavor, image):
        return amounts
    dedicated = _cpus(flavor, image)
    split = {"VCPU": flavor.vcpus - len(dedicated.pinned), "PCPU": dedicated.dedicated}
    return {name: amount for name, amount in (amounts | split).items() if amount}


def topology_request(flavor: Flavor, image: ImageMeta | None, aliases: Mapping[str, Alias]) -> TopologyRequest | None:
    """Return the NUMA nodes and devices that an instance asks for, None if it asks for none; raise Invalid."""
    if not is_concerned(flavor, image):
        return None
    cpus = _cpus(flavor, image)
    devices = device_requests(GuestProperties(flavor, image), aliases)
    if not cpus.cells and not devices:
        return None
    pinned = frozenset(cpus.pinned)
    return TopologyRequest(
        cells=tuple(
            CellRequest(
                id=cell.id,
                memory_mb=cell.memory_mb,
                shared=tuple(vcpu for vcpu in cell.vcpus if vcpu not in pinned),
                pinned=tuple(vcpu for vcpu in cell.vcpus if vcpu in pinned),
            )
            for cell in cpus.cells
        ),
        is_pinned=cpus.policy != "shared",
        has_shared=cpus.policy != "dedicated",
        thread_policy=cpus.thread_policy,
        isolates_emulator=cpus.isolates_emulator,
        page_size=cpus.page_size,
        devices=devices,
    )


def _find_cpus(flavor: Flavor, image: ImageMeta | None) -> CpuRequest:
    return cpu_request(GuestProperties(flavor, image), flavor.vcpus, flavor.ram)


_cpus = RememberLast(_find_cpus)
