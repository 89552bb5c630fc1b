"""Whether guests have begun to boot, told from what they did to their disks and on their networks.

The counters are QEMU's and begin with it, so they cover all that a guest did since its start. They are clear: a BIOS
reads one sector of a disk and hands over, while the smallest boot loader reads more than a track. UEFI firmware looks
for file systems on all disks and may ask the network; by the time that it has loaded anything it has read a megabyte.
The serial console tells less: UEFI writes to it, and many guests never do.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from micronova.virt.driver import BootSign
from micronova.virt.libvirt import domains
from micronova.virt.libvirt.connection import Connection
from micronova.virt.libvirt.layout import GuestStore
from micronova.virt.libvirt.library import has_code, load
from micronova.virt.libvirt.pool import Pool
from micronova.virt.libvirt.xmltree import parse

BIOS_READS: Final = 64 * 1024
"""Bytes. Less is a boot sector, and perhaps the part of a boot loader that looks for the rest of it."""
UEFI_READS: Final = 1024 * 1024
"""Bytes. Looking through a dozen partitions takes less, a kernel more."""

_RESUMED: Final = BootSign(booted=True, seen="was resumed from its saved memory")


async def boot_signs(
    connection: Connection, store: GuestStore, files: Pool, cloud: str, uuids: Collection[str]
) -> dict[str, BootSign]:
    """Look at guests of this cloud; who does not run, or cannot be measured, is left out."""
    signs = await connection.read(lambda open_: look(open_, uuids, cloud), "tell whether its guests boot")
    for uuid in [uuid for uuid, sign in signs.items() if not sign.booted]:
        # Saved memory brings no counters with it: what it did is in those of the QEMU that it ran in before.
        record = await files.run(store.load, uuid)
        if record is not None and record.resumed:
            signs[uuid] = _RESUMED
    return signs


def look(connection: Any, uuids: Collection[str], cloud: str) -> dict[str, BootSign]:
    """Measure the guests by one call. Blocks."""
    library = load()
    ours = [domain for uuid in uuids if (domain := domains.find_ours(connection, uuid, cloud)) is not None]
    if not ours:
        return {}
    wanted = library.VIR_DOMAIN_STATS_STATE | library.VIR_DOMAIN_STATS_BLOCK | library.VIR_DOMAIN_STATS_INTERFACE
    # A guest that libvirt is busy with is not waited for: the next look is soon.
    flags = library.VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT
    found = {}
    for domain, figures in connection.domainListGetStats(ours, wanted, flags):
        if figures.get("state.state") == library.VIR_DOMAIN_RUNNING:
            try:
                sign = judge(figures, uefi=_has_uefi(domain))
            except Exception as error:
                if not has_code(error, "VIR_ERR_NO_DOMAIN"):  # gone while we looked
                    raise
                continue
            if sign is not None:
                found[domain.UUIDString()] = sign
    return found


def judge(figures: Mapping[str, Any], *, uefi: bool) -> BootSign | None:
    """Tell from libvirt's figures of a guest whether it boots; None if they do not tell."""
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


def _has_uefi(domain: Any) -> bool:
    loader = parse(domain.XMLDesc(0)).find("./os/loader")
    return loader is not None and loader.get("type") == "pflash"
