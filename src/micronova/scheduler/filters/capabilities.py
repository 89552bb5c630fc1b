"""ComputeCapabilitiesFilter: compares a flavor's extra specs with the capabilities of hosts."""

from collections.abc import Callable, Mapping

import numpy as np

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.filters.operators import Requirement
from micronova.scheduler.host_table import Bools, Column, Facts, HostView

# Capabilities that change with use are columns of the table; all others are facts of the host.
_AMOUNTS: dict[str, Callable[[HostView], Column]] = {
    "free_ram_mb": lambda hosts: hosts.free("MEMORY_MB"),
    "free_disk_mb": lambda hosts: hosts.free("DISK_GB") * 1024,
    "total_usable_ram_mb": lambda hosts: hosts.total("MEMORY_MB"),
    "total_usable_disk_gb": lambda hosts: hosts.total("DISK_GB"),
    "vcpus_total": lambda hosts: hosts.total("VCPU"),
    "vcpus_used": lambda hosts: hosts.used("VCPU"),
    "num_instances": lambda hosts: hosts.column("num_instances"),
    "num_io_ops": lambda hosts: hosts.column("num_io_ops"),
}


class ComputeCapabilitiesFilter(HostFilter):
    """Passes hosts that fulfil every extra spec with the scope `capabilities:`, and those without a scope.

    A host that does not know an extra spec without a scope passes, as in Nova: the spec may be another program's.
    """

    name = "ComputeCapabilitiesFilter"
    scope = Scope.HOST
    extra_specs = frozenset({"capabilities"})

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        passes: Bools | None = None
        facts: list[tuple[str, str, bool]] = []
        for key, text in spec.flavor.extra_specs.items():
            path = capability_path(key)
            if path is None:
                continue
            if path in _AMOUNTS:
                verdict = Requirement(text).match_column(_AMOUNTS[path](hosts))
            elif path == "host":
                requirement = Requirement(text)
                names = (requirement.match(hosts.name(p)) for p in range(len(hosts)))
                verdict = np.fromiter(names, np.bool_, len(hosts))
            else:
                facts.append((path, text, ":" in key))
                continue
            passes = verdict if passes is None else passes & verdict
        if facts:
            verdict = hosts.by_facts((self.name, *facts), lambda host: _has_all(host, facts))
            passes = verdict if passes is None else passes & verdict
        return passes


def capability_path(key: str) -> str | None:
    """Return the capability that an extra spec names, None if the spec is not for this filter."""
    scope, colon, path = key.partition(":")
    if not colon:
        return key
    return path if scope == "capabilities" else None


def _has_all(host: Facts, wanted: list[tuple[str, str, bool]]) -> bool:
    for path, text, must_be_known in wanted:
        value = find_fact(host, path)
        if must_be_known if value is None else not Requirement(text).match(value):
            return False
    return True


def find_fact(host: Facts, path: str) -> object | None:
    """Return a capability such as `hypervisor_type` or `cpu_info:topology:cores`."""
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
        case _:
            value = host.capabilities.get(first)
    for name in rest:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value
