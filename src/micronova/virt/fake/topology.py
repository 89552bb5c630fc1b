"""The NUMA cells, PCI devices and mediated devices of a simulated host, by its settings."""

from typing import Annotated

import msgspec

from micronova.conf.hosts import FakeSettings
from micronova.objects.cpu_sets import parse_cpus
from micronova.objects.errors import Invalid
from micronova.objects.mediated_devices import NO_TYPES, CapableDevice, MdevTypes, device_name, offered
from micronova.objects.topology import MOST_MDEVS, HostCell, MdevParent, MemoryPages, NodeTopology, PciDevice
from micronova.objects.wrong_values import wrong_value

_SMALL, _LARGE, _HUGE = 4, 2048, 1048576  # KiB


class _MdevDevice(msgspec.Struct, forbid_unknown_fields=True):
    """One of `fake.mdev_devices`."""

    address: str
    types: dict[str, Annotated[int, msgspec.Meta(ge=0, le=MOST_MDEVS)]]


def topology_of(settings: FakeSettings, types: MdevTypes = NO_TYPES) -> NodeTopology:
    """Return the topology; raise Invalid if the settings are impossible."""
    nodes, threads = settings.numa_nodes, settings.threads_per_core
    if settings.vcpus % (nodes * threads) or settings.memory_mb % nodes:
        raise Invalid(
            f"fake.vcpus {settings.vcpus} and fake.memory_mb {settings.memory_mb} cannot be divided evenly by "
            f"fake.numa_nodes {nodes} with {threads} threads per core."
        )
    try:
        dedicated = set(parse_cpus(settings.cpu_dedicated_set))
    except ValueError as error:
        raise Invalid(f"fake.cpu_dedicated_set is wrong: {error}.") from None
    if max(dedicated, default=0) >= settings.vcpus:
        raise Invalid(f"fake.cpu_dedicated_set names CPUs above {settings.vcpus - 1}.")
    huge = settings.pages_2mb * _LARGE + settings.pages_1gb * _HUGE
    memory = settings.memory_mb // nodes
    if huge > memory * 1024:
        raise Invalid("fake.pages_2mb and fake.pages_1gb are more memory than a NUMA node has.")
    pages = [(_SMALL, (memory * 1024 - huge) // _SMALL), (_LARGE, settings.pages_2mb), (_HUGE, settings.pages_1gb)]
    share = settings.vcpus // nodes
    cells = []
    for node in range(nodes):
        cpus = range(node * share, (node + 1) * share)
        cells.append(
            HostCell(
                id=node,
                memory_mb=memory,
                shared=tuple(cpu for cpu in cpus if cpu not in dedicated),
                dedicated=tuple(cpu for cpu in cpus if cpu in dedicated),
                siblings=tuple(tuple(cpus[first : first + threads]) for first in range(0, share, threads)),
                pages=tuple(MemoryPages(size_kib=size, total=total) for size, total in pages if total),
                socket=node,
            )
        )
    try:
        devices = msgspec.convert(list(settings.pci_devices), tuple[PciDevice, ...])
    except msgspec.ValidationError as error:
        wrong = wrong_value(error, tuple[PciDevice, ...]).named("the list")
        raise Invalid(f"fake.pci_devices is wrong: {wrong}.") from None
    return NodeTopology(cells=tuple(cells), devices=devices, mdevs=_mdevs(settings, types))


def _mdevs(settings: FakeSettings, types: MdevTypes) -> tuple[MdevParent, ...]:
    try:
        given = msgspec.convert(list(settings.mdev_devices), tuple[_MdevDevice, ...])
    except msgspec.ValidationError as error:
        wrong = wrong_value(error, tuple[_MdevDevice, ...]).named("the list")
        raise Invalid(f"fake.mdev_devices is wrong: {wrong}.") from None
    capable = []
    for each in given:
        name = device_name(each.address)
        if name is None:
            raise Invalid(f"fake.mdev_devices is wrong: the address {each.address!r} should be like 0000:84:00.0.")
        capable.append(CapableDevice(name=name, available=each.types))
    return offered(capable, {}, types)
