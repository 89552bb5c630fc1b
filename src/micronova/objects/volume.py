"""Volumes as hosts see them: what a guest is given, and how its host reaches the data."""

from typing import Any

import msgspec

from micronova.objects.errors import NotSupported
from micronova.objects.host_limits import LargeNumber, Name
from micronova.objects.wrong_values import wrong_value


class NBDConnection(msgspec.Struct, frozen=True, kw_only=True, tag_field="driver_volume_type", tag="nbd"):
    """A volume that is served by NBD: on a Unix socket of this machine, or at a host and port."""

    export_name: str
    socket_path: str | None = None
    host: str | None = None
    port: int | None = None
    access_mode: str = "rw"  # or ro
    discard: bool = False
    encrypted: bool = False
    qos_specs: dict[str, str] | None = None  # limits that the hypervisor has to apply
    sealed_key: bytes | None = None  # of an encrypted volume, as compute's database has it; orders have the passphrase


Connection = NBDConnection
"""How a host reaches a volume: a tagged union, by the names that Cinder has for `driver_volume_type`."""


class AttachedVolume(msgspec.Struct, frozen=True, kw_only=True):
    """A volume of a guest, in an order to its host."""

    volume_id: str
    attachment_id: str  # at the volume service
    device_uuid: str  # of the BlockDevice
    device_name: str  # such as /dev/vdb; the order of names is the order of disks on a bus
    connection: Connection
    boot_index: int | None = None  # 0: the guest boots from it
    disk_bus: str | None = None
    device_type: str | None = None  # disk, cdrom or lun
    tag: str | None = None
    size_gb: int | None = None
    multiattach: bool = False  # other guests may use it at the same time: nothing may be cached
    passphrase: str | None = None  # of an encrypted volume: QEMU decrypts, and only for as long as the guest runs

    @property
    def serial(self) -> str:
        """The serial number that the guest sees."""
        return self.volume_id

    @property
    def read_only(self) -> bool:
        """Whether the guest may only read."""
        return self.connection.access_mode == "ro"


class VolumeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a guest has read and written of a volume since it was started or got the volume."""

    volume_id: Name
    reads: LargeNumber
    read_bytes: LargeNumber
    writes: LargeNumber
    write_bytes: LargeNumber


def connection_of(info: dict[str, Any]) -> Connection:
    """Return the connection that a volume service describes, all in one object or with its data nested.

    Raise NotSupported if it is of another kind than ours.
    """
    data = info.get("data")
    plain = {**info, **data} if isinstance(data, dict) else info
    kind = plain.get("driver_volume_type")
    if kind != "nbd":
        raise NotSupported(f"The volume is connected by {str(kind)[:64]!r}, which hosts of this cloud cannot do.")
    try:
        connection = msgspec.convert(plain, Connection)
    except msgspec.ValidationError as error:
        wrong = wrong_value(error, Connection).named("the connection")
        raise NotSupported(f"The volume service describes a connection that is not understood: {wrong}.") from error
    if connection.socket_path is None and (connection.host is None or connection.port is None):
        raise NotSupported("The volume service describes a connection by NBD without a socket, or a host and a port.")
    return msgspec.structs.replace(connection, sealed_key=None)  # which compute alone writes
