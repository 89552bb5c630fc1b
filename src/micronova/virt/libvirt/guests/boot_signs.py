"""Whether guests have begun to boot, as QEMU's counters of their disks and interfaces show.

The counters start with QEMU, so they cover everything since the guest's start. They are clear: a BIOS reads one sector
of a disk, while the smallest boot loader reads more than a track. UEFI firmware searches all disks for file systems and
may use the network; once it has loaded anything it has read a megabyte. The serial console tells less: UEFI writes to
it, and many guests never do.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from micronova.virt.driver import BootSign
from micronova.virt.libvirt.client.binding import Connect, Domain
from micronova.virt.libvirt.client.connection import Connection
from micronova.virt.libvirt.client.library import has_code, load
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.client.xmltree import parse
from micronova.virt.libvirt.guests import domains
from micronova.virt.libvirt.storage.records import GuestRecords

BIOS_READS: Final = 64 * 1024
"""Bytes. Less is a boot sector, and perhaps the first part of a boot loader."""
UEFI_READS: Final = 1024 * 1024
"""Bytes. Searching a dozen partitions takes less, a kernel more."""

_RESUMED: Final = BootSign(booted=True, seen="was resumed from its saved memory")


async def boot_signs(
    connection: Connection, records: GuestRecords, files: ThreadPool, cloud: str, uuids: Collection[str]
) -> dict[str, BootSign]:
    """Return the signs of this cloud's guests; those that do not run, or cannot be measured, are left out."""
    signs = await connection.read(lambda connect: measure(connect, uuids, cloud), "tell whether its guests boot")
    for uuid in [uuid for uuid, sign in signs.items() if not sign.booted]:
        # A guest that was restored from saved memory booted earlier, in another QEMU with other counters.
        record = await files.run(records.load, uuid)
        if record is not None and record.resumed:
            signs[uuid] = _RESUMED
    return signs


def measure(connection: Connect, uuids: Collection[str], cloud: str) -> dict[str, BootSign]:
    """Return the signs of the guests with one call for all. Blocks."""
    library = load()
    ours = [domain for uuid in uuids if (domain := domains.find_ours(connection, uuid, cloud)) is not None]
    if not ours:
        return {}
    wanted = library.VIR_DOMAIN_STATS_STATE | library.VIR_DOMAIN_STATS_BLOCK | library.VIR_DOMAIN_STATS_INTERFACE
    # Do not wait for a guest that libvirt is busy with: it is measured again soon.
    flags = library.VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT
    found = {}
    for domain, figures in connection.domainListGetStats(ours, wanted, flags):
        if figures.get("state.state") == library.VIR_DOMAIN_RUNNING:
            try:
                sign = read_sign(figures, uefi=_has_uefi(domain))
            except Exception as error:
                if not has_code(error, "VIR_ERR_NO_DOMAIN"):  # it was removed in the meantime
                    raise
                continue
            if sign is not None:
                found[domain.UUIDString()] = sign
    return found


def read_sign(figures: Mapping[str, Any], *, uefi: bool) -> BootSign | None:
    """Return the sign that libvirt's figures of a guest show, or None if they have no disk."""
    reads = _each(figures, "block", "rd.bytes")
    if not reads:
        return None
    read = sum(reads)
    written = sum(_each(figures, "block", "wr.bytes"))
    sent = sum(_each(figures, "net", "tx.pkts"))
    if uefi:
        booted = read >= UEFI_READS or written > 0
        seen = f"read {read} bytes of its disks and wrote none, like UEFI firmware that finds nothing to start"
    else:
        booted = read >= BIOS_READS or written > 0 or sent > 0
        seen = f"read {read} bytes of its disks, wrote none, and sent nothing on its network"
    return BootSign(booted=booted, seen=f"read {read} and wrote {written} bytes" if booted else seen)


def _each(figures: Mapping[str, Any], group: str, name: str) -> list[int]:
    keys = (f"{group}.{number}.{name}" for number in range(figures.get(f"{group}.count", 0)))
    return [int(figures[key]) for key in keys if key in figures]


def _has_uefi(domain: Domain) -> bool:
    loader = parse(domain.XMLDesc(0)).find("./os/loader")
    return loader is not None and loader.get("type") == "pflash"
