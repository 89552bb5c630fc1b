"""Where on this host a guest's CPUs, NUMA nodes, memory pages and PCI devices are: what was claimed for it.

The claim has chosen them (`objects/fitting.py`), and the order names them. The guest's record keeps them over restarts.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from micronova.objects.errors import NotSupported
from micronova.objects.guest_cpus import CpuRequest, cpu_request
from micronova.objects.guest_properties import GuestProperties
from micronova.objects.orders import InstanceSpec
from micronova.virt.libvirt.host import Cell
from micronova.virt.libvirt.storage.records import PinRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedCell:
    """A NUMA node of the guest, and the host's node that it is on."""

    id: int
    vcpus: tuple[int, ...]
    memory_mb: int
    host: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPlan:
    """What the definition says about a guest's CPUs and memory."""

    vcpus: int
    sockets: int
    cores: int = 1
    threads: int = 1
    shared: tuple[int, ...] = ()  # host CPUs of vCPUs that are not pinned; empty: all
    pins: dict[int, int] = field(default_factory=dict)  # vCPU -> host CPU
    floating: dict[int, tuple[int, ...]] = field(default_factory=dict)  # vCPU -> the shared CPUs of its host node
    emulator: tuple[int, ...] = ()  # host CPUs of QEMU's own threads
    cells: tuple[AssignedCell, ...] = ()
    page_kib: int | None = None  # size of huge pages; None: ordinary memory


def pins_of(instance: InstanceSpec) -> PinRecord:
    """Return the CPUs, nodes and devices that were claimed for a guest, for its record; raise Invalid, NotSupported."""
    flavor, assignment = instance.flavor, instance.assignment
    properties = GuestProperties(flavor, instance.image)
    if assignment is None:
        if cpu_request(properties, flavor.vcpus, flavor.ram).cells or properties.flavor("pci_passthrough:alias"):
            raise NotSupported("The order does not say what of this host the guest gets: upgrade the conductors.")
        return PinRecord()
    return PinRecord(
        vcpus={vcpu: cpu for cell in assignment.cells for vcpu, cpu in cell.pins.items()},
        cells={cell.id: cell.host for cell in assignment.cells},
        emulator=assignment.emulator,
        page_kib=assignment.cells[0].page_kib if assignment.cells else None,
        devices=tuple(device.address for device in assignment.devices),
    )


def plan_cpus(
    request: CpuRequest, *, vcpus: int, cells: Iterable[Cell], shared: tuple[int, ...] = (), pins: PinRecord | None
) -> CpuPlan:
    """Return the plan for a guest with the pins of its record.

    Raise NotSupported if its flavor asks for shared CPUs, and the host has none of those that its settings name.
    """
    pins = pins or PinRecord()
    hosts = {cell.id: cell for cell in cells}
    floating: dict[int, tuple[int, ...]] = {}
    for cell in request.cells:
        host = hosts.get(pins.cells.get(cell.id, -1))
        near = tuple(cpu for cpu in host.cpus if not shared or cpu in shared) if host is not None else ()
        if near:
            floating |= {vcpu: near for vcpu in cell.vcpus if vcpu not in pins.vcpus}
    # libvirt lets all threads of a guest without NUMA nodes use the shared CPUs.
    shares_emulator = request.shares_emulator and bool(request.cells)
    smallest = min((size for cell in hosts.values() for size in cell.pages), default=0)
    return CpuPlan(
        vcpus=vcpus,
        sockets=request.sockets,
        cores=request.cores,
        threads=request.threads,
        shared=shared,
        pins=pins.vcpus,
        floating=floating,
        emulator=_shared_emulator(shared, hosts.values()) if shares_emulator else pins.emulator,
        cells=tuple(
            AssignedCell(id=cell.id, vcpus=cell.vcpus, memory_mb=cell.memory_mb, host=pins.cells.get(cell.id))
            for cell in request.cells
        ),
        page_kib=pins.page_kib if pins.page_kib is not None and pins.page_kib > smallest else None,
    )


def _shared_emulator(shared: tuple[int, ...], cells: Collection[Cell]) -> tuple[int, ...]:
    """Return the host CPUs of QEMU's own threads that should use shared ones; none if the host's settings name none."""
    there = {cpu for cell in cells for cpu in cell.cpus}
    found = tuple(cpu for cpu in shared if not cells or cpu in there)
    if shared and not found:
        raise NotSupported(
            "hw:emulator_threads_policy share needs a shared CPU, and this host has none of those in cpu_shared_set."
        )
    return found
