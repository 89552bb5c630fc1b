"""Volumes as hosts see them: what a guest is given, and how its host reaches the data."""

from typing import Any, Final

import msgspec

from micronova.objects.errors import NotSupported
from micronova.objects.host_limits import LargeNumber, Name
from micronova.objects.wrong_values import wrong_value

SEALED: Final = "sealed_key"
"""The name of the sealed secret in stored connections, from the time when only keys were sealed."""


class _Connection(msgspec.Struct, frozen=True, kw_only=True, tag_field="driver_volume_type"):
    """What connections of all kinds have."""

    access_mode: str = "rw"  # or ro
    discard: bool = False
    encrypted: bool = False
    qos_specs: dict[str, str] | None = None  # limits that the hypervisor has to apply
    # The key of an encrypted volume, or the password of a login, as compute's database has it; orders have the text.
    sealed_secret: bytes | None = msgspec.field(name=SEALED, default=None)


class NBDConnection(_Connection, frozen=True, kw_only=True, tag="nbd"):
    """A volume that is served by NBD: on a Unix socket of this machine, or at a host and port."""

    export_name: str
    socket_path: str | None = None
    host: str | None = None
    port: int | None = None

    @property
    def source_name(self) -> str:
        """The name of the volume at what serves it."""
        return self.export_name


class RBDConnection(_Connection, frozen=True, kw_only=True, tag="rbd"):
    """A volume in a Ceph cluster. Libvirt of the host has the key of the user, as a secret with this id."""

    name: str  # POOL/VOLUME
    hosts: tuple[str, ...] = ()  # the monitors
    ports: tuple[int | str, ...] = ()
    auth_enabled: bool = False
    auth_username: str | None = None
    secret_uuid: str | None = None

    @property
    def source_name(self) -> str:
        """The name of the volume in the cluster."""
        return self.name


class ISCSIConnection(_Connection, frozen=True, kw_only=True, tag="iscsi"):
    """A volume behind an iSCSI target, to which QEMU itself logs in."""

    target_iqn: str
    target_portal: str  # HOST:PORT
    target_lun: int = 0
    auth_username: str | None = None
    auth_password: str | None = None  # which compute seals at once
    initiator: str = ""  # the name of the host, as the target knows it

    @property
    def source_name(self) -> str:
        """The name of the volume at the target."""
        return f"{self.target_iqn}/{self.target_lun}"


Connection = NBDConnection | RBDConnection | ISCSIConnection
"""How a host reaches a volume: a tagged union, by the names that Cinder has for `driver_volume_type`.

QEMU reaches all of them by itself: nothing else of the host takes part."""
_KINDS: Final[dict[str, type[Connection]]] = {"nbd": NBDConnection, "rbd": RBDConnection, "iscsi": ISCSIConnection}


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
    # Of an encrypted volume, which QEMU decrypts, or of the login at a target; for as long as the guest runs.
    secret: str | None = msgspec.field(name="passphrase", default=None)

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
    kind = _KINDS.get(str(plain.get("driver_volume_type")))
    if kind is None:
        name = str(plain.get("driver_volume_type"))[:64]
        raise NotSupported(f"The volume is connected by {name!r}, which hosts of this cloud cannot do.")
    known = {key: value for key, value in plain.items() if value is not None}
    known.pop(SEALED, None)  # which compute alone writes
    try:
        connection: Connection = msgspec.convert(known, kind)
    except msgspec.ValidationError as error:
        wrong = wrong_value(error, kind).named("the connection")
        raise NotSupported(f"The volume service describes a connection that is not understood: {wrong}.") from error
    if lacking := _lacks(connection):
        raise NotSupported(f"The volume service describes a connection by {lacking}.")
    return connection


def _lacks(connection: Connection) -> str:
    """Return what a connection lacks that QEMU needs; empty if it lacks nothing."""
    match connection:
        case NBDConnection(socket_path=None) if connection.host is None or connection.port is None:
            return "NBD without a socket, or a host and a port"
        case RBDConnection(auth_enabled=True) if not connection.auth_username or not connection.secret_uuid:
            return "RBD without the id of libvirt's secret: set rbd_secret_uuid there, and define it on the hosts"
        case RBDConnection() if len(connection.hosts) != len(connection.ports):
            return "RBD with another number of monitors than ports"
        case ISCSIConnection() if portal_of(connection) is None:
            return "iSCSI without the host and the port of the target"
        case ISCSIConnection() if bool(connection.auth_username) != bool(connection.auth_password):
            return "iSCSI with only one of a user and a password"
    return ""


def portal_of(connection: ISCSIConnection) -> tuple[str, int] | None:
    """Return host and port of a target; None if that is not what they are."""
    host, _, port = connection.target_portal.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    return (host, int(port)) if host and port.isascii() and port.isdecimal() else None


def initiator_of(host: str) -> str:
    """Return the name by which a host logs in to iSCSI targets."""
    return "iqn.2010-10.org.openstack:host-" + "".join(
        each if each.isascii() and (each.isalnum() or each in ".-") else "-" for each in host.lower()
    )
