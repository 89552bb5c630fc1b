"""Figures of a running guest, and a picture of its screen. Everything here blocks."""

from typing import Any

from micronova.objects.diagnostics import (
    CpuDiagnostics,
    DiskDiagnostics,
    GuestDiagnostics,
    MemoryDiagnostics,
    NicDiagnostics,
)
from micronova.virt.driver import Picture
from micronova.virt.libvirt.library import is_error
from micronova.virt.libvirt.xmltree import Element, parse

_STATES = {0: "pending", 1: "running", 2: "running", 3: "paused", 4: "running", 5: "shutdown", 6: "crashed"}
_SUSPENDED = 7


def diagnose(domain: Any, *, hypervisor: str) -> GuestDiagnostics:
    """Collect what libvirt knows; what it cannot tell is left out."""
    root = parse(domain.XMLDesc(0))
    numbers = domain.info()
    memory = _unless_failed(domain.memoryStats) or {}
    return GuestDiagnostics(
        state="suspended" if numbers[0] == _SUSPENDED else _STATES.get(numbers[0], "pending"),
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


def screenshot(connection: Any, domain: Any) -> Picture:
    """Take a picture of the first screen."""
    stream = connection.newStream(0)
    parts: list[bytes] = []
    try:
        kind = domain.screenshot(stream, 0, 0)
        stream.recvAll(lambda _, data, parts: parts.append(data), parts)
        stream.finish()
    except BaseException:
        _unless_failed(stream.abort)
        raise
    return Picture(mime_type=kind, data=b"".join(parts))


def _cpus(domain: Any) -> list[CpuDiagnostics]:
    found = _unless_failed(domain.vcpus)
    if not found:
        return []
    return [CpuDiagnostics(id=int(vcpu[0]), time=int(vcpu[2])) for vcpu in found[0]]


def _disks(domain: Any, root: Element) -> list[DiskDiagnostics]:
    found = []
    for disk in root.iterfind("./devices/disk"):
        target = disk.find("target")
        name = "" if target is None else target.get("dev", "")
        stats = _unless_failed(domain.blockStats, name)
        if stats is not None:
            found.append(
                DiskDiagnostics(
                    device=name,
                    read_requests=stats[0],
                    read_bytes=stats[1],
                    write_requests=stats[2],
                    write_bytes=stats[3],
                    errors_count=max(0, stats[4]),
                )
            )
    return found


def _nics(domain: Any, root: Element) -> list[NicDiagnostics]:
    found = []
    for nic in root.iterfind("./devices/interface"):
        mac, target = nic.find("mac"), nic.find("target")
        if mac is None or target is None:
            continue
        stats = _unless_failed(domain.interfaceStats, target.get("dev"))
        numbers = stats or [None] * 8  # its host's end may be where libvirt does not see it
        found.append(
            NicDiagnostics(
                mac_address=mac.get("address", ""),
                # What the host's end receives the guest has sent, but libvirt turns that round already.
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


def _unless_failed(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        if not is_error(error):
            raise
        return None
