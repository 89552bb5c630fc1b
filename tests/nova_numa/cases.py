"""Random hosts and instances, as plain data, and what our fitting says of them."""

import random
from typing import Any

from micronova.objects.errors import Invalid
from micronova.objects.fitting import fit
from micronova.objects.flavor import Flavor
from micronova.objects.guest_cpus import cpu_request
from micronova.objects.guest_properties import GuestProperties
from micronova.objects.image import ImageMeta
from micronova.objects.topology import (
    CellRequest,
    CellUse,
    DeviceRequest,
    HostCell,
    MemoryPages,
    NodeTopology,
    PciDevice,
    TopologyRequest,
    TopologyUse,
)
from micronova.objects.topology_request import topology_request
from micronova.placement import extra_specs
from tests.unit.scheduler.fitting_oracle import free

Case = dict[str, Any]
PRODUCTS = ("1572", "154c", "0a0a")


def a_host(
    chance: random.Random, *, devices: bool, cpu_ratio: float, ram_ratio: float
) -> tuple[NodeTopology, TopologyUse]:
    """Return what a host has, and what instances hold of it."""
    count = chance.choice((1, 1, 2, 2, 2, 3, 4))
    threads = chance.choice((1, 2, 2, 4))
    cores = chance.choice((2, 3, 4, 6))
    dedicated = chance.choice((0.0, 0.5, 0.7, 1.0))  # share of the CPUs
    topology = NodeTopology(
        cells=tuple(_cell(chance, number, count, cores, threads, dedicated) for number in range(count)),
        devices=_devices(chance, count) if devices else (),
        cpu_allocation_ratio=cpu_ratio,
        ram_allocation_ratio=ram_ratio,
    )
    use = TopologyUse(
        cells={cell.id: _use(chance, cell) for cell in topology.cells},
        devices=tuple(sorted(each.address for each in topology.devices if chance.random() < 0.3)),
    )
    return topology, use


def plain_host(topology: NodeTopology, use: TopologyUse) -> Case:
    """Return a host as plain data, with its free devices."""
    return {
        "cells": [_plain_cell(cell, use.cells[cell.id]) for cell in topology.cells],
        "devices": [{name: getattr(each, name) for name in each.__struct_fields__} for each in free(topology, use)],
    }


def fit_case(chance: random.Random) -> Case:
    """Return a host with some use, and an instance to fit onto it."""
    ratios = {"cpu_ratio": chance.choice((1.0, 1.5, 4.0)), "ram_ratio": chance.choice((1.0, 1.5))}
    topology, use = a_host(chance, devices=chance.random() < 0.5, **ratios)
    request = _request(chance, topology, len(topology.cells))
    return {
        "kind": "fit",
        "topology": topology,
        "use": use,
        "asked": request,
        **ratios,
        **plain_host(topology, use),
        "request": {
            "cells": [{name: getattr(each, name) for name in each.__struct_fields__} for each in request.cells],
            "policy": (
                ("mixed" if request.has_shared else "dedicated")
                if request.is_pinned
                else chance.choice((None, "shared"))
            ),
            "thread_policy": request.thread_policy if request.is_pinned else None,
            "isolates_emulator": request.isolates_emulator,
            "page_size": request.page_size,
            "devices": [{name: getattr(each, name) for name in each.__struct_fields__} for each in request.devices],
        },
    }


def _cell(chance: random.Random, number: int, count: int, cores: int, threads: int, share: float) -> HostCell:
    """CPUs are numbered as Linux does: the second threads of all cores come after the first ones."""
    siblings = tuple(
        tuple(thread * count * cores + number * cores + core for thread in range(threads)) for core in range(cores)
    )
    cpus = sorted(cpu for core in siblings for cpu in core)
    dedicated = [cpu for cpu in cpus if chance.random() < share]
    memory = chance.choice((2048, 4096))
    pages: tuple[MemoryPages, ...] = ()
    if chance.random() < 0.7:
        huge = chance.choice((0, 256, 512))
        pages = (
            MemoryPages(size_kib=4, total=memory * 256 - huge * 512),
            MemoryPages(size_kib=2048, total=huge, reserved=chance.choice((0, 0, 64)) if huge else 0),
            *((MemoryPages(size_kib=1048576, total=1),) if chance.random() < 0.2 else ()),
        )
    return HostCell(
        id=number,
        memory_mb=memory,
        shared=tuple(cpu for cpu in cpus if cpu not in dedicated),
        dedicated=tuple(dedicated),
        siblings=siblings,
        pages=pages,
        socket=None if chance.random() < 0.2 else number // 2,
    )


def _use(chance: random.Random, cell: HostCell) -> CellUse:
    share = chance.choice((0.0, 0.0, 0.0, 0.3, 0.6))
    used = int(cell.memory_mb * share)
    pages = {each.size_kib: int((each.total - each.reserved) * share) for each in cell.pages}
    return CellUse(
        cpus=int(len(cell.shared) * share * 2),
        memory_mb=used,
        pinned=tuple(cpu for cpu in cell.dedicated if chance.random() < share),
        pages={size: count for size, count in pages.items() if count},
    )


def _devices(chance: random.Random, count: int) -> tuple[PciDevice, ...]:
    found = []
    for slot in range(chance.choice((1, 2, 4))):
        node = chance.choice((None, *range(count)))
        product = chance.choice(PRODUCTS)
        kind = chance.choice(("type-PCI", "type-PCI", "type-PF"))
        address = f"0000:{slot:02x}:00.0"
        found.append(
            PciDevice(address=address, vendor_id="8086", product_id=product, dev_type=kind, numa_node=node)  # type: ignore[arg-type]
        )
        if kind == "type-PF":
            functions = chance.choice((0, 1, 2))
            shared_id = product if chance.random() < 0.3 else chance.choice(PRODUCTS)
            found += [
                PciDevice(
                    address=f"0000:{slot:02x}:01.{number}",
                    vendor_id="8086",
                    product_id=shared_id,
                    dev_type="type-VF",
                    numa_node=node,
                    parent=address,
                )
                for number in range(functions)
            ]
    return tuple(found)


def _request(chance: random.Random, topology: NodeTopology, count: int) -> TopologyRequest:
    policy = chance.choice(("shared", "dedicated", "mixed"))
    if chance.random() < 0.8:  # one that the host has CPUs for
        shared, dedicated = (any(getattr(cell, name) for cell in topology.cells) for name in ("shared", "dedicated"))
        policy = chance.choice(("dedicated", "mixed", "shared")) if shared and dedicated else policy
        policy = "shared" if not dedicated else "dedicated" if not shared else policy
    cells = chance.randint(1, min(count + (chance.random() < 0.05), 4))
    requests = []
    if topology.devices and chance.random() < 0.8:
        for number in range(chance.choice((1, 1, 2))):
            spec = {"vendor_id": "8086", "product_id": chance.choice(PRODUCTS)}
            if chance.random() < 0.4:
                spec["dev_type"] = chance.choice(("type-PCI", "type-PF", "type-VF"))
            requests.append(
                DeviceRequest(
                    alias=f"a{number}",
                    count=chance.choice((1, 1, 2)),
                    specs=(spec,),
                    policy=chance.choice(("legacy", "preferred", "required", "socket")),
                )
            )
    if requests and chance.random() < 0.15:
        return TopologyRequest(devices=tuple(requests))
    vcpu = 0
    found = []
    for number in range(cells):
        vcpus = list(range(vcpu, vcpu + chance.choice((1, 1, 2, 2, 2, 3, 4, 6))))
        vcpu += len(vcpus)
        pinned = [each for each in vcpus if policy == "dedicated" or (policy == "mixed" and chance.random() < 0.5)]
        found.append(
            CellRequest(
                id=number,
                memory_mb=chance.choice((256, 256, 512, 512, 1024, 1024, 2048, 1025)),
                shared=tuple(each for each in vcpus if each not in pinned),
                pinned=tuple(pinned),
            )
        )
    return TopologyRequest(
        cells=tuple(found),
        is_pinned=policy != "shared",
        has_shared=policy != "dedicated",
        thread_policy=chance.choice(("prefer", "prefer", "prefer", "isolate", "require"))
        if policy != "shared"
        else "prefer",
        isolates_emulator=policy != "shared" and chance.random() < 0.2,
        page_size=chance.choice((None, None, None, None, "small", "large", "any", 2048, 1048576)),
        devices=tuple(requests),
    )


def _plain_cell(cell: HostCell, use: CellUse) -> Case:
    return {
        "id": cell.id,
        "shared": cell.shared,
        "dedicated": cell.dedicated,
        "siblings": cell.siblings,
        "memory_mb": cell.memory_mb,
        "socket": cell.socket,
        "cpu_usage": use.cpus,
        "memory_usage": use.memory_mb,
        "pinned": use.pinned,
        "pages": [(each.size_kib, each.total, use.pages.get(each.size_kib, 0), each.reserved) for each in cell.pages],
    }


def our_fit(case: Case) -> Any:
    """Return our verdict in the form of Nova's side."""
    found = fit(case["topology"], case["use"], case["asked"])
    if found is None:
        return False
    return [
        [cell.host, cell.page_kib, sorted(cell.pins.items()), list(found.emulator) if position == 0 else []]
        for position, cell in enumerate(found.cells)
    ]


_VALUES: dict[str, tuple[str, ...]] = {
    "cpu_policy": ("shared", "dedicated", "mixed", "dedicated", "dedicated", "shared", "mixed", "other"),
    "cpu_thread_policy": ("prefer", "isolate", "require", "prefer", "isolate", "require", "other"),
    "numa_nodes": ("1", "2", "1", "2", "1", "2", "3", "0", "x"),
    "mem_page_size": ("small", "large", "any", "2048", "2MB", "1GB", "large", "any", "x"),
}
_FLAVOR_VALUES: dict[str, tuple[str, ...]] = {
    "hw:cpu_dedicated_mask": ("0", "0-1", "^0", "0-9", "^0-9", "x"),
    "hw:emulator_threads_policy": ("share", "isolate", "other"),
}


def request_case(chance: random.Random) -> Case:
    """Return a flavor and an image; some of them contradict each other."""
    extra: dict[str, str] = {}
    properties: dict[str, str] = {}
    for name, values in _VALUES.items():
        if chance.random() < 0.3:
            extra[f"hw:{name}"] = chance.choice(values)
        if chance.random() < 0.08:
            properties[f"hw_{name}"] = chance.choice(values)
    for name, values in _FLAVOR_VALUES.items():
        if chance.random() < (0.5 if extra.get("hw:cpu_policy") == "mixed" else 0.1):
            extra[name] = chance.choice(values)
    vcpus, ram = chance.choice((2, 4, 4, 6)), chance.choice((1024, 2048))
    if chance.random() < 0.2:
        extra["resources:PCPU"] = str(chance.choice((0, vcpus, vcpus, vcpus, vcpus + 1)))
    if chance.random() < 0.1:
        extra["resources:VCPU"] = str(chance.choice((0, 0, vcpus)))
    if chance.random() < 0.1:
        place = extra if chance.random() < 0.7 else properties
        place["trait:HW_CPU_HYPERTHREADING"] = (
            chance.choice(("required", "forbidden")) if place is extra else "required"
        )
    if chance.random() < 0.3:
        prefix, place = ("hw:", extra) if chance.random() < 0.7 else ("hw_", properties)
        for number in range(int(extra.get("hw:numa_nodes", "1").replace("x", "2"))):
            place[f"{prefix}numa_cpus.{number}"] = chance.choice((f"{2 * number}-{2 * number + 1}", "0-3", "1", "0,2"))
            if chance.random() < 0.9:
                place[f"{prefix}numa_mem.{number}"] = str(chance.choice((ram, ram // 2, ram // 2, 1)))
        if chance.random() < 0.05:
            properties["hw_numa_cpus.0"] = "0-1"
    return {
        "kind": "request",
        "vcpus": vcpus,
        "ram": ram,
        "extra_specs": extra,
        "properties": properties,
    }


def our_request(case: Case) -> Any:
    """Return the NUMA nodes that we make of flavor and image, in the form of Nova's side."""
    flavor = Flavor(
        id="x", name="x", ram=case["ram"], vcpus=case["vcpus"], disk=0, extra_specs=dict(case["extra_specs"])
    )
    image = ImageMeta(id="x", properties=dict(case["properties"]))
    try:
        # What every request has to pass.
        extra_specs.check(flavor, image)
        cpu_request(GuestProperties(flavor, image), flavor.vcpus, flavor.ram)
        found = topology_request(flavor, image, {})
    except Invalid:
        return False
    if found is None:
        return None
    policy = ("mixed" if found.has_shared else "dedicated") if found.is_pinned else "shared"
    return [
        [
            list(cell.shared),
            list(cell.pinned),
            cell.memory_mb,
            found.page_size,
            policy,
            found.thread_policy,
            found.isolates_emulator,
        ]
        for cell in found.cells
    ]
