"""A synthetic fleet and requests to it, as plain data: the same for our scheduler and for Nova's.

This module imports nothing of ours, because Nova's side imports it. The fleet has four sizes of hosts, three zones and
40 racks, which are aggregates; one host in fifty is down, and hosts are from empty to nearly full. One host in four has
dedicated CPUs, of which guests hold some: nearly each of these hosts is of a kind of its own.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

NOW = 1_790_000_000.0
PROJECTS = 8
GROUP_MEMBERS = 39
KINDS = ("plain", "rich", "all", "numa")
"""Requests: one that concerns few filters, one for each default filter, one for each filter, one with NUMA nodes."""

_GUEST_CPUS = 4  # of those guests that hold dedicated CPUs
_TRAITS = tuple(f"HW_CPU_X86_FEATURE_{number}" for number in range(24))
_FEATURES = tuple(f"feature{number}" for number in range(40))


def server_uuid(number: int) -> str:
    """Return the uuid of the server that is on a host; only the first hosts have one that requests name."""
    return f"00000000-0000-4000-8000-{number:012x}"


def hosts(count: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Yield hosts. What Nova's side needs is as `tests.nova_filters.nova_side.a_host` reads it."""
    chance = random.Random(seed)
    for number in range(count):
        yield _host(number, chance)


def _host(number: int, chance: random.Random) -> dict[str, Any]:
    cpus = chance.choice((32, 64, 128, 256))
    cells = [_cell(id, cpus, with_dedicated=number % 4 == 3) for id in range(2)]
    held = {cell["id"]: _held(cell, chance) for cell in cells}
    pinned = sum(len(each["pinned"]) for each in held.values())
    dedicated = sum(len(cell["dedicated"]) for cell in cells)
    total = {"VCPU": cpus - dedicated, "MEMORY_MB": cpus * 4096, "DISK_GB": cpus * 40}
    capacity = {**total, "VCPU": 4 * total["VCPU"]}
    filling = chance.random() * 0.9
    used = {name: int(amount * filling) for name, amount in capacity.items()}
    if dedicated:
        total["PCPU"] = capacity["PCPU"] = dedicated
        used["PCPU"] = pinned
        used["MEMORY_MB"] = max(used["MEMORY_MB"], sum(each["memory_mb"] for each in held.values()))
    zone = f"az{number % 3}"
    return {
        "host": f"host-{number}",
        "node": f"host-{number}",
        "node_uuid": f"00000000-0000-4000-9000-{chance.getrandbits(24):06x}{number:06x}",
        "zone": zone,
        "hardware": None,  # Nova's side adds cells by itself
        "enabled": True,
        "forced_down": False,
        "last_seen": NOW - (1000 if chance.random() < 0.02 else 3),
        "total": total,
        "capacity": capacity,
        "max_unit": total,
        "used": used,
        "cpu_allocation_ratio": 4.0,
        "hypervisor_type": "QEMU",
        "hypervisor_version": 7_002_000 if cpus > 32 else 5_002_000,
        "cpu_info": {"arch": "x86_64", "features": ["aes", "avx2", *_FEATURES, *["avx512f"] * (cpus > 64)]},
        "supported": [("x86_64", "kvm", "hvm"), ("x86_64", "qemu", "hvm"), ("i686", "qemu", "hvm")],
        "capabilities": {"gpu": "A100"} if cpus > 128 else {},
        "traits": _TRAITS,
        "num_instances": int(45 * filling),
        "num_io_ops": chance.choice((0, 0, 0, 1)),
        "failed_builds": int(chance.random() < 0.01),
        "host_ip": f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
        "metrics": {"cpu.percent": round(filling, 2)},
        "aggregates": [
            (f"rack-{number % 40}", {"ssd": "true", "filter_tenant_id": ",".join(f"p{n}" for n in range(PROJECTS))}),
            (f"zone-{zone}", {"availability_zone": zone}),
        ],
        "instances": {server_uuid(number): None} if number <= GROUP_MEMBERS + 1 else {},
        "cells": cells,
        "held": held,
    }


def _cell(id: int, cpus: int, with_dedicated: bool) -> dict[str, Any]:
    """Return one of two NUMA nodes. The second threads of all cores come after the first ones, as Linux has them."""
    half = cpus // 2
    siblings = [[id * half // 2 + core, half + id * half // 2 + core] for core in range(half // 2)]
    split = len(siblings) // 2 if with_dedicated else len(siblings)
    return {
        "id": id,
        "memory_mb": cpus * 2048,
        "shared": sorted(cpu for core in siblings[:split] for cpu in core),
        "dedicated": sorted(cpu for core in siblings[split:] for cpu in core),
        "siblings": siblings,
        "pages": [(4, cpus * 2048 * 256, 0)],
        "socket": id,
    }


def _held(cell: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return what guests with dedicated CPUs hold of a cell: whole cores."""
    cores = [core for core in cell["siblings"] if core[0] in cell["dedicated"]]
    guests = int(chance.random() * 0.9 * 2 * len(cores) / _GUEST_CPUS)
    pinned = sorted(cpu for core in chance.sample(cores, 2 * guests) for cpu in core)
    memory = guests * _GUEST_CPUS * 2048
    return {"memory_mb": memory, "pinned": pinned, "pages": {4: memory * 256} if memory else {}}


def request(kind: str, number: int, *, bulk: bool = False) -> dict[str, Any]:
    """Return a request of a kind; they differ by number in flavor, project and zone.

    In bulk, a rule that would need a host for each server is replaced by one that prefers different hosts.
    """
    vcpus = 1 << number % 3
    found: dict[str, Any] = {
        "project_id": f"p{number % PROJECTS}",
        "vcpus": vcpus,
        "ram": vcpus * 2048,
        "disk": 20,
        "extra_specs": {},
        "properties": {},
        "zone": None,
        "hints": {},
        "hinted_hosts": {},
        "group": None,
        "ignore_hosts": [],
        "alike_images": {},
    }
    if kind == "numa":
        specs = {"hw:cpu_policy": "dedicated", "hw:numa_nodes": str(1 + number % 2)}
        return found | {"vcpus": _GUEST_CPUS, "ram": _GUEST_CPUS * 2048, "extra_specs": specs}
    if kind == "plain":
        return found
    members = range(1, GROUP_MEMBERS + 1)
    found |= {
        "extra_specs": {"capabilities:cpu_info:features": "<in> avx2", "aggregate_instance_extra_specs:ssd": "true"},
        "properties": {"hw_architecture": "x86_64", "img_hv_type": "kvm"},
        "zone": f"az{number % 3}",
        "ignore_hosts": ["host-1", "host-4"],
        "group": {
            "policy": "soft-anti-affinity" if bulk else "anti-affinity",
            "members": [server_uuid(each) for each in members],
            "hosts": [f"host-{each}" for each in members],
        },
    }
    if kind == "all":
        query = ["and", [">=", "$free_ram_mb", 4096], ["<", "$num_instances", 45]]
        different = GROUP_MEMBERS + 1
        found["hints"] = {
            "query": [json.dumps(query)],
            "build_near_host_ip": ["10.0.0.1"],
            "cidr": ["/8"],
            "different_host": [server_uuid(different)],
        }
        found["hinted_hosts"] = {"different_host": [f"host-{different}"]}
        found["alike_images"] = {f"host-{each}": 2.0 for each in range(0, 1000, 7)}
    return found


SETTINGS: dict[str, Any] = {"num_instances_weight_multiplier": -1.0, "image_props_weight_multiplier": 1.0}
"""What turns on the weighers that are off by default, for requests of the kind `all`."""
METRICS: dict[str, Any] = {"weight_setting": ["cpu.percent=-1.0"], "required": True}
