"""Hosts and requests for the scheduler's tests."""

import random
from typing import Any

from micronova.objects.flavor import Flavor
from micronova.objects.pci_devices import parse_aliases
from micronova.objects.scheduling import HostState, RequestSpec
from micronova.scheduler.filter_scheduler import FilterScheduler
from micronova.scheduler.filters.base import FilterOptions
from micronova.scheduler.filters.registry import load_filters
from micronova.scheduler.host_table import HostTable
from micronova.scheduler.weights.registry import load_weighers

NOW = 1_000_000.0
ALIASES = parse_aliases(
    [
        {"name": "gpu", "vendor_id": "10de", "product_id": "1eb8"},
        {"name": "pf", "vendor_id": "10de", "product_id": "1eb8", "device_type": "type-PF"},
    ]
)
OPTIONS = FilterOptions(service_down_time=60.0, pci_aliases=ALIASES)


def a_host(name: str, **changes: Any) -> HostState:
    """Make a host that is up and has room."""
    fields: dict[str, Any] = {
        "host": name,
        "node": name,
        "node_uuid": f"uuid-{name}",
        "last_seen": NOW - 1,
        "total": {"VCPU": 8, "MEMORY_MB": 8192, "DISK_GB": 100},
        "capacity": {"VCPU": 32, "MEMORY_MB": 8192, "DISK_GB": 100},
        "used": {"VCPU": 0, "MEMORY_MB": 0, "DISK_GB": 0},
        "hypervisor_type": "QEMU",
        "hypervisor_version": 7_002_000,
        "supported": (("x86_64", "kvm", "hvm"),),
    }
    return HostState(**(fields | changes))


def a_flavor(**changes: Any) -> Flavor:
    """Make a small flavor."""
    fields: dict[str, Any] = {"id": "1", "name": "m1.small", "ram": 1024, "vcpus": 1, "disk": 10}
    return Flavor(**(fields | changes))


def a_spec(**changes: Any) -> RequestSpec:
    """Make a request for a small server."""
    fields: dict[str, Any] = {"project_id": "p", "user_id": "u", "flavor": a_flavor()}
    return RequestSpec(**(fields | changes))


def a_table(*states: HostState) -> HostTable:
    """Make a table of hosts."""
    table = HostTable()
    table.update(states)
    return table


def a_scheduler(multipliers: dict[str, float] | None = None, **options: Any) -> FilterScheduler:
    """Make a scheduler with the default filters."""
    weighers = load_weighers(multipliers, with_plugins=False)
    filters = load_filters(OPTIONS)
    return FilterScheduler(filters, weighers, random=random.Random(7), aliases=ALIASES, **options)


def held_of(table: HostTable) -> dict[str, str]:
    """Give what is held of NUMA cells and devices, by node."""
    return {uuid: table.state(table.index(uuid) or 0).held for uuid in table.uuids}


def free_of(table: HostTable) -> dict[str, dict[str, float]]:
    """Give what is free, by node and resource class."""
    states = {uuid: table.state(table.index(uuid) or 0) for uuid in table.uuids}
    return {
        uuid: {name: float(capacity - state.used[name]) for name, capacity in state.capacity.items()}
        for uuid, state in states.items()
    }
