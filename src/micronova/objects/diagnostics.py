"""Diagnostics of a guest, as its hypervisor measures them."""

from typing import Annotated

import msgspec

from micronova.objects.host_limits import MOST_DEVICES, Name


class CpuDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual CPU; the time is in nanoseconds."""

    id: int | None = None
    time: int | None = None
    utilisation: int | None = None


class NicDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """An interface, as the guest sees it."""

    mac_address: Name
    rx_octets: int | None = None
    rx_packets: int | None = None
    rx_errors: int | None = None
    rx_drop: int | None = None
    rx_rate: int | None = None
    tx_octets: int | None = None
    tx_packets: int | None = None
    tx_errors: int | None = None
    tx_drop: int | None = None
    tx_rate: int | None = None


class DiskDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """A disk."""

    device: Name = ""
    read_bytes: int | None = None
    read_requests: int | None = None
    write_bytes: int | None = None
    write_requests: int | None = None
    errors_count: int | None = None


class MemoryDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in MiB."""

    maximum: int | None = None
    used: int | None = None


_DEVICES = msgspec.Meta(max_length=MOST_DEVICES)


class GuestDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """Diagnostics of a guest, with the names of the API since 2.48."""

    state: Name  # pending | running | paused | shutdown | crashed | suspended
    driver: Name
    hypervisor: Name | None = None
    hypervisor_os: Name | None = None
    uptime: int | None = None  # seconds
    num_cpus: int = 0
    cpu_details: Annotated[tuple[CpuDiagnostics, ...], _DEVICES] = ()
    nic_details: Annotated[tuple[NicDiagnostics, ...], _DEVICES] = ()
    disk_details: Annotated[tuple[DiskDiagnostics, ...], _DEVICES] = ()
    memory_details: MemoryDiagnostics = MemoryDiagnostics()
