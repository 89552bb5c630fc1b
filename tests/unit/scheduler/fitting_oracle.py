"""The rules of NUMA cells and PCI devices once more, by trying all ways: for hosts of few cells and devices.

They are those of docs/numa.md. Cores with several threads, sockets, and NUMA nodes that are described one by one are
left to `make nova-numa`, which compares with Nova's own fitting.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.topology import CellUse, HostCell, NodeTopology, PciDevice, TopologyUse

ALIASES = {"gpu": None, "pf": "type-PF"}  # those of the factory, with the type of device that they ask for


@dataclass(frozen=True)
class GuestNode:
    """A NUMA node of a guest."""

    shared: int
    pinned: int
    memory_mb: int


@dataclass(frozen=True)
class Wanted:
    """What a flavor asks for."""

    nodes: tuple[GuestNode, ...]
    policy: str
    emulator: int  # CPUs that it needs
    page: str | None
    devices: tuple[str | None, ...]  # their types
    affinity: str


def pinned_vcpus(flavor: Flavor) -> list[int]:
    """Give the vCPUs that get a CPU for themselves."""
    policy = flavor.extra_specs.get("hw:cpu_policy", "shared")
    if policy == "dedicated":
        return list(range(flavor.vcpus))
    return [int(cpu) for cpu in flavor.extra_specs["hw:cpu_dedicated_mask"].split(",")] if policy == "mixed" else []


def amounts(flavor: Flavor, image: ImageMeta | None) -> dict[str, int]:
    """Give what a server takes of a host, by resource class; images ask for nothing in these tests."""
    assert image is None or not any(name.startswith(("hw_cpu_policy", "hw_numa")) for name in image.properties)
    pinned = len(pinned_vcpus(flavor))
    root = 0 if flavor.root_on_volume else flavor.disk
    swap = flavor.swap // 1024 + (flavor.swap % 1024 > 0)
    taken = {
        "VCPU": flavor.vcpus - pinned,
        "PCPU": pinned + (flavor.extra_specs.get("hw:emulator_threads_policy") == "isolate"),
        "MEMORY_MB": flavor.ram,
        "DISK_GB": root + flavor.ephemeral + swap,
    }
    for name in taken:
        taken[name] = int(flavor.extra_specs.get(f"resources:{name}", taken[name]))
    return {name: amount for name, amount in taken.items() if amount > 0}


def wanted_of(flavor: Flavor) -> Wanted:
    """Give the NUMA nodes and devices that a flavor asks for."""
    specs = flavor.extra_specs
    policy, page = specs.get("hw:cpu_policy", "shared"), specs.get("hw:mem_page_size")
    count = int(specs.get("hw:numa_nodes", 0)) or int(policy != "shared" or page is not None)
    pinned = pinned_vcpus(flavor)
    nodes = []
    for number in range(count):
        own = range(number * flavor.vcpus // count, (number + 1) * flavor.vcpus // count)
        has_cpu = sum(vcpu in pinned for vcpu in own)
        nodes.append(GuestNode(len(own) - has_cpu, has_cpu, flavor.ram // count))
    devices: list[str | None] = []
    for each in filter(None, specs.get("pci_passthrough:alias", "").split(",")):
        alias, _, number_of = each.partition(":")
        devices += [ALIASES[alias]] * int(number_of)
    return Wanted(
        nodes=tuple(nodes),
        policy=policy,
        emulator=int(specs.get("hw:emulator_threads_policy") == "isolate"),
        page=page,
        devices=tuple(devices),
        affinity=specs.get("hw:pci_numa_affinity_policy", "legacy"),
    )


def free(topology: NodeTopology, use: TopologyUse) -> list[PciDevice]:
    """Give the devices that nobody has, whose virtual functions and whose physical function nobody has."""
    held = [device for device in topology.devices if device.address in use.devices]
    return [
        device
        for device in topology.devices
        if device not in held
        and device.parent not in [other.address for other in held]
        and device.address not in [other.parent for other in held]
    ]


def fits(topology: NodeTopology, use: TopologyUse, wanted: Wanted) -> bool:
    """Give whether any way to place the NUMA nodes of a guest has room, and devices."""
    return any(
        all(
            _holds(
                cell, use.cells.get(cell.id, CellUse()), node, wanted.emulator if number == 0 else 0, topology, wanted
            )
            for number, (cell, node) in enumerate(zip(cells, wanted.nodes, strict=True))
        )
        and has_devices(topology, use, wanted, [cell.id for cell in cells])
        for cells in permutations(topology.cells, len(wanted.nodes))
    )


def _holds(
    cell: HostCell, held: CellUse, node: GuestNode, emulator: int, topology: NodeTopology, wanted: Wanted
) -> bool:
    free_cpus = [cpu for cpu in cell.dedicated if cpu not in held.pinned]
    if wanted.policy != "shared" and node.pinned + emulator > len(free_cpus):
        return False
    if wanted.policy != "dedicated" and (
        node.shared > len(cell.shared)
        or held.cpus + node.shared > len(cell.shared) * topology.cpu_allocation_ratio
        or held.memory_mb + node.memory_mb > cell.memory_mb * topology.ram_allocation_ratio
    ):
        return False
    return _has_pages(cell, held, node, wanted)


def _has_pages(cell: HostCell, held: CellUse, node: GuestNode, wanted: Wanted) -> bool:
    total = {each.size_kib: each.total - each.reserved for each in cell.pages}
    left = {size: count - held.pages.get(size, 0) for size, count in total.items()}
    smallest = min(total, default=0)
    if wanted.page is None and not total:
        return node.memory_mb <= cell.memory_mb - (held.memory_mb if wanted.policy != "shared" else 0)
    if wanted.page is None:
        # Ordinary memory may be given out more than once, except to guests with dedicated CPUs.
        sizes, count = (
            [smallest],
            left if wanted.policy != "shared" else {each.size_kib: each.total for each in cell.pages},
        )
    else:
        sizes = {
            "small": [smallest] if total else [],
            "large": [size for size in total if size != smallest],
            "any": list(total),
        }.get(wanted.page, [size for size in total if str(size) == wanted.page])
        count = left
    kib = node.memory_mb * 1024
    return any(kib % size == 0 and kib // size <= count[size] for size in sizes)


def has_devices(topology: NodeTopology, use: TopologyUse, wanted: Wanted, cells: Sequence[int] | None) -> bool:
    """Give whether there are devices for all requests of a guest in these cells; `cells` is None if it has none."""

    def suits(device: PciDevice, kind: str | None) -> bool:
        if device.dev_type != kind and (kind is not None or device.dev_type == "type-PF"):
            return False
        if cells is None or wanted.affinity == "preferred" or device.numa_node in cells:
            return True
        return wanted.affinity == "legacy" and device.numa_node is None

    return any(
        all(suits(device, kind) for device, kind in zip(chosen, wanted.devices, strict=True))
        and not any(one.parent == other.address for one in chosen for other in chosen)
        for chosen in permutations(free(topology, use), len(wanted.devices))
    )
