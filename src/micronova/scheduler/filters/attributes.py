"""What extra specs and queries can name of a host, by the names that Nova's scheduler has for it.

What changes with use, or differs from host to host, is a column of the table; all else is a fact that hosts share.
"""

from collections.abc import Callable, Iterable, Mapping

from micronova.scheduler.host_columns import Column, Facts
from micronova.scheduler.host_view import HostView

NUMBERS: dict[str, Callable[[HostView], Column]] = {
    "cpu_allocation_ratio": lambda hosts: hosts.allocation_ratio("VCPU"),
    "disk_allocation_ratio": lambda hosts: hosts.allocation_ratio("DISK_GB"),
    "disk_mb_used": lambda hosts: hosts.used("DISK_GB") * 1024,
    "failed_builds": lambda hosts: hosts.column("failed_builds"),
    "hypervisor_version": lambda hosts: hosts.column("hypervisor_version"),
    "free_disk_mb": lambda hosts: hosts.free("DISK_GB") * 1024,
    "free_ram_mb": lambda hosts: hosts.free("MEMORY_MB"),
    "num_instances": lambda hosts: hosts.column("num_instances"),
    "num_io_ops": lambda hosts: hosts.column("num_io_ops"),
    "ram_allocation_ratio": lambda hosts: hosts.allocation_ratio("MEMORY_MB"),
    "total_usable_disk_gb": lambda hosts: hosts.total("DISK_GB"),
    "total_usable_ram_mb": lambda hosts: hosts.total("MEMORY_MB"),
    "vcpus_total": lambda hosts: hosts.total("VCPU"),
    "vcpus_used": lambda hosts: hosts.used("VCPU"),
}
RATIOS = {"cpu_allocation_ratio", "disk_allocation_ratio", "ram_allocation_ratio"}
"""Those of the numbers that need not be whole."""
TEXTS: dict[str, Callable[[HostView], Iterable[str]]] = {
    "host": lambda hosts: (each.host for each in hosts.selections()),
    "host_ip": lambda hosts: hosts.addresses(),
    "hypervisor_hostname": lambda hosts: (each.node for each in hosts.selections()),
    "nodename": lambda hosts: (each.node for each in hosts.selections()),
    "uuid": lambda hosts: (each.node_uuid for each in hosts.selections()),
}
FACTS = ("cpu_info", "hypervisor_type", "hypervisor_version", "stats")
"""The facts; `cpu_info` and `stats`, which are the capabilities that a host reports, have parts."""


def find_fact(host: Facts, path: str) -> object | None:
    """Return a fact such as `hypervisor_type` or `cpu_info:topology:cores`, also a capability by its own name."""
    if path in host.capabilities:
        return host.capabilities[path]
    first, *rest = path.split(":")
    value: object | None
    match first:
        case "hypervisor_type":
            value = host.hypervisor_type or None
        case "hypervisor_version":
            value = host.hypervisor_version or None
        case "cpu_info":
            value = host.cpu_info
        case "stats":
            value = host.capabilities
        case _:
            value = host.capabilities.get(first)
    for name in rest:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value
