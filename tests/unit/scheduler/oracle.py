"""The scheduler's rules once more, in plain Python, one host at a time: what vectors are held against."""

import ipaddress
import json
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from micronova.conf.control import FilterSchedulerSettings, MetricsSettings
from micronova.objects.scheduling import HostState, RequestSpec
from micronova.objects.topology import NodeTopology, decode_topology, decode_use
from micronova.scheduler.prefilters import Prefilters
from tests.unit.scheduler import fitting_oracle

SETTINGS = FilterSchedulerSettings()
METRICS = MetricsSettings()
PREFILTERS = Prefilters()
CLASSES = ("VCPU", "PCPU", "MEMORY_MB", "DISK_GB")


def passes(
    host: HostState,
    spec: RequestSpec,
    now: float,
    settings: FilterSchedulerSettings = SETTINGS,
    metrics: MetricsSettings = METRICS,
    down_time: float = 60.0,
    prefilters: Prefilters = PREFILTERS,
) -> dict[str, bool]:
    """Return whether each filter, and each step before the filters, lets one host pass."""
    free = {name: host.capacity.get(name, 0) - host.used.get(name, 0) for name in host.capacity}
    need = fitting_oracle.amounts(spec.flavor, spec.image)
    topology = decode_topology(host.topology) if host.topology else NodeTopology()
    use, wanted = decode_use(host.held), fitting_oracle.wanted_of(spec.flavor)
    has_amounts = all(free.get(name, 0) >= amount for name, amount in need.items())
    group = spec.server_group
    members = group.hosts.get(host.host, 0) if group else 0
    together = group is not None and group.policy == "affinity" and sum(group.hosts.values()) > 0
    apart = group is not None and group.policy == "anti-affinity"
    isolated_image = spec.image is not None and spec.image.id in settings.isolated_images
    isolated_host = host.host in settings.isolated_hosts

    def enough(resource: str, ratio: str = "") -> bool:
        ratios = [float(metadata[ratio]) for _, metadata in host.aggregates if ratio in metadata]
        left = free.get(resource, 0)
        if ratios:
            most = math.floor((host.total.get(resource, 0) - host.reserved.get(resource, 0)) * min(ratios))
            left = min(left, most - host.used.get(resource, 0))
        return need.get(resource, 0) <= max(left, 0) or need.get(resource, 0) <= 0

    return {
        **{f"Capacity({name})": enough(name) for name in CLASSES},
        **{f"MaxUnit({name})": need.get(name, 0) <= host.max_unit.get(name, math.inf) for name in CLASSES},
        "Traits": _traits(host, spec, prefilters),
        "TenantAggregates": _tenant(host, spec, prefilters),
        "IsolatedAggregates": _isolated(host, spec, prefilters),
        "CoreFilter": enough("VCPU"),
        "RamFilter": enough("MEMORY_MB"),
        "DiskFilter": enough("DISK_GB"),
        "AggregateCoreFilter": enough("VCPU", "cpu_allocation_ratio"),
        "AggregateRamFilter": enough("MEMORY_MB", "ram_allocation_ratio"),
        "AggregateDiskFilter": enough("DISK_GB", "disk_allocation_ratio"),
        "AllHostsFilter": True,
        "RetryFilter": host.host not in spec.ignore_hosts,
        "AvailabilityZoneFilter": spec.availability_zone in (None, host.zone),
        "ComputeStatus": host.enabled,
        "ForcedDown": not host.forced_down,
        "ComputeFilter": host.enabled and not host.forced_down and now - host.last_seen <= down_time,
        "ComputeCapabilitiesFilter": _capabilities(host, spec),
        "ImagePropertiesFilter": _image(host, spec, settings.image_properties_default_architecture or None),
        "ServerGroupAntiAffinityFilter": not apart or (group is not None and members < group.max_server_per_host),
        "ServerGroupAffinityFilter": not together or members > 0,
        "SameHostFilter": not spec.hints.get("same_host") or host.host in spec.hinted_hosts.get("same_host", ()),
        "DifferentHostFilter": (
            not spec.hints.get("different_host") or host.host not in spec.hinted_hosts.get("different_host", ())
        ),
        "AggregateInstanceExtraSpecsFilter": _aggregate_specs(host, spec),
        "AggregateImagePropertiesIsolation": all(
            str(value) in listed(host, name)
            for name, value in (spec.image.properties if spec.image else {}).items()
            if listed(host, name) and name.startswith(_prefix(settings)) and not name.startswith("trait:")
        ),
        "AggregateMultiTenancyIsolation": _open_to(host, spec.project_id),
        "AggregateTypeAffinityFilter": (
            not listed(host, "instance_type") or spec.flavor.name in listed(host, "instance_type")
        ),
        "NumInstancesFilter": host.num_instances < settings.max_instances_per_host,
        "AggregateNumInstancesFilter": (
            host.num_instances < lowest(host, "max_instances_per_host", settings.max_instances_per_host, int)
        ),
        "IoOpsFilter": host.num_io_ops < settings.max_io_ops_per_host,
        "AggregateIoOpsFilter": (
            host.num_io_ops < lowest(host, "max_io_ops_per_host", settings.max_io_ops_per_host, int)
        ),
        "IsolatedHostsFilter": (
            isolated_host
            if isolated_image
            else not (isolated_host and settings.restrict_isolated_hosts_to_isolated_images)
        ),
        "JsonFilter": "query" not in spec.hints or query(host, json.loads(spec.hints["query"][0])),
        "MetricsFilter": all(name.split("=")[0] in host.metrics for name in metrics.weight_setting),
        "SimpleCIDRAffinityFilter": _near(host, spec),
        "NUMATopologyFilter": not wanted.nodes or (has_amounts and fitting_oracle.fits(topology, use, wanted)),
        "PciPassthroughFilter": fitting_oracle.has_devices(topology, use, wanted, None),
    }


def _asked_traits(spec: RequestSpec, value: str) -> set[str]:
    given = (spec.flavor.extra_specs, spec.image.properties if spec.image else {})
    asked = {name.removeprefix("trait:") for each in given for name in each if each[name] == value and "trait:" in name}
    secure = (given[0].get("os:secure_boot"), given[1].get("os_secure_boot"))
    return asked | ({"COMPUTE_SECURITY_UEFI_SECURE_BOOT"} if value == "required" and value in secure else set())


def _traits(host: HostState, spec: RequestSpec, prefilters: Prefilters) -> bool:
    required = _asked_traits(spec, "required")
    if prefilters.image_types and spec.image and spec.image.disk_format and not spec.flavor.root_on_volume:
        required.add(f"COMPUTE_IMAGE_TYPE_{spec.image.disk_format.upper()}")
    has = set(host.traits)
    return all(name in has for name in required) and not any(name in has for name in _asked_traits(spec, "forbidden"))


def _tenant(host: HostState, spec: RequestSpec, prefilters: Prefilters) -> bool:
    if not prefilters.tenants or not (prefilters.tenants_need_aggregates or spec.has_aggregates):
        return True
    return any(
        value == spec.project_id
        for _, metadata in host.aggregates
        for key, value in metadata.items()
        if key.startswith("filter_tenant_id")
    )


def _isolated(host: HostState, spec: RequestSpec, prefilters: Prefilters) -> bool:
    asked = _asked_traits(spec, "required")
    kept = {key for _, metadata in host.aggregates for key in metadata if metadata[key] == "required"}
    return not prefilters.isolated_aggregates or all(
        key.removeprefix("trait:") in asked for key in kept if key.startswith("trait:")
    )


def listed(host: HostState, key: str) -> set[str]:
    """Give the values of a key in the metadata of a host's aggregates."""
    return {part.strip() for _, metadata in host.aggregates for part in metadata.get(key, "").split(",") if part}


def lowest(host: HostState, key: str, default: float, kind: Callable[[str], float] = float) -> float:
    """Give the lowest number of a key in the metadata of a host's aggregates."""
    try:
        return min((kind(metadata[key]) for _, metadata in host.aggregates if key in metadata), default=default)
    except ValueError:
        return default


def _prefix(settings: FilterSchedulerSettings) -> str:
    namespace = settings.aggregate_image_properties_isolation_namespace
    return namespace and namespace + settings.aggregate_image_properties_isolation_separator


def _open_to(host: HostState, project: str) -> bool:
    keys = {key for _, metadata in host.aggregates for key in metadata if key.startswith("filter_tenant_id")}
    projects = {each for key in keys for each in listed(host, key)}
    return not projects or project in projects


def fulfils(value: str, text: str) -> bool:
    """Give whether a value fulfils an extra spec: a plain value, or an operator, a space and its operand."""
    words = text.split()
    try:
        match words:
            case ["=" | ">=", operand]:
                return float(value) >= float(operand)
            case ["==", operand]:
                return float(value) == float(operand)
            case ["!=", operand]:
                return float(value) != float(operand)
            case ["<=", operand]:
                return float(value) <= float(operand)
    except ValueError:
        return False
    match words:
        case ["s==", operand]:
            return value == operand
        case ["s!=", operand]:
            return value != operand
        case ["s>", operand]:
            return value > operand
        case ["s>=", operand]:
            return value >= operand
        case ["s<", operand]:
            return value < operand
        case ["s<=", operand]:
            return value <= operand
        case ["<in>", operand]:
            return operand in value
        case ["<all-in>", *operands]:
            return all(operand in value for operand in operands)
        case ["<or>", *operands]:
            return value in [operand for operand in operands if operand != "<or>"]
        case _:
            return value == text


def _aggregate_specs(host: HostState, spec: RequestSpec) -> bool:
    for name, text in spec.flavor.extra_specs.items():
        scope, _, key = name.rpartition(":")
        if scope in ("", "aggregate_instance_extra_specs") and not any(
            fulfils(value, text) for value in listed(host, key)
        ):
            return False
    return True


def _capabilities(host: HostState, spec: RequestSpec) -> bool:
    for name, text in spec.flavor.extra_specs.items():
        scope, _, key = name.rpartition(":")
        value = variable(host, key)
        if scope == "capabilities" and (value is None or not fulfils(str(value), text)):
            return False
        if scope == "" and value is not None and not fulfils(str(value), text):
            return False
    return True


def variable(host: HostState, name: str) -> Any:
    """Give what queries and extra specs know of a host."""
    free = {each: host.capacity.get(each, 0) - host.used.get(each, 0) for each in host.capacity}
    return {
        "host": host.host,
        "nodename": host.node,
        "host_ip": host.host_ip,
        "hypervisor_type": host.hypervisor_type,
        "hypervisor_version": host.hypervisor_version,
        "free_ram_mb": free.get("MEMORY_MB", 0),
        "free_disk_mb": free.get("DISK_GB", 0) * 1024,
        "vcpus_used": host.used.get("VCPU", 0),
        "num_instances": host.num_instances,
        "num_io_ops": host.num_io_ops,
        "failed_builds": host.failed_builds,
        "cpu_allocation_ratio": host.allocation_ratio.get("VCPU", 1.0),
        "ram_allocation_ratio": host.allocation_ratio.get("MEMORY_MB", 1.0),
    }.get(name, host.capabilities.get(name.removeprefix("stats.")))


def query(host: HostState, wanted: list[Any]) -> bool:
    """Give whether a host fulfils a query."""
    name, *operands = wanted
    if name == "and":
        return all(query(host, each) for each in operands)
    if name == "or":
        return any(query(host, each) for each in operands)
    if name == "not":
        return not all(query(host, each) for each in operands)
    first, *others = (
        variable(host, each[1:]) if isinstance(each, str) and each.startswith("$") else each for each in operands
    )
    if name == "in":
        return first in others
    compare = {"=": operator.eq, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}[name]
    return first is not None and all(compare(first, other) for other in others)


def _near(host: HostState, spec: RequestSpec) -> bool:
    if "build_near_host_ip" not in spec.hints:
        return True
    [prefix] = spec.hints.get("cidr", ["/24"])
    network = ipaddress.ip_network(spec.hints["build_near_host_ip"][0] + prefix, strict=False)
    return bool(host.host_ip) and ipaddress.ip_address(host.host_ip) in network


def _image(host: HostState, spec: RequestSpec, default: str | None) -> bool:
    properties = spec.image.properties if spec.image else {}
    wanted = [properties.get("hw_architecture", default), properties.get("img_hv_type"), properties.get("hw_vm_mode")]
    if not any(wanted):
        return True
    return any(
        all(want is None or want == have for want, have in zip(wanted, row, strict=True)) for row in host.supported
    )


def _free_devices(host: HostState) -> int:
    if not host.topology:
        return 0
    return len(fitting_oracle.free(decode_topology(host.topology), decode_use(host.held)))


class Rule(NamedTuple):
    """What a weigher gives each host."""

    numbers: list[float]
    key: str  # of its multiplier in the metadata of aggregates
    zero: float | None = None  # the number that becomes 0; None: the smallest
    sign: int = 1  # -1 if a smaller number is better


def weights(
    hosts: list[HostState], spec: RequestSpec, multipliers: Mapping[str, float], metrics: MetricsSettings = METRICS
) -> list[float]:
    """Give the weight of each of these hosts among them."""
    group = spec.server_group
    soft = group.policy if group is not None else ""

    def measured(host: HostState) -> float:
        total = 0.0
        for name, ratio in (each.split("=") for each in metrics.weight_setting):
            if name not in host.metrics:
                return metrics.weight_of_unavailable
            total += host.metrics[name] * float(ratio)
        return total

    def free(host: HostState, resource: str) -> float:
        return max(0, host.capacity.get(resource, 0) - host.used.get(resource, 0))

    rules = {
        "RAMWeigher": Rule([free(h, "MEMORY_MB") for h in hosts], "ram_weight_multiplier", zero=0),
        "CPUWeigher": Rule([free(h, "VCPU") for h in hosts], "cpu_weight_multiplier", zero=0),
        "DiskWeigher": Rule([free(h, "DISK_GB") for h in hosts], "disk_weight_multiplier", zero=0),
        "ServerGroupSoftAffinityWeigher": Rule(
            [group.hosts.get(h.host, 0) if group and soft == "soft-affinity" else 0 for h in hosts],
            "soft_affinity_weight_multiplier",
        ),
        "ServerGroupSoftAntiAffinityWeigher": Rule(
            [-group.hosts.get(h.host, 0) if group and soft == "soft-anti-affinity" else 0 for h in hosts],
            "soft_anti_affinity_weight_multiplier",
        ),
        "BuildFailureWeigher": Rule([h.failed_builds for h in hosts], "build_failure_weight_multiplier", sign=-1),
        "IoOpsWeigher": Rule([h.num_io_ops for h in hosts], "io_ops_weight_multiplier", zero=0),
        "NumInstancesWeigher": Rule([h.num_instances for h in hosts], "num_instances_weight_multiplier"),
        "HypervisorVersionWeigher": Rule([h.hypervisor_version for h in hosts], "hypervisor_version_weight_multiplier"),
        "MetricsWeigher": Rule([measured(h) for h in hosts], "metrics_weight_multiplier"),
        "ImagePropertiesWeigher": Rule(
            [spec.alike_images.get(h.host, 0) for h in hosts], "image_props_weight_multiplier"
        ),
        "PCIWeigher": Rule([-min(_free_devices(h), 99) for h in hosts], "pci_weight_multiplier"),
    }
    assert multipliers.keys() == rules.keys()
    totals = [0.0] * len(hosts)
    for name, rule in rules.items():
        low, high = min(rule.numbers) if rule.zero is None else rule.zero, max(rule.numbers)
        if high == low:
            continue
        for position, (host, number) in enumerate(zip(hosts, rule.numbers, strict=True)):
            multiplier = rule.sign * lowest(host, rule.key, multipliers[name])
            totals[position] += multiplier * (number - low) / (high - low)
    return totals
