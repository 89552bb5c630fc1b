"""The known extra specs with the values that they may have (checked since 2.86).

A spec in an unknown namespace may belong to another program and is accepted. An unknown spec in a known namespace is
refused.
"""

import re
from dataclasses import dataclass
from typing import Literal

from micronova.objects.errors import Invalid
from micronova.objects.guest_properties import FALSE_WORDS, TRUE_WORDS
from micronova.placement.standard import CUSTOM_NAME, standard_classes, standard_traits


@dataclass(frozen=True, slots=True)
class Spec:
    """The form of one extra spec's value."""

    kind: Literal["text", "whole", "flag"] = "text"
    one_of: tuple[str, ...] = ()
    pattern: str = ""
    least: int | None = None
    most: int | None = None

    def refuses(self, value: str) -> str | None:
        """Return what is wrong with a value, None if nothing is."""
        if self.one_of and value not in self.one_of:
            return f"'{value}' is not one of: {', '.join(self.one_of)}"
        if self.pattern and not re.fullmatch(self.pattern, value):
            return f"'{value}' is not of the format '{self.pattern}'"
        if self.kind == "flag" and value.strip().lower() not in TRUE_WORDS | FALSE_WORDS:
            return f"'{value}' is not a valid boolean-like value"
        return self._refuses_number(value) if self.kind == "whole" else None

    def _refuses_number(self, value: str) -> str | None:
        try:
            number = int(value)
        except ValueError:
            return f"'{value}' is not a valid integer value"
        if self.least is not None and number < self.least:
            return f"'{value}' is less than the min value of '{self.least}'"
        if self.most is not None and number > self.most:
            return f"'{value}' is greater than the max value of '{self.most}'"
        return None


_ANY = Spec()
_FLAG = Spec("flag")
_WHOLE = Spec("whole")
_COUNT = Spec("whole", least=0)
_POSITIVE = Spec("whole", least=1)
_CPUS = Spec(pattern=r"\^?\d+(-\d+)?(,\^?\d+(-\d+)?)*")
_TRAIT = Spec(one_of=("required", "forbidden"))
_GROUP = r"([a-zA-Z0-9_-]{1,64})?"

_EXACT: dict[str, Spec] = {
    "accel:device_profile": _ANY,
    "group_policy": Spec(one_of=("isolate", "none")),
    "hide_hypervisor_id": _FLAG,
    "hw:boot_menu": _FLAG,
    "hw:cpu_cores": _POSITIVE,
    "hw:cpu_dedicated_mask": _CPUS,
    "hw:cpu_max_cores": _POSITIVE,
    "hw:cpu_max_sockets": _POSITIVE,
    "hw:cpu_max_threads": _POSITIVE,
    "hw:cpu_policy": Spec(one_of=("dedicated", "shared", "mixed")),
    "hw:cpu_realtime": _FLAG,
    "hw:cpu_realtime_mask": _CPUS,
    "hw:cpu_sockets": _POSITIVE,
    "hw:cpu_thread_policy": Spec(one_of=("prefer", "isolate", "require")),
    "hw:cpu_threads": _POSITIVE,
    "hw:emulator_threads_policy": Spec(one_of=("isolate", "share")),
    "hw:ephemeral_encryption": _FLAG,
    "hw:ephemeral_encryption_format": Spec(one_of=("plain", "luks", "luksv2")),
    "hw:hide_hypervisor_id": _FLAG,
    "hw:locked_memory": _FLAG,
    "hw:mem_encryption": _FLAG,
    "hw:mem_encryption_model": Spec(one_of=("amd-sev", "amd-sev-es", "amd-sev-snp", "intel-tdx")),
    "hw:mem_page_size": Spec(pattern=r"(large|small|any|\d+([kKMGT]i?)?(b|bit|B)?)"),
    "hw:numa_nodes": _POSITIVE,
    "hw:pci_numa_affinity_policy": Spec(one_of=("required", "preferred", "legacy", "socket")),
    "hw:pmem": Spec(pattern=r"[a-zA-Z0-9_]+(,[a-zA-Z0-9_]+)*,?"),
    "hw:pmu": _FLAG,
    "hw:redirected_usb_ports": Spec("whole", least=0, most=15),
    "hw:serial_port_count": _COUNT,
    "hw:sound_model": Spec(one_of=("sb16", "es1370", "pcspk", "ac97", "ich6", "ich9", "usb", "virtio")),
    "hw:tpm_model": Spec(one_of=("tpm-tis", "tpm-crb")),
    "hw:tpm_secret_security": Spec(one_of=("user", "host", "deployment")),
    "hw:tpm_version": Spec(one_of=("1.2", "2.0")),
    "hw:usb_model": Spec(one_of=("none", "nec-xhci", "qemu-xhci")),
    "hw:vif_multiqueue_enabled": _FLAG,
    "hw:viommu_model": Spec(one_of=("intel", "smmuv3", "virtio", "auto")),
    "hw:virtio_packed_ring": _FLAG,
    "hw:watchdog_action": Spec(one_of=("none", "pause", "poweroff", "reset", "disabled")),
    "hw_rng:allowed": _FLAG,
    "hw_rng:rate_bytes": _COUNT,
    "hw_rng:rate_period": _COUNT,
    "hw_video:ram_max_mb": _COUNT,
    "os:secure_boot": Spec(one_of=("disabled", "required")),
    "pci_passthrough:alias": Spec(pattern=r"[^:,]+:\d+(\s*,\s*[^:,]+:\d+)*"),
    "quota:cpu_period": _COUNT,
    "quota:cpu_quota": _WHOLE,
    "quota:cpu_shares": _COUNT,
    "vmware:hw_version": _ANY,
    "vmware:storage_policy": _ANY,
    **{f"quota:disk_{way}_{unit}_sec": _COUNT for way in ("read", "write", "total") for unit in ("bytes", "iops")},
    **{f"quota:vif_{way}_{what}": _COUNT for way in ("inbound", "outbound") for what in ("average", "peak", "burst")},
}
for _resource in ("cpu", "memory", "disk_io", "vif"):
    _EXACT[f"quota:{_resource}_limit"] = _COUNT
    _EXACT[f"quota:{_resource}_reservation"] = _WHOLE
    _EXACT[f"quota:{_resource}_shares_level"] = Spec(one_of=("custom", "high", "normal", "low"))
    _EXACT[f"quota:{_resource}_shares_share"] = _COUNT

_CAPABILITIES = (
    "id uuid service_id host vcpus memory_mb local_gb vcpus_used memory_mb_used local_gb_used "
    "hypervisor_type hypervisor_version hypervisor_hostname "
    "free_ram_mb free_disk_gb current_workload running_vms "
    "disk_available_least host_ip mapped cpu_allocation_ratio ram_allocation_ratio disk_allocation_ratio "
    "total_usable_ram_mb total_usable_disk_gb disk_mb_used free_disk_mb vcpus_total num_instances num_io_ops "
    "failed_builds aggregates cell_uuid updated"
).split()
_NESTED = (
    "cpu_info metrics stats numa_topology supported_hv_specs pci_device_pools nodename pci_stats "
    "supported_instances limits instances"
).split()

# Specs with a free part in their names.
_PATTERNS: tuple[tuple[re.Pattern[str], Spec], ...] = tuple(
    (re.compile(pattern), spec)
    for pattern, spec in (
        (r"hw:numa_cpus\.\d+", _CPUS),
        (r"hw:numa_mem\.\d+", _POSITIVE),
        (r"aggregate_instance_extra_specs:.+", _ANY),
        (rf"capabilities:({'|'.join(_CAPABILITIES)})", _ANY),
        (rf"capabilities:({'|'.join(_NESTED)})(:\w+)*", _ANY),
    )
)
_PLACEMENT = re.compile(rf"(resources|trait){_GROUP}:([A-Z0-9_]+)")
_NAMESPACES = re.compile(
    rf"accel|aggregate_instance_extra_specs|capabilities|hw|hw_rng|hw_video|os|pci_passthrough|quota|vmware"
    rf"|resources{_GROUP}|trait{_GROUP}"
)


def check(name: str, value: str) -> None:
    """Raise Invalid for an unknown extra spec in a known namespace, and for a value that a spec cannot have."""
    if is_unknown(name):
        raise Invalid(f"Validation failed; extra spec '{name}' does not appear to be a valid extra spec.")
    if (spec := _find(name)) is not None and (wrong := spec.refuses(value)):
        raise Invalid(f"Validation failed for extra spec '{name}'; {wrong}.")


def is_unknown(name: str) -> bool:
    """Return whether an extra spec is in a known namespace, and unknown there."""
    namespace, colon, _ = name.partition(":")
    return bool(colon) and _NAMESPACES.fullmatch(namespace) is not None and _find(name) is None


def is_known(name: str) -> bool:
    """Return whether Nova has an extra spec of this name."""
    return _find(name) is not None


def is_of_others(name: str) -> bool:
    """Return whether an extra spec is in a namespace that Nova does not have: a filter of a plugin may honour it."""
    namespace, colon, _ = name.partition(":")
    return bool(colon) and _NAMESPACES.fullmatch(namespace) is None


def _find(name: str) -> Spec | None:
    matching = (spec for pattern, spec in _PATTERNS if pattern.fullmatch(name))
    return _EXACT.get(name) or _of_placement(name) or next(matching, None)


def _of_placement(name: str) -> Spec | None:
    """Return the form of an extra spec that names a resource class or a trait, None if there is none of this name.

    A custom one may be made later.
    """
    found = _PLACEMENT.fullmatch(name)
    if found is None:
        return None
    resources = found[1] == "resources"
    known = found[3] in (standard_classes() if resources else standard_traits()) or CUSTOM_NAME.fullmatch(found[3])
    return (_WHOLE if resources else _TRAIT) if known else None
