"""The resources of this host, and what is used of them.

Memory comes from /proc/meminfo: libvirt adds up NUMA nodes, which some machines misreport. Disk is the file system that
the guests' disks are on; other files on it count as used.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID, uuid5

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.cpu_sets import parse_cpus
from micronova.objects.orders import NodeResources
from micronova.objects.topology import NodeTopology
from micronova.placement.standard import SECURE_BOOT, standard_traits
from micronova.virt.driver import CPUTimes
from micronova.virt.libvirt.client.binding import Connect
from micronova.virt.libvirt.definition.interfaces import MODELS
from micronova.virt.libvirt.host import HostFacts
from micronova.virt.libvirt.storage.image_cache import DISK_FORMATS
from micronova.virt.libvirt.storage.layout import Layout, is_base_link_name
from micronova.virt.libvirt.storage.records import GuestRecord
from micronova.virt.libvirt.storage.tools import GIB

_NOT_A_LETTER: Final = re.compile("[^A-Z0-9]")  # libvirt says sse4.1, os-traits SSE41
_OF_FEATURES: Final = {
    "aes": ("AESNI",),
    "amd-no-ssb": ("AMD_NO_SSB",),
    "amd-ssbd": ("AMD_SSBD",),
    "bmi1": ("BMI",),
    "fma": ("FMA3",),
    "gfni": ("AVX512GFNI",),
    "ibpb": ("AMD_IBPB",),
    "md-clear": ("INTEL_MD_CLEAR",),
    "pcid": ("INTEL_PCID",),
    "pclmuldq": ("CLMUL",),
    "pni": ("SSE3",),
    "rtm": ("TSX",),
    "sha-ni": ("SHA",),
    "spec-ctrl": ("INTEL_SPEC_CTRL",),
    "ssbd": ("INTEL_SSBD",),
    "svm": ("AMD_SVM",),
    "vaes": ("AVX512VAES",),
    "virt-ssbd": ("AMD_VIRT_SSBD",),
    "vmx": ("INTEL_VMX",),
    "vpclmulqdq": ("AVX512VPCLMULQDQ",),
}
"""The names that os-traits has for features of x86 CPUs besides libvirt's own."""
ALL_CPUS: Final = -1  # VIR_NODE_CPU_STATS_ALL_CPUS
_NODES: Final = UUID("2e1d6c0e-5a43-4b1c-8f3e-6d6963726f6e")
"""Namespace of node uuids: the same host of the same cloud has the same uuid after every restart."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """The size of a file system, in bytes."""

    total: int
    used: int
    free: int


def node_resources(
    host: str,
    cloud: str,
    facts: HostFacts,
    settings: LibvirtSettings,
    layout: Layout,
    *,
    records: Iterable[GuestRecord],
    running: Mapping[str, tuple[int, int]],
    topology: NodeTopology,
    proc: Path = Path("/proc"),
) -> NodeResources:
    """Return the host's resources; `running` has vCPUs and MiB of every running guest, also of other clouds. Blocks."""
    records = list(records)
    ours = {record.uuid: record for record in records if record.cloud == cloud and record.host == host}
    foreign = [amounts for uuid, amounts in running.items() if uuid not in ours]
    disk = file_system(layout.root)
    other_files = max(0, disk.used - sum(_disk_usage(layout.guest(record.uuid)) for record in ours.values()))
    shared, dedicated = host_cpus(settings)
    return NodeResources(
        node=host,
        node_uuid=str(uuid5(_NODES, f"{cloud}/{host}")),
        hypervisor_type=facts.hypervisor,
        hypervisor_version=facts.version,
        vcpus=len(shared),
        pcpus=len(dedicated),
        topology=topology,
        memory_mb=memory_mb(proc),
        local_gb=disk.total // GIB,
        vcpus_used=sum(record.vcpus - record.pinned_vcpus for record in ours.values())
        + sum(vcpus for vcpus, _ in foreign),
        pcpus_used=sum(record.pcpus for record in ours.values()),
        memory_mb_used=sum(record.memory_mb for record in ours.values()) + sum(memory for _, memory in foreign),
        local_gb_used=sum(record.local_gb for record in ours.values()) + -(-other_files // GIB),
        disk_available_gb=disk.free // GIB,
        running_vms=len(running),
        cpu_info=cpu_info(facts),
        supported=facts.supported,
        traits=traits_of(facts),
        capabilities={
            "virt_type": facts.virt_type,
            "uefi": str(facts.uefi).lower(),
            "secure_boot": str(facts.secure_boot).lower(),
        },
    )


def cpu_info(facts: HostFacts) -> dict[str, object]:
    """Return the CPU in the form that flavors and filters use."""
    topology = {"cells": max(1, len(facts.cells)), **facts.cpu_topology}
    return {
        "arch": facts.arch,
        "model": facts.cpu_model,
        "vendor": facts.cpu_vendor,
        "features": list(facts.cpu_features),
        "topology": topology,
    }


def traits_of(facts: HostFacts) -> tuple[str, ...]:
    """Return what the host is and can do, by the names of os-traits that there are for it."""
    arch = facts.arch.upper()
    family = {"X86_64": "X86", "I686": "X86", "AARCH64": "AARCH64", "PPC64LE": "PPC64LE"}.get(arch, arch)
    names = (name for feature in facts.guest_features for name in _names_of(feature))
    named = {f"HW_CPU_{family}_{name}" for name in names}
    named |= {f"HW_ARCH_{arch}", *(f"COMPUTE_IMAGE_TYPE_{kind.upper()}" for kind in DISK_FORMATS)}
    offered = {"STORAGE_BUS": facts.disk_buses, "GRAPHICS_MODEL": facts.video_models}
    if facts.is_qemu:
        offered["NET_VIF_MODEL"] = frozenset(MODELS) - {"netfront"}  # which only Xen has
    named |= {f"COMPUTE_{kind}_{name.upper().replace('-', '_')}" for kind, names in offered.items() for name in names}
    if facts.uefi and facts.secure_boot:
        named.add(SECURE_BOOT)
    return tuple(sorted(named & standard_traits()))


def _names_of(feature: str) -> tuple[str, ...]:
    """Return what the traits of a feature of a CPU may be called; some have two names."""
    return (*_OF_FEATURES.get(feature, ()), _NOT_A_LETTER.sub("", feature.upper()))


def host_cpus(settings: LibvirtSettings) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the CPUs that guests share, and those of which each belongs to one guest."""
    online = tuple(range(os.cpu_count() or 1))
    if not settings.cpu_shared_set and not settings.cpu_dedicated_set:
        return online, ()
    shared, dedicated = parse_cpus(settings.cpu_shared_set), parse_cpus(settings.cpu_dedicated_set)
    return tuple(cpu for cpu in online if cpu in shared), tuple(cpu for cpu in online if cpu in dedicated)


def memory_mb(proc: Path = Path("/proc")) -> int:
    """Return the machine's memory in MiB."""
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) // 1024
    return 0


def file_system(folder: Path) -> FileSystem:
    """Return the size of the file system that a directory is on."""
    numbers = os.statvfs(folder)
    size = numbers.f_frsize
    return FileSystem(
        total=numbers.f_blocks * size,
        used=(numbers.f_blocks - numbers.f_bfree) * size,
        free=numbers.f_bavail * size,
    )


def cpu_times(connection: Connect) -> CPUTimes:
    """Return what the processors have done since the machine was started, as libvirt says."""
    spent, frequency = connection.getCPUStats(ALL_CPUS), connection.getInfo()[3]
    return CPUTimes(
        user=spent["user"],
        kernel=spent["kernel"],
        idle=spent["idle"],
        iowait=spent.get("iowait", 0),
        frequency=frequency,
    )


def uptime(proc: Path = Path("/proc")) -> str:
    """Return how long the host is up, in the form of uptime(1)."""
    minutes = int(float((proc / "uptime").read_text().split()[0])) // 60
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    load = ", ".join((proc / "loadavg").read_text().split()[:3])
    return f"up {days} days, {hours}:{minutes:02d}, 0 users, load average: {load}"


def _disk_usage(folder: Path) -> int:
    """Return how many bytes the files of a directory occupy; cached images that are linked there are the cache's."""
    try:
        found = [entry.stat(follow_symlinks=False) for entry in os.scandir(folder) if not is_base_link_name(entry.name)]
        return sum(status.st_blocks * 512 for status in found)
    except FileNotFoundError:
        return 0
