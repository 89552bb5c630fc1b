"""What guests have read and written of their volumes, as the hypervisor counts it."""

from micronova.objects import power_state
from micronova.objects.volume import VolumeStatistics
from micronova.virt.driver import Diagnostics, Driver, if_capable

_COUNTED = frozenset({power_state.NAMES[power_state.RUNNING], power_state.NAMES[power_state.PAUSED]})


async def of_guest(driver: Driver, uuid: str) -> tuple[VolumeStatistics, ...]:
    """Return the statistics of the disks of a guest that have a serial number, as volumes have.

    A guest that does not run has none, nor has one on a host that does not measure its guests.
    """
    measuring = if_capable(driver, Diagnostics)
    if measuring is None:
        return ()
    found = await measuring.get_diagnostics(uuid)
    if found.state not in _COUNTED:
        return ()
    return tuple(
        VolumeStatistics(
            volume_id=disk.serial,
            reads=disk.read_requests or 0,
            read_bytes=disk.read_bytes or 0,
            writes=disk.write_requests or 0,
            write_bytes=disk.write_bytes or 0,
        )
        for disk in found.disk_details
        if disk.serial
    )
