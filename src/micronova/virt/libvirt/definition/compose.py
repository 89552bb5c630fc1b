"""Deciding a guest's definition from its instance, its record and what the host can do.

What this host cannot give is refused here: with BuildAborted if no host can, with NotSupported if another host may.
"""

from dataclasses import dataclass
from typing import Final

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.cpu_sets import parse_cpus
from micronova.objects.errors import BuildAborted, Invalid, NotSupported
from micronova.objects.guest_cpus import cpu_request
from micronova.objects.guest_properties import (
    UNSUPPORTED_HARDWARE,
    GuestProperties,
    asks,
    choices,
    serial_ports,
    wants_queues,
)
from micronova.objects.mediated_devices import VGPU
from micronova.objects.network import VIF
from micronova.objects.orders import InstanceSpec
from micronova.objects.volume import AttachedVolume
from micronova.virt.libvirt.definition.guest_cpu import guest_cpu
from micronova.virt.libvirt.definition.interfaces import interfaces
from micronova.virt.libvirt.definition.topology import plan_cpus
from micronova.virt.libvirt.definition.types import Definition, Disk, GuestUser, Owner, Rng, Screen, Serial, Video
from micronova.virt.libvirt.definition.volumes import free_name, volume_disk, wanted_name
from micronova.virt.libvirt.host import SECURE_MACHINE, HostFacts, require
from micronova.virt.libvirt.storage.layout import Layout, base_link_name
from micronova.virt.libvirt.storage.records import DiskRecord, GuestRecord

Q35_ROOT_PORTS: Final = 12
SHARES_PER_VCPU: Final = 100
MEMORY_OVERHEAD_MB: Final = 2048
"""What QEMU may use besides the guest's memory and a quarter of it: emulation alone keeps up to 1 GiB of translated
code, and screens, disks and networks have buffers."""
_SUPPORTED_BUSES: Final = choices("hw_disk_bus", unsupported=("lxc", "uml"))
_SUPPORTED_VIDEO: Final = choices("hw_video_model", unsupported=("xen",))
_CPU_TUNE: Final = {"cpu_shares": "shares", "cpu_period": "period", "cpu_quota": "quota"}
_DISK_LIMITS: Final = {
    f"disk_{way}_{unit}_sec": f"{way}_{unit}_sec" for way in ("total", "read", "write") for unit in ("bytes", "iops")
}

# Of UNSUPPORTED_HARDWARE, what a guest is not started without. The API refuses all of it, but a later version of the
# API may accept more than this host has. Guests of earlier versions may have the rest, which has no effect.
_NEVER_IGNORED: Final = ("cpu_realtime", "mem_encryption", "pmem", "tpm_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProfile:
    """What the definitions of all guests on a host depend on."""

    facts: HostFacts
    settings: LibvirtSettings
    layout: Layout
    vnc_on_socket: bool
    weighs_cpus: bool = False  # whether the CPUs of guests are weighed against each other
    kvm_group: int | None = None  # the group that may use /dev/kvm, if not everybody may


_CONSOLES = "console=tty0 console=ttyS0 console=hvc0"


def domain_name(uuid: str) -> str:
    """Return the guest's name in libvirt."""
    return f"instance-{uuid}"


def compose(
    host: HostProfile,
    instance: InstanceSpec,
    record: GuestRecord,
    vifs: tuple[VIF, ...],
    volumes: tuple[AttachedVolume, ...] = (),
) -> Definition:
    """Return the definition of a guest."""
    try:
        return _compose(host, instance, record, vifs, volumes)
    except Invalid as error:
        # What flavor and image ask for is wrong, so it is wrong on every host.
        raise BuildAborted(error.message) from error


def _compose(
    host: HostProfile,
    instance: InstanceSpec,
    record: GuestRecord,
    vifs: tuple[VIF, ...],
    volumes: tuple[AttachedVolume, ...],
) -> Definition:
    facts, settings = host.facts, host.settings
    image = instance.image
    properties = GuestProperties(instance.flavor, image)
    _refuse(properties, instance, facts)
    _refuse_virtual_gpus(instance, record)
    machine, uefi, secure = _firmware(properties, facts, settings)
    screens = _screens(host, instance.uuid)
    is_qemu = facts.is_qemu
    windows = properties.image("os_type") == "windows"
    disks = _disks(host, properties, record, volumes, machine)
    boot, folder = record.started_by, host.layout.guest(instance.uuid)
    return Definition(
        name=domain_name(instance.uuid),
        owner=Owner(
            uuid=instance.uuid,
            epoch=record.epoch,
            cloud=record.cloud,
            name=instance.name,
            project_id=instance.project_id,
            user_id=instance.user_id,
            flavor=instance.flavor.name,
            image_id=image.id if image is not None else "",
        ),
        virt_type=facts.virt_type,
        os_type=facts.os_type,
        arch=facts.arch,
        emulator=facts.emulator,
        machine=machine,
        memory_mb=instance.flavor.ram,
        cpu_plan=plan_cpus(
            cpu_request(properties, instance.flavor.vcpus, instance.flavor.ram),
            vcpus=instance.flavor.vcpus,
            cells=facts.cells,
            shared=parse_cpus(settings.cpu_shared_set),
            pins=record.pins,
        ),
        cpu=guest_cpu(facts, settings),
        user=_user(host, record),
        uefi=uefi,
        secure_boot=secure,
        boot_menu=properties.enabled(properties.image_first("boot_menu"), "hw:boot_menu", default=False),
        kernel="" if boot is None else host.layout.seen(folder / boot.kernel),
        ramdisk=host.layout.seen(folder / boot.ramdisk) if boot is not None and boot.ramdisk else "",
        command_line="" if boot is None else _command_line(properties, facts, disks, rescued=record.rescue is not None),
        windows=windows,
        hide_hypervisor=any(
            properties.enabled(value, "hide_hypervisor_id", default=False)
            for value in (
                properties.image("img_hide_hypervisor_id"),
                properties.flavor("hw:hide_hypervisor_id"),
                properties.flavor("hide_hypervisor_id"),
            )
        ),
        hpet=properties.enabled(properties.image("hw_time_hpet"), "hw_time_hpet", default=False),
        pmu=properties.agreed_flag("pmu"),
        disks=disks,
        interfaces=interfaces(
            vifs,
            model=properties.image("hw_vif_model"),
            queues=min(instance.flavor.vcpus, 8) if wants_queues(properties, instance.flavor.vcpus) else 1,
            virt_type=facts.virt_type,
            linked=settings.interfaces_linked,
        ),
        serials=_serials(host, properties, instance.uuid) if is_qemu or facts.os_type == "hvm" else (),
        screens=screens,
        video=_video(properties, facts) if screens else None,
        tablet=_tablet(properties, facts) if screens else None,
        rng=_rng(properties, facts, settings),
        panic_model="isa" if is_qemu and facts.is_x86 else "",
        watchdog=_watchdog(properties) if is_qemu else None,
        guest_agent=is_qemu
        and properties.enabled(properties.image("hw_qemu_guest_agent"), "hw_qemu_guest_agent", default=False),
        scsi_model=properties.image("hw_scsi_model") or "virtio-scsi",
        host_devices=() if record.pins is None else record.pins.devices,
        mdevs=() if record.pins is None else tuple(each.uuid for each in record.pins.mdevs),
        cpu_tune=_cpu_tune(host, properties, instance.flavor.vcpus),
        pcie_ports=Q35_ROOT_PORTS if is_qemu and "q35" in machine else 0,
    )


def _refuse(properties: GuestProperties, instance: InstanceSpec, facts: HostFacts) -> None:
    for name in _NEVER_IGNORED:
        if any(asks(value) for value in properties.both(name)):
            raise NotSupported(f"This host does not offer {UNSUPPORTED_HARDWARE[name]} (hw:{name}, hw_{name}).")
    wanted = properties.architecture()
    if wanted and wanted not in (facts.arch, "i686" if facts.arch == "x86_64" else ""):
        raise NotSupported(f"The image is for {wanted}; this host runs {facts.arch} guests.")
    for amount in ("vcpus", "ram"):
        if not getattr(instance.flavor, amount):
            raise BuildAborted(f"A flavor without {amount} cannot run.")


def _refuse_virtual_gpus(instance: InstanceSpec, record: GuestRecord) -> None:
    """Raise NotSupported if the guest is to have virtual GPUs that are no mediated devices of this host."""
    wanted = 0
    for name, value in instance.flavor.extra_specs.items():
        kind, _, resource_class = name.partition(":")
        if kind.startswith("resources") and resource_class == VGPU and value.isdecimal():  # of a group, too
            wanted += int(value)
    if wanted > (0 if record.pins is None else len(record.pins.mdevs)):
        raise NotSupported(
            f"The flavor asks for {wanted} virtual GPUs. They were claimed of a resource provider that is no device of "
            "this host: devices.enabled_mdev_types says which it offers."
        )


def _command_line(properties: GuestProperties, facts: HostFacts, disks: tuple[Disk, ...], *, rescued: bool) -> str:
    """Return what the kernel of a guest is told: what its image says, or else where its root disk is."""
    wanted = properties.image("os_command_line")
    if wanted and not rescued:
        return wanted
    root = next((f"root=/dev/{disk.target} " for disk in disks if disk.boot_order == 1), "")
    # An emulator on a busy machine delivers timer interrupts so late that the kernel's check of them fails.
    emulated = " no_timer_check" if facts.virt_type == "qemu" else ""
    return f"{root}{_CONSOLES}{emulated}"


def _firmware(properties: GuestProperties, facts: HostFacts, settings: LibvirtSettings) -> tuple[str, bool, bool]:
    if not facts.is_qemu:
        return "", False, False
    x86 = facts.is_x86
    firmware = properties.choice(
        properties.image("hw_firmware_type"), "hw_firmware_type", choices("hw_firmware_type"), "bios"
    )
    secure_boot = properties.choice(
        properties.agreed("secure_boot", "os"),
        "os_secure_boot",
        choices("os_secure_boot"),
        "disabled",
    )
    uefi = firmware == "uefi" or secure_boot == "required" or not x86
    if uefi:
        require(facts.uefi, "it has no UEFI firmware for guests (on Debian: install ovmf)")
    if secure_boot == "required":
        require(facts.secure_boot, "it has no UEFI firmware with secure boot")
    secure = uefi and facts.secure_boot and secure_boot in ("required", "optional")
    machine = properties.image("hw_machine_type") or settings.hw_machine_type
    if not machine:
        machine = (SECURE_MACHINE if secure else "pc") if x86 else "virt"
    if facts.machines and machine not in facts.machines:
        raise NotSupported(f"This host knows no machine type {machine}.")
    return machine, uefi, secure


def _user(host: HostProfile, record: GuestRecord) -> GuestUser | None:
    if record.uid is None or not host.facts.is_qemu:
        return None
    # A user without a name has no further groups, so the one that may use /dev/kvm is the guest's only group. It gives
    # no right to files: those of guests are shared by user.
    return GuestUser(uid=record.uid, gid=record.uid if host.kvm_group is None else host.kvm_group)


def memory_limit(ram: int) -> int:
    """Return the MiB that QEMU may use: far more than it needs, because the kernel kills a guest that exceeds it."""
    return ram + ram // 4 + MEMORY_OVERHEAD_MB


def volume_bus(host: HostProfile, instance: InstanceSpec, volume: AttachedVolume) -> str:
    """Return the bus of a volume that a guest gets later; raise NotSupported if this host cannot do it."""
    properties = GuestProperties(instance.flavor, instance.image)
    return _volume_bus(host, properties, volume, _firmware(properties, host.facts, host.settings)[0])


def _volume_bus(host: HostProfile, properties: GuestProperties, volume: AttachedVolume, machine: str) -> str:
    if not host.facts.is_qemu:
        raise NotSupported("Guests of this hypervisor have no volumes.")
    if volume.device_type not in (None, "disk", "cdrom"):
        raise NotSupported(f"This host attaches volumes as disks, and not as {volume.device_type}.")
    device = volume.device_type or "disk"
    record = DiskRecord(file="", format="raw", role="volume", device=device, bus=volume.disk_bus)
    return _bus(record, properties, host.facts, machine)


def _disks(
    host: HostProfile,
    properties: GuestProperties,
    guest: GuestRecord,
    volumes: tuple[AttachedVolume, ...],
    machine: str,
) -> tuple[Disk, ...]:
    folder = host.layout.guest(guest.uuid)
    limits = _disk_limits(properties)
    taken: set[str] = set()
    found: list[Disk] = []
    # The names of volumes come from the API, so the host's own disks take what is left.
    for volume in volumes:
        bus = _volume_bus(host, properties, volume, machine)
        target = wanted_name(volume, bus, taken)
        taken.add(target)
        boots = volume.boot_index is not None and volume.boot_index >= 0 and guest.rescue is None
        order = volume.boot_index + 1 if boots and volume.boot_index is not None else None
        found.append(volume_disk(volume, bus, target, order))
    for record in guest.attached:
        bus = _bus(record, properties, host.facts, machine)
        target = free_name(bus, taken)
        taken.add(target)
        backing = None if record.backing is None else host.layout.seen(folder / base_link_name(record.file))
        found.append(
            Disk(
                file=host.layout.seen(folder / record.file),
                format=record.format,
                target=target,
                bus=bus,
                device=record.device,
                cache=_cache(host, record),
                backing=backing,
                serial=record.serial,
                boot_order=record.boot_index + 1 if record.boot_index >= 0 else None,
                limits=limits if record.device == "disk" else (),
            )
        )
    # The guest finds the disks of a bus in this order, and names them by it.
    return tuple(sorted(found, key=lambda disk: (len(disk.target), disk.target)) if volumes else found)


def _bus(record: DiskRecord, properties: GuestProperties, facts: HostFacts, machine: str) -> str:
    cd = record.device == "cdrom"
    wanted = record.bus or properties.image("hw_cdrom_bus" if cd else "hw_disk_bus")
    if record.device == "floppy":
        wanted = record.bus or "fdc"
    elif wanted is None:
        if not facts.is_qemu:
            wanted = "ide" if cd or facts.virt_type == "parallels" else "xen"
        elif not cd:
            wanted = "virtio"
        else:
            # Small kernels have no driver for q35's SATA; those with virtio disks also have virtio SCSI.
            wanted = "ide" if facts.arch == "x86_64" and "q35" not in machine else "scsi"
    bus = properties.choice(wanted, "hw_cdrom_bus" if cd else "hw_disk_bus", _SUPPORTED_BUSES, wanted)
    if bus == "ide" and "q35" in machine:
        raise NotSupported("The machine type q35 has no IDE disks: choose sata, scsi or virtio.")
    if facts.disk_buses and bus not in facts.disk_buses:
        raise NotSupported(f"This host has no {bus} disks.")
    return bus


def _cache(host: HostProfile, record: DiskRecord) -> str:
    if record.device != "disk":
        return "writeback"
    return host.settings.disk_cachemode or ("none" if host.facts.direct_io else "writeback")


def _disk_limits(properties: GuestProperties) -> tuple[tuple[str, int], ...]:
    found = []
    for spec, name in _DISK_LIMITS.items():
        # 0 means that there is no limit, which is what a guest without the spec has.
        if value := properties.number(properties.flavor(f"quota:{spec}"), f"quota:{spec}"):
            found.append((name, value))
    return tuple(found)


def _cpu_tune(host: HostProfile, properties: GuestProperties, vcpus: int) -> dict[str, int]:
    # Where all guests of a libvirt are ours, each has a weight by its size. Older kernels allow more than 10,000.
    found = {"shares": min(SHARES_PER_VCPU * vcpus, 10_000)} if host.weighs_cpus else {}
    for spec, name in _CPU_TUNE.items():
        # A quota of -1 and a period or shares of 0 are what a guest without the spec has.
        value = properties.number(properties.flavor(f"quota:{spec}"), f"quota:{spec}", least=-1)
        if value is not None and value > 0:
            require(host.facts.cgroups, f"its libvirt has no control groups, which quota:{spec} needs")
            found[name] = value
    return found


def _serials(host: HostProfile, properties: GuestProperties, uuid: str) -> tuple[Serial, ...]:
    count = serial_ports(properties)
    require(count <= 4, "a guest has at most 4 serial ports")
    log = host.layout.seen(host.layout.console_log(uuid))
    return tuple(
        Serial(socket=host.layout.seen(host.layout.socket(uuid, f"serial{number}")), log=log if number == 0 else "")
        for number in range(count)
    )


def _screens(host: HostProfile, uuid: str) -> tuple[Screen, ...]:
    settings, layout = host.settings, host.layout
    found = []
    if settings.vnc_enabled:
        if host.vnc_on_socket:
            found.append(Screen(protocol="vnc", socket=layout.seen(layout.socket(uuid, "vnc"))))
        else:
            found.append(Screen(protocol="vnc", address=settings.vnc_server_listen or "127.0.0.1"))
    if settings.spice_enabled:
        socket = layout.seen(layout.socket(uuid, "spice")) if host.facts.is_qemu else ""
        found.append(Screen(protocol="spice", socket=socket))
    return tuple(found)


def _video(properties: GuestProperties, facts: HostFacts) -> Video | None:
    if not facts.is_qemu:
        return None
    default = "vga" if facts.is_x86 else "virtio"
    model = properties.choice(properties.image("hw_video_model"), "hw_video_model", _SUPPORTED_VIDEO, default)
    if facts.video_models and model not in facts.video_models:
        raise NotSupported(f"This host has no {model} graphics.")
    megabytes = properties.number(properties.image("hw_video_ram"), "hw_video_ram", least=1)
    most = properties.number(properties.flavor("hw_video:ram_max_mb"), "hw_video:ram_max_mb") or 0
    if megabytes is not None and megabytes > most:
        raise NotSupported(f"The image asks for {megabytes} MB of video memory; the flavor allows {most} MB.")
    return Video(model=model, vram_kib=None if megabytes is None else megabytes * 1024)


def _tablet(properties: GuestProperties, facts: HostFacts) -> str | None:
    if not facts.is_qemu:
        return None
    bus = properties.image("hw_input_bus")
    if bus is None and properties.image("hw_pointer_model") == "usbtablet":
        bus = "usb"
    if bus is None:
        # Without KVM, emulated USB keeps a CPU busy.
        return "usb" if facts.virt_type == "kvm" else None
    return properties.choice(bus, "hw_input_bus", choices("hw_input_bus"), "usb")


def _rng(properties: GuestProperties, facts: HostFacts, settings: LibvirtSettings) -> Rng | None:
    allowed = properties.enabled(properties.flavor("hw_rng:allowed"), "hw_rng:allowed", default=True)
    if not (facts.is_qemu and facts.rng and allowed and settings.rng_dev_path):
        return None
    return Rng(
        device=settings.rng_dev_path,
        bytes=properties.number(properties.flavor("hw_rng:rate_bytes"), "hw_rng:rate_bytes", least=1),
        period_ms=properties.number(properties.flavor("hw_rng:rate_period"), "hw_rng:rate_period", least=1),
    )


def _watchdog(properties: GuestProperties) -> str | None:
    actions = choices("hw_watchdog_action")
    action = properties.choice(properties.image_first("watchdog_action"), "hw:watchdog_action", actions, "disabled")
    return None if action == "disabled" else action
