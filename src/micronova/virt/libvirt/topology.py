"""The NUMA nodes, PCI devices and mediated devices of this host that guests may use, as libvirt knows them."""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects import mediated_devices
from micronova.objects.cpu_sets import parse_cpus
from micronova.objects.errors import Invalid
from micronova.objects.mediated_devices import NO_TYPES, MdevTypes
from micronova.objects.pci_devices import DeviceSpec, offered_devices
from micronova.objects.topology import PAGE_SIZES, HostCell, MdevParent, MemoryPages, NodeTopology, PciDevice
from micronova.virt.libvirt.client.binding import Connect
from micronova.virt.libvirt.client.node_devices import list_offers
from micronova.virt.libvirt.client.xmltree import Element, parse
from micronova.virt.libvirt.host import Cell, parse_cells

PCI_DEVICES: Final = 2  # VIR_CONNECT_LIST_NODE_DEVICES_CAP_PCI_DEV


def read_topology(
    connection: Connect, settings: LibvirtSettings, specs: Sequence[DeviceSpec], types: MdevTypes = NO_TYPES
) -> NodeTopology:
    """Return what libvirt says now. Blocks."""
    cells = parse_cells(parse(connection.getCapabilities()))
    devices = [parse_device(parse(each.XMLDesc(0))) for each in connection.listAllDevices(PCI_DEVICES)] if specs else []
    if not cells:  # a kernel without NUMA: the machine is one node
        cells = (Cell(id=0, memory_mb=connection.getInfo()[1], cpus=tuple(range(os.cpu_count() or 1))),)
    mdevs = read_mdevs(connection, types) if types else ()
    return NodeTopology(cells=host_cells(cells, settings), devices=offered(devices, specs), mdevs=mdevs)


def read_mdevs(connection: Connect, types: MdevTypes) -> tuple[MdevParent, ...]:
    """Return the devices that offer mediated devices of the enabled types. Blocks."""
    devices, existing = list_offers(connection)
    counts = Counter((each.parent, each.mdev_type) for each in existing)
    return mediated_devices.offered(devices, counts, types)


def host_cells(cells: Sequence[Cell], settings: LibvirtSettings) -> tuple[HostCell, ...]:
    """Return the nodes with the CPUs that guests may use. Without settings, all CPUs are shared."""
    shared, dedicated = set(parse_cpus(settings.cpu_shared_set)), set(parse_cpus(settings.cpu_dedicated_set))
    reserved = reserved_pages(settings.reserved_huge_pages)
    found = []
    for cell in cells:
        all_shared = not shared and not dedicated
        found.append(
            HostCell(
                id=cell.id,
                memory_mb=cell.memory_mb,
                shared=tuple(cpu for cpu in cell.cpus if all_shared or cpu in shared),
                dedicated=tuple(cpu for cpu in cell.cpus if cpu in dedicated),
                siblings=cell.siblings,
                pages=tuple(
                    MemoryPages(size_kib=size, total=total, reserved=min(total, reserved.get((cell.id, size), 0)))
                    for size, total in sorted(cell.pages.items())
                    if size in PAGE_SIZES
                ),
                socket=cell.socket,
            )
        )
    return tuple(found)


def reserved_pages(given: Collection[Mapping[str, Any]]) -> dict[tuple[int, int], int]:
    """Return how many pages the host keeps for itself, by node and size in KiB; raise Invalid."""
    try:
        return {(int(each["node"]), int(each["size"])): int(each["count"]) for each in given}
    except (KeyError, TypeError, ValueError):
        raise Invalid(
            "default.reserved_huge_pages is a list of tables with node, size (in KiB) and count, such as "
            "{ node = 0, size = 2048, count = 64 }."
        ) from None


def parse_device(device: Element) -> PciDevice | None:
    """Return a device from libvirt's description of it; None if the description lacks something."""
    found = device.find("./capability[@type='pci']")
    if found is None:
        return None
    parts = [found.findtext(name) for name in ("domain", "bus", "slot", "function")]
    vendor, product = found.find("vendor"), found.find("product")
    if None in parts or vendor is None or product is None:
        return None
    physical = found.find("./capability[@type='phys_function']/address")
    virtual = found.find("./capability[@type='virt_functions']")
    # A function that can have virtual ones, and has none, is an ordinary device.
    functions = [] if virtual is None else virtual.findall("address")
    node = found.find("numa")
    return PciDevice(
        address=_address(*(int(part, 0) for part in parts if part is not None)),
        vendor_id=vendor.get("id", "").removeprefix("0x"),
        product_id=product.get("id", "").removeprefix("0x"),
        dev_type="type-VF" if physical is not None else "type-PF" if functions else "type-PCI",
        numa_node=None if node is None else int(node.get("node", "0")),
        parent=None if physical is None else _address_of(physical),
    )


def offered(devices: Sequence[PciDevice | None], specs: Sequence[DeviceSpec]) -> tuple[PciDevice, ...]:
    """Return the devices that the settings offer to guests, in the order of their addresses."""
    found = offered_devices((each for each in devices if each is not None), specs)
    return tuple(sorted(found, key=lambda each: each.address))


def _address_of(address: Element) -> str:
    return _address(*(int(address.get(name, "0"), 0) for name in ("domain", "bus", "slot", "function")))


def _address(domain: int, bus: int, slot: int, function: int) -> str:
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"
