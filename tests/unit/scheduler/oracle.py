"""The scheduler's rules once more, in plain Python, one host at a time: what vectors are held against."""

from collections.abc import Mapping

from micronova.objects.scheduling import HostState, RequestSpec

NOT_HERE = {"ComputeCapabilitiesFilter"}  # the requests of these tests ask for no capability


def passes(host: HostState, spec: RequestSpec, now: float, down_time: float = 60.0) -> dict[str, bool]:
    """Give the verdict of each default filter on one host, but for those in NOT_HERE."""
    free = {name: host.capacity.get(name, 0) - host.used.get(name, 0) for name in host.capacity}
    need = spec.flavor.resources()
    group = spec.group
    members = group.hosts.get(host.host, 0) if group else 0
    together = group is not None and group.policy == "affinity" and sum(group.hosts.values()) > 0
    apart = group is not None and group.policy == "anti-affinity"
    return {
        "Capacity(VCPU)": free.get("VCPU", 0) >= need.get("VCPU", 0),
        "RetryFilter": host.host not in spec.ignore_hosts,
        "AvailabilityZoneFilter": spec.availability_zone in (None, host.zone),
        "RamFilter": free.get("MEMORY_MB", 0) >= need.get("MEMORY_MB", 0),
        "DiskFilter": free.get("DISK_GB", 0) >= need.get("DISK_GB", 0),
        "ComputeFilter": host.enabled and not host.forced_down and now - host.last_seen <= down_time,
        "ImagePropertiesFilter": _image(host, spec),
        "ServerGroupAntiAffinityFilter": not apart or (group is not None and members < group.max_server_per_host),
        "ServerGroupAffinityFilter": not together or members > 0,
        "SameHostFilter": not spec.hints.get("same_host") or host.host in spec.hinted_hosts.get("same_host", ()),
        "DifferentHostFilter": (
            not spec.hints.get("different_host") or host.host not in spec.hinted_hosts.get("different_host", ())
        ),
    }


def _image(host: HostState, spec: RequestSpec) -> bool:
    if spec.image is None:
        return True
    wanted = [spec.image.properties.get(key) for key in ("hw_architecture", "img_hv_type", "hw_vm_mode")]
    if not any(wanted):
        return True
    return any(
        all(want is None or want == have for want, have in zip(wanted, row, strict=True)) for row in host.supported
    )


def weights(hosts: list[HostState], spec: RequestSpec, multipliers: Mapping[str, float]) -> list[float]:
    """Give the weight of each of these hosts among them."""
    group = spec.group
    soft = 0
    if group is not None:
        soft = {"soft-affinity": 1, "soft-anti-affinity": -1}.get(group.policy, 0)
    raw: dict[str, list[float]] = {
        "RAMWeigher": [h.capacity.get("MEMORY_MB", 0) - h.used.get("MEMORY_MB", 0) for h in hosts],
        "CPUWeigher": [h.capacity.get("VCPU", 0) - h.used.get("VCPU", 0) for h in hosts],
        "DiskWeigher": [h.capacity.get("DISK_GB", 0) - h.used.get("DISK_GB", 0) for h in hosts],
        "Soft": [soft * (group.hosts.get(h.host, 0) if group else 0) for h in hosts],
        "BuildFailureWeigher": [-h.failed_builds for h in hosts],
    }
    totals = [0.0] * len(hosts)
    for name, numbers in raw.items():
        low, high = min(numbers), max(numbers)
        if high == low:
            continue
        for position, number in enumerate(numbers):
            totals[position] += multipliers.get(name, 1.0) * (number - low) / (high - low)
    return totals
