"""A guest's definition as plain data. `compose` makes it; `guest_xml` and `device_xml` write it as XML."""

from dataclasses import dataclass, field
from typing import Literal

from micronova.virt.libvirt.definition.topology import CpuPlan
from micronova.virt.libvirt.host import is_qemu, is_x86


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The instance that a guest belongs to. The definition carries it, so that a guest is recognised as ours."""

    uuid: str
    epoch: int
    cloud: str
    name: str
    project_id: str = ""
    user_id: str = ""
    flavor: str = ""
    image_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The CPU that the guest sees."""

    mode: str = "none"  # none: the hypervisor's default
    model: str = ""
    flags: tuple[tuple[str, str], ...] = ()  # (name, require | disable)


@dataclass(frozen=True, slots=True, kw_only=True)
class NBDSource:
    """A volume that is served by NBD: on a Unix socket, or at a host and a port."""

    export: str
    socket: str = ""
    host: str = ""
    port: int = 0
    secret: str = ""  # of libvirt, with the key of an encrypted volume


@dataclass(frozen=True, slots=True, kw_only=True)
class RBDSource:
    """A volume in a Ceph cluster."""

    name: str
    monitors: tuple[tuple[str, str], ...] = ()  # (host, port); none: those of the host's own configuration
    user: str = ""
    login: str = ""  # libvirt's secret with the key of the user
    secret: str = ""  # as above


@dataclass(frozen=True, slots=True, kw_only=True)
class ISCSISource:
    """A volume behind an iSCSI target."""

    name: str
    host: str
    port: int
    initiator: str
    user: str = ""
    login: str = ""  # libvirt's secret with the password of the user
    secret: str = ""  # as above


VolumeSource = NBDSource | RBDSource | ISCSISource


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A disk, or a CD."""

    file: str  # empty: it is a volume
    format: str
    target: str  # vda, hdc…
    bus: str
    device: str = "disk"
    cache: str = "none"
    backing: str | None = None  # a raw file below a qcow2 one
    serial: str = ""
    boot_order: int | None = None
    limits: tuple[tuple[str, int], ...] = ()  # as libvirt's iotune names them
    volume: VolumeSource | None = None
    readonly: bool = False
    shareable: bool = False  # other guests may have it at the same time
    discard: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface."""

    mac: str
    device: str  # name of the tap on the host
    bridge: str = ""  # to which libvirt connects it; empty: the network agent does
    model: str = "virtio"
    mtu: int | None = None
    queues: int = 1
    linked: bool = True
    boot_order: int | None = None
    script: str = ""  # Xen plugs by a script


@dataclass(frozen=True, slots=True, kw_only=True)
class Serial:
    """A serial port, with a socket for its console and a log."""

    socket: str = ""  # empty: a pty
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """A VNC or SPICE server, at a socket, or at an address with a port that libvirt chooses."""

    protocol: Literal["vnc", "spice"]
    socket: str = ""
    address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """The graphics card."""

    model: str
    vram_kib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rng:
    """A random number generator."""

    device: str
    bytes: int | None = None  # limit per period
    period_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestUser:
    """The user and group that QEMU of a guest runs as."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """The whole guest."""

    name: str
    owner: Owner
    virt_type: str
    os_type: str
    arch: str
    emulator: str
    machine: str
    memory_mb: int
    cpu_plan: CpuPlan
    cpu: Cpu = Cpu()
    user: GuestUser | None = None  # None: hypervisors other than QEMU decide
    uefi: bool = False
    secure_boot: bool = False
    boot_menu: bool = False
    kernel: str = ""  # the file that boots the guest; empty: firmware does
    ramdisk: str = ""
    command_line: str = ""
    windows: bool = False
    hide_hypervisor: bool = False
    hpet: bool = False
    pmu: bool | None = None
    disks: tuple[Disk, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    serials: tuple[Serial, ...] = ()
    screens: tuple[Screen, ...] = ()
    video: Video | None = None
    tablet: str | None = None  # usb | virtio
    rng: Rng | None = None
    panic_model: str = ""  # of the device by which the guest tells that it panicked; empty: none
    watchdog: str | None = None  # its action: reset, poweroff, pause, none
    watchdog_model: str = "i6300esb"
    balloon_period: int | None = 10  # seconds between memory statistics; None: no balloon
    guest_agent: bool = False
    scsi_model: str = "virtio-scsi"
    host_devices: tuple[str, ...] = ()  # addresses of PCI devices of the host
    mdevs: tuple[str, ...] = ()  # uuids of mediated devices of the host
    cpu_tune: dict[str, int] = field(default_factory=dict)  # shares, period, quota
    pcie_ports: int = 0  # free root ports for hot-plug (q35)

    @property
    def is_qemu(self) -> bool:
        """Whether QEMU runs the guest, with or without KVM."""
        return is_qemu(self.virt_type)

    @property
    def is_x86(self) -> bool:
        """Whether the guest is a PC."""
        return is_x86(self.arch)
