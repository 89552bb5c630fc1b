"""Figures of a simulated guest: made up, but as a guest's would be. They grow with its age and stop when it does."""

from typing import Final

from micronova.objects.diagnostics import (
    CpuDiagnostics,
    DiskDiagnostics,
    GuestDiagnostics,
    MemoryDiagnostics,
    NicDiagnostics,
)
from micronova.virt import power_state
from micronova.virt.driver import BootSign
from micronova.virt.fake.guests import FakeGuest

_STATES: Final = {
    power_state.NOSTATE: "pending",
    power_state.RUNNING: "running",
    power_state.PAUSED: "paused",
    power_state.SHUTDOWN: "shutdown",
    power_state.CRASHED: "crashed",
    power_state.SUSPENDED: "suspended",
}
_BUSY: Final = 2  # percent of a CPU that an idle guest takes
_SECTOR: Final = 512
_PACKET: Final = 100  # octets


def is_silent(guest: FakeGuest, now: float) -> bool:
    """Say whether a guest that was started has done nothing yet."""
    return guest.hangs or now < guest.booted_at + guest.silent_for


def boot_sign(guest: FakeGuest, now: float) -> BootSign:
    """Say whether a guest boots."""
    if is_silent(guest, now):
        return BootSign(booted=False, seen=f"read {_SECTOR} bytes of its disks and did nothing else (simulated)")
    return BootSign(booted=True, seen="booted")


def diagnose(guest: FakeGuest, now: float) -> GuestDiagnostics:
    """Give a guest's figures at this time."""
    age = max(0, int(now - guest.booted_at)) if guest.power_state == power_state.RUNNING else 0
    silent = is_silent(guest, now)
    return GuestDiagnostics(
        state=_STATES[guest.power_state],
        driver="libvirt",  # the API knows no other name that fits: whose guest it really is, the hypervisor's tells
        hypervisor="fake",
        hypervisor_os="linux",
        uptime=age,
        num_cpus=guest.vcpus,
        cpu_details=tuple(
            CpuDiagnostics(id=number, time=age * _BUSY * 10_000_000, utilisation=_BUSY) for number in range(guest.vcpus)
        ),
        disk_details=(
            DiskDiagnostics(
                device="vda",
                read_bytes=(1 if silent else 1000 + age) * _SECTOR,
                read_requests=1 if silent else 1000 + age,
                write_bytes=0 if silent else 2 * age * _SECTOR,
                write_requests=0 if silent else 2 * age,
                errors_count=0,
            ),
        ),
        nic_details=tuple(
            NicDiagnostics(
                mac_address=interface.mac,
                rx_octets=age * _PACKET,
                rx_packets=age,
                rx_errors=0,
                rx_drop=0,
                tx_octets=0 if silent else age * _PACKET,
                tx_packets=0 if silent else age,
                tx_errors=0,
                tx_drop=0,
            )
            for interface in guest.interfaces
        ),
        memory_details=MemoryDiagnostics(maximum=guest.memory_mb, used=guest.memory_mb // 4),
    )
