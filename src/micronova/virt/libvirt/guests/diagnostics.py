"""Statistics of a running guest. Every function here blocks."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from micronova.objects import power_state
from micronova.objects.diagnostics import (
    CpuDiagnostics,
    DiskDiagnostics,
    GuestDiagnostics,
    MemoryDiagnostics,
    NicDiagnostics,
)
from micronova.virt.libvirt.client.binding import Domain
from micronova.virt.libvirt.client.library import is_error
from micronova.virt.libvirt.client.xmltree import Element, parse
from micronova.virt.libvirt.guests import domains

P = ParamSpec("P")
T = TypeVar("T")


def diagnose(domain: Domain, *, hypervisor: str) -> GuestDiagnostics:
    """Return a guest's statistics; what libvirt cannot measure is left out."""
    root = parse(domain.XMLDesc(0))
    numbers = domain.info()
    memory = _unless_failed(domain.memoryStats) or {}
    return GuestDiagnostics(
        state=power_state.NAMES[domains.power_of(numbers[0], saved=False)],
        driver="libvirt",
        hypervisor=hypervisor,
        hypervisor_os="linux",
        num_cpus=int(numbers[3]),
        cpu_details=tuple(_cpus(domain)),
        disk_details=tuple(_disks(domain, root)),
        nic_details=tuple(_nics(domain, root)),
        memory_details=MemoryDiagnostics(
            maximum=int(numbers[1]) // 1024,
            used=(int(memory["rss"]) if "rss" in memory else int(numbers[2])) // 1024,
        ),
    )


def _cpus(domain: Domain) -> list[CpuDiagnostics]:
    found = _unless_failed(domain.vcpus)
    if not found:
        return []
    return [CpuDiagnostics(id=int(vcpu[0]), time=int(vcpu[2])) for vcpu in found[0]]


def _disks(domain: Domain, root: Element) -> list[DiskDiagnostics]:
    found = []
    for disk in root.iterfind("./devices/disk"):
        target = disk.find("target")
        name = "" if target is None else target.get("dev", "")
        stats = _unless_failed(domain.blockStats, name)
        if stats is not None:
            found.append(
                DiskDiagnostics(
                    device=name,
                    serial=disk.findtext("serial") or "",
                    read_requests=stats[0],
                    read_bytes=stats[1],
                    write_requests=stats[2],
                    write_bytes=stats[3],
                    errors_count=max(0, stats[4]),
                )
            )
    return found


def _nics(domain: Domain, root: Element) -> list[NicDiagnostics]:
    found = []
    for nic in root.iterfind("./devices/interface"):
        mac, target = nic.find("mac"), nic.find("target")
        if mac is None or target is None:
            continue
        stats = _unless_failed(domain.interfaceStats, target.get("dev", ""))
        numbers = stats or [None] * 8  # libvirt cannot see a tap in another network namespace
        found.append(
            NicDiagnostics(
                mac_address=mac.get("address", ""),
                # From the guest's point of view: libvirt has already swapped the tap's counters.
                rx_octets=numbers[0],
                rx_packets=numbers[1],
                rx_errors=numbers[2],
                rx_drop=numbers[3],
                tx_octets=numbers[4],
                tx_packets=numbers[5],
                tx_errors=numbers[6],
                tx_drop=numbers[7],
            )
        )
    return found


def _unless_failed(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if not is_error(error):
            raise
        return None
