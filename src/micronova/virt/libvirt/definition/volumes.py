"""Volumes among a guest's disks: their names, and what libvirt is told of them."""

from collections.abc import Collection, Iterator
from typing import Final
from uuid import UUID, uuid5

from micronova.objects.errors import NotSupported
from micronova.objects.volume import AttachedVolume, ISCSIConnection, NBDConnection, RBDConnection, portal_of
from micronova.virt.libvirt.definition.types import Disk, ISCSISource, NBDSource, RBDSource, VolumeSource

PREFIXES: Final = {"virtio": "vd", "scsi": "sd", "sata": "sd", "usb": "sd", "ide": "hd", "xen": "xvd", "fdc": "fd"}
_SECRETS: Final = UUID("0d0be3a5-9a0e-4c0e-9a43-4a3f0f3c2d61")
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_LIMITS: Final = frozenset(
    f"{way}_{unit}_sec{suffix}"
    for way in ("total", "read", "write")
    for unit in ("bytes", "iops")
    for suffix in ("", "_max", "_max_length")
) | {"size_iops_sec"}


def names(prefix: str) -> Iterator[str]:
    """Yield the names of disks on a bus, in their order."""
    for letter in _LETTERS:
        yield prefix + letter
    for first in _LETTERS:
        for second in _LETTERS:
            yield prefix + first + second


def free_name(bus: str, taken: Collection[str]) -> str:
    """Return the first name on a bus that no disk has; raise NotSupported if there is none."""
    found = next((name for name in names(PREFIXES[bus]) if name not in taken), None)
    if found is None:
        raise NotSupported("The guest has as many disks as it can have.")
    return found


def wanted_name(volume: AttachedVolume, bus: str, taken: Collection[str]) -> str:
    """Return the name of a volume on its bus: with the letters of its device name, if no other disk has it."""
    device = volume.device_name.rpartition("/")[2]
    prefix = next((each for each in ("xvd", "vd", "sd", "hd") if device.startswith(each)), "")
    letters = device.removeprefix(prefix)
    wanted = PREFIXES[bus] + letters
    known = bool(prefix) and 0 < len(letters) <= 2 and letters.isascii() and letters.isalpha() and letters.islower()
    return wanted if known and wanted not in taken else free_name(bus, taken)


def volume_source(volume: AttachedVolume) -> VolumeSource:
    """Return where QEMU finds the data of a volume."""
    connection = volume.connection
    secret = secret_of(volume) if connection.encrypted else ""
    match connection:
        case NBDConnection():
            return NBDSource(
                export=connection.export_name,
                socket=connection.socket_path or "",
                host=connection.host or "",
                port=connection.port or 0,
                secret=secret,
            )
        case RBDConnection():
            return RBDSource(
                name=connection.name,
                monitors=tuple(
                    (host, str(port)) for host, port in zip(connection.hosts, connection.ports, strict=True)
                ),
                user=(connection.auth_username or "") if connection.auth_enabled else "",
                login=(connection.secret_uuid or "") if connection.auth_enabled else "",
                secret=secret,
            )
        case ISCSIConnection():
            portal = portal_of(connection)
            assert portal is not None  # else the connection would have been refused
            return ISCSISource(
                name=connection.source_name,
                host=portal[0],
                port=portal[1],
                initiator=connection.initiator,
                user=connection.auth_username or "",
                login=secret_of(volume) if connection.auth_username else "",
                secret=secret,
            )


def secret_of(volume: AttachedVolume) -> str:
    """Return the id of libvirt's secret for a volume of one guest: several guests may have the same volume."""
    return str(uuid5(_SECRETS, f"{volume.device_uuid}/{volume.volume_id}"))


def volume_disk(volume: AttachedVolume, bus: str, target: str, boot_order: int | None) -> Disk:
    """Return a volume as a disk of a guest."""
    limits = volume.connection.qos_specs or {}
    return Disk(
        file="",
        format="raw",
        target=target,
        bus=bus,
        device=volume.device_type or "disk",
        # A volume that several guests have is shared with none of them through a cache. NBD has none anyway.
        cache="none",
        serial=volume.serial,
        boot_order=boot_order,
        limits=tuple(
            (name, int(value)) for name, value in sorted(limits.items()) if name in _LIMITS and value.isdecimal()
        ),
        volume=volume_source(volume),
        readonly=volume.read_only,
        shareable=volume.multiattach,
        discard=volume.connection.discard,
    )
