"""Diagnostics of a guest, as its hypervisor measures them."""

from typing import Annotated

import msgspec

from micronova.objects.host_limits import MOST_DEVICES, Count, LargeNumber, Name


class CpuDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual CPU; the time is in nanoseconds."""

    id: LargeNumber | None = None
    time: LargeNumber | None = None
    utilisation: LargeNumber | None = None


class NicDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """An interface, as the guest sees it."""

    mac_address: Name
    rx_octets: LargeNumber | None = None
    rx_packets: LargeNumber | None = None
    rx_errors: LargeNumber | None = None
    rx_drop: LargeNumber | None = None
    rx_rate: LargeNumber | None = None
    tx_octets: LargeNumber | None = None
    tx_packets: LargeNumber | None = None
    tx_errors: LargeNumber | None = None
    tx_drop: LargeNumber | None = None
    tx_rate: LargeNumber | None = None


class DiskDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """A disk."""

    device: Name = ""
    serial: Name = ""  # of a volume its id
    read_bytes: LargeNumber | None = None
    read_requests: LargeNumber | None = None
    write_bytes: LargeNumber | None = None
    write_requests: LargeNumber | None = None
    errors_count: LargeNumber | None = None


class MemoryDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in MiB."""

    maximum: LargeNumber | None = None
    used: LargeNumber | None = None


_DEVICES = msgspec.Meta(max_length=MOST_DEVICES)


class GuestDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """Diagnostics of a guest, with the names of the API since 2.48."""

    state: Name  # pending | running | paused | shutdown | crashed | suspended
    driver: Name
    hypervisor: Name | None = None
    hypervisor_os: Name | None = None
    uptime: LargeNumber | None = None  # seconds
    num_cpus: Count = 0
    cpu_details: Annotated[tuple[CpuDiagnostics, ...], _DEVICES] = ()
    nic_details: Annotated[tuple[NicDiagnostics, ...], _DEVICES] = ()
    disk_details: Annotated[tuple[DiskDiagnostics, ...], _DEVICES] = ()
    memory_details: MemoryDiagnostics = MemoryDiagnostics()
