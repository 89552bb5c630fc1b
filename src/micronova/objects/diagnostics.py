"""Diagnostics of a guest, as its hypervisor measures them."""

import msgspec


class CpuDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual CPU; the time is in nanoseconds."""

    id: int | None = None
    time: int | None = None
    utilisation: int | None = None


class NicDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """An interface, as the guest sees it."""

    mac_address: str
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

    device: str = ""
    read_bytes: int | None = None
    read_requests: int | None = None
    write_bytes: int | None = None
    write_requests: int | None = None
    errors_count: int | None = None


class MemoryDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in MiB."""

    maximum: int | None = None
    used: int | None = None


class GuestDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """Diagnostics of a guest, with the names of the API since 2.48."""

    state: str  # pending | running | paused | shutdown | crashed | suspended
    driver: str
    hypervisor: str | None = None
    hypervisor_os: str | None = None
    uptime: int | None = None  # seconds
    num_cpus: int = 0
    cpu_details: tuple[CpuDiagnostics, ...] = ()
    nic_details: tuple[NicDiagnostics, ...] = ()
    disk_details: tuple[DiskDiagnostics, ...] = ()
    memory_details: MemoryDiagnostics = MemoryDiagnostics()
