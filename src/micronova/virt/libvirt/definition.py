"""A guest's definition as plain data: what is in it has been decided, nothing is looked up any more."""

from dataclasses import dataclass, field
from typing import Literal

from micronova.virt.libvirt.topology import CpuPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """What the guest carries of its instance: by this it is known as ours."""

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
    """What the guest sees as its CPU."""

    mode: str = "none"  # none: as the hypervisor likes
    model: str = ""
    flags: tuple[tuple[str, str], ...] = ()  # (name, require | disable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A disk, or a CD."""

    file: str
    format: str
    target: str  # vda, hdc…
    bus: str
    device: str = "disk"
    cache: str = "none"
    backing: str | None = None  # a raw file below a qcow2 one
    keeps_owner: bool = False  # libvirt would give the file to whom it runs guests as, and is not to
    backing_keeps_owner: bool = False
    serial: str = ""
    boot_order: int | None = None
    limits: tuple[tuple[str, int], ...] = ()  # as libvirt's iotune names them


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface."""

    mac: str
    device: str  # the host's end
    bridge: str = ""  # that libvirt is to join it to; empty: whoever runs the network does
    model: str = "virtio"
    mtu: int | None = None
    queues: int = 1
    connected: bool = True
    boot_order: int | None = None
    script: str = ""  # Xen plugs by a script


@dataclass(frozen=True, slots=True, kw_only=True)
class Serial:
    """A serial port: a socket to talk through, and a log."""

    socket: str = ""  # empty: a pty
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Who shows the screen, at a socket or at an address where libvirt finds a port."""

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
    """A source of entropy."""

    device: str
    bytes: int | None = None  # at most so many
    period_ms: int | None = None


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
    cpus: CpuPlan
    cpu: Cpu = Cpu()
    uefi: bool = False
    secure_boot: bool = False
    boot_menu: bool = False
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
    watchdog: str | None = None  # what happens: reset, poweroff, pause, none
    watchdog_model: str = "i6300esb"
    balloon_period: int | None = 10  # seconds between memory statistics; None: no balloon
    guest_agent: bool = False
    scsi_model: str = "virtio-scsi"
    cpu_tune: dict[str, int] = field(default_factory=dict)  # shares, period, quota
    pcie_ports: int = 0  # free root ports for hot-plug (q35)
