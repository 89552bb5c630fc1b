"""Invented statistics of a simulated guest. They grow with its age while it runs."""

from typing import Final

from micronova.objects import power_state
from micronova.objects.diagnostics import (
    CpuDiagnostics,
    DiskDiagnostics,
    GuestDiagnostics,
    MemoryDiagnostics,
    NicDiagnostics,
)
from micronova.virt.driver import BootSign
from micronova.virt.fake.guests import FakeGuest

_BUSY: Final = 2  # percent of a CPU that an idle guest takes
_SECTOR: Final = 512
_PACKET: Final = 100  # octets


def is_silent(guest: FakeGuest, now: float) -> bool:
    """Return whether a started guest has not begun to boot."""
    return guest.hangs or now < guest.booted_at + guest.silent_for


def boot_sign(guest: FakeGuest, now: float) -> BootSign:
    """Return whether a guest has begun to boot."""
    if is_silent(guest, now):
        return BootSign(booted=False, seen=f"read {_SECTOR} bytes of its disks and did nothing else (simulated)")
    return BootSign(booted=True, seen="booted")


def _disks(guest: FakeGuest) -> list[tuple[str, str]]:
    """Return the names of a guest's disks, with the ids of volumes."""
    volumes = [(volume.device.removeprefix("/dev/"), volume.volume_id) for volume in guest.volumes]
    return volumes if any(volume.root for volume in guest.volumes) else [("vda", ""), *volumes]


def diagnose(guest: FakeGuest, now: float) -> GuestDiagnostics:
    """Return a guest's statistics at this time."""
    age = max(0, int(now - guest.booted_at)) if guest.power_state == power_state.RUNNING else 0
    silent = is_silent(guest, now)
    return GuestDiagnostics(
        state=power_state.NAMES[guest.power_state],
        driver="libvirt",  # the API allows no better name; `hypervisor` tells that it is simulated
        hypervisor="fake",
        hypervisor_os="linux",
        uptime=age,
        num_cpus=guest.vcpus,
        cpu_details=tuple(
            CpuDiagnostics(id=number, time=age * _BUSY * 10_000_000, utilisation=_BUSY) for number in range(guest.vcpus)
        ),
        disk_details=tuple(
            DiskDiagnostics(
                device=device,
                serial=serial,
                read_bytes=(1 if silent else 1000 + age) * _SECTOR,
                read_requests=1 if silent else 1000 + age,
                write_bytes=0 if silent else 2 * age * _SECTOR,
                write_requests=0 if silent else 2 * age,
                errors_count=0,
            )
            for device, serial in _disks(guest)
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
