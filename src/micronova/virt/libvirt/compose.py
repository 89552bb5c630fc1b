"""From an order, the guest's record and the host's abilities to the guest's definition.

Here is decided what a guest looks like, and refused early what this host cannot give: BuildAborted if no
host can, NotSupported if another one may.
"""

from dataclasses import dataclass
from typing import Final

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.errors import NotSupported
from micronova.objects.network import VIF
from micronova.objects.orders import InstanceSpec
from micronova.virt.libvirt.definition import Cpu, Definition, Disk, Owner, Rng, Screen, Serial, Video
from micronova.virt.libvirt.host import SECURE_MACHINE, HostFacts, parse_cpus, require
from micronova.virt.libvirt.interfaces import interfaces
from micronova.virt.libvirt.layout import DiskRecord, GuestRecord, Layout
from micronova.virt.libvirt.properties import Wishes
from micronova.virt.libvirt.topology import CpuPlan, plan_cpus

PLAIN_MODELS: Final = {"x86_64": "Nehalem"}
"""Without the CPU's help: the oldest model that today's distributions run on."""
Q35_ROOT_PORTS: Final = 12
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_PREFIXES: Final = {"virtio": "vd", "scsi": "sd", "sata": "sd", "usb": "sd", "ide": "hd", "xen": "xvd", "fdc": "fd"}
_BUSES: Final = ("virtio", "scsi", "sata", "ide", "usb", "xen")
_VIDEO: Final = ("vga", "cirrus", "virtio", "qxl", "vmvga", "bochs", "ramfb", "gop", "none")
_CPU_TUNE: Final = {"cpu_shares": "shares", "cpu_period": "period", "cpu_quota": "quota"}
_DISK_LIMITS: Final = {
    f"disk_{way}_{unit}_sec": f"{way}_{unit}_sec" for way in ("total", "read", "write") for unit in ("bytes", "iops")
}

# Asked for by flavor or image, and not (yet) given by this driver: better refused than forgotten.
_NOT_GIVEN: Final = {
    "hw:mem_encryption": "encrypted memory",
    "hw_mem_encryption": "encrypted memory",
    "hw:tpm_version": "a TPM",
    "hw_tpm_version": "a TPM",
    "pci_passthrough:alias": "PCI devices of the host",
    "hw:pmem": "persistent memory",
    "hw:cpu_realtime": "real-time CPUs",
    "resources:VGPU": "virtual GPUs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What all guests of a host are made with."""

    facts: HostFacts
    settings: LibvirtSettings
    layout: Layout
    vnc_on_socket: bool
    relabels: bool = False  # libvirt gives files to whom it runs guests as, unless it is told not to


def domain_name(uuid: str) -> str:
    """Name the guest for libvirt; the uuid in it makes it unique and findable."""
    return f"instance-{uuid}"


def compose(
    shop: Workshop,
    instance: InstanceSpec,
    record: GuestRecord,
    vifs: tuple[VIF, ...],
    taken_cpus: frozenset[int] = frozenset(),
) -> Definition:
    """Decide everything about a guest."""
    facts, settings = shop.facts, shop.settings
    image = instance.image
    wishes = Wishes(instance.flavor, image)
    _refuse(wishes, instance, facts)
    machine, uefi, secure = _firmware(wishes, facts, settings)
    cpus = _cpus(wishes, instance, record, facts, settings, taken_cpus)
    screens = _screens(shop, instance.uuid)
    is_qemu = facts.is_qemu
    windows = wishes.image("os_type") == "windows"
    queues_wanted = wishes.enabled(
        wishes.hardware("vif_multiqueue_enabled"), "hw:vif_multiqueue_enabled", default=False
    )
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
        cpus=cpus,
        cpu=_cpu(facts, settings),
        uefi=uefi,
        secure_boot=secure,
        boot_menu=wishes.enabled(wishes.hardware("boot_menu"), "hw:boot_menu", default=False),
        windows=windows,
        hide_hypervisor=wishes.enabled(
            wishes.image("img_hide_hypervisor_id") or wishes.flavor("hide_hypervisor_id"),
            "img_hide_hypervisor_id",
            default=False,
        ),
        hpet=wishes.enabled(wishes.image("hw_time_hpet"), "hw_time_hpet", default=False),
        pmu=(
            None if wishes.hardware("pmu") is None else wishes.enabled(wishes.hardware("pmu"), "hw:pmu", default=False)
        ),
        disks=_disks(shop, wishes, instance.uuid, record.disks, machine),
        interfaces=interfaces(
            vifs,
            model=wishes.image("hw_vif_model"),
            queues=min(instance.flavor.vcpus, 8) if queues_wanted else 1,
            virt_type=facts.virt_type,
            linked=settings.wire,
        ),
        serials=_serials(shop, wishes, instance.uuid) if is_qemu or facts.os_type == "hvm" else (),
        screens=screens,
        video=_video(wishes, facts) if screens else None,
        tablet=_tablet(wishes, facts) if screens else None,
        rng=_rng(wishes, facts, settings),
        watchdog=_watchdog(wishes) if is_qemu else None,
        guest_agent=is_qemu
        and wishes.enabled(wishes.image("hw_qemu_guest_agent"), "hw_qemu_guest_agent", default=False),
        scsi_model=wishes.image("hw_scsi_model") or "virtio-scsi",
        cpu_tune=_cpu_tune(wishes, facts),
        pcie_ports=Q35_ROOT_PORTS if is_qemu and "q35" in machine else 0,
    )


def _refuse(wishes: Wishes, instance: InstanceSpec, facts: HostFacts) -> None:
    for name, what in _NOT_GIVEN.items():
        value = wishes.flavor(name) or wishes.image(name)
        if value and value.lower() not in ("false", "no", "0", "off"):
            raise NotSupported(f"This host cannot do that: it offers no {what} ({name}).")
    for name in ("kernel_id", "ramdisk_id"):
        require(not wishes.image(name), f"it boots disks only, not images with a {name}")
    wanted = wishes.image("hw_architecture") or wishes.image("architecture")
    if wanted and wanted not in (facts.arch, "i686" if facts.arch == "x86_64" else ""):
        raise NotSupported(f"The image is for {wanted}; this host runs {facts.arch} guests.")
    for device in ("vcpus", "ram"):
        require(getattr(instance.flavor, device) > 0, f"a flavor without {device} cannot run")


def _firmware(wishes: Wishes, facts: HostFacts, settings: LibvirtSettings) -> tuple[str, bool, bool]:
    if not facts.is_qemu:
        return "", False, False
    x86 = facts.arch in ("x86_64", "i686")
    firmware = wishes.choice(wishes.image("hw_firmware_type"), "hw_firmware_type", ("bios", "uefi"), "bios")
    secure_wish = wishes.choice(
        wishes.flavor("os:secure_boot") or wishes.image("os_secure_boot"),
        "os_secure_boot",
        ("required", "optional", "disabled"),
        "disabled",
    )
    uefi = firmware == "uefi" or secure_wish == "required" or not x86
    if uefi:
        require(facts.uefi, "it has no UEFI firmware for guests (on Debian: install ovmf)")
    if secure_wish == "required":
        require(facts.secure_boot, "it has no UEFI firmware with secure boot")
    secure = uefi and facts.secure_boot and secure_wish in ("required", "optional")
    machine = wishes.image("hw_machine_type") or settings.hw_machine_type
    if not machine:
        machine = (SECURE_MACHINE if secure else "pc") if x86 else "virt"
    if facts.machines and machine not in facts.machines:
        raise NotSupported(f"This host knows no machine type {machine}.")
    return machine, uefi, secure


def _cpus(
    wishes: Wishes,
    instance: InstanceSpec,
    record: GuestRecord,
    facts: HostFacts,
    settings: LibvirtSettings,
    taken: frozenset[int],
) -> CpuPlan:
    return plan_cpus(
        wishes,
        vcpus=instance.flavor.vcpus,
        memory_mb=instance.flavor.ram,
        cells=facts.cells,
        shared=parse_cpus(settings.cpu_shared_set),
        dedicated=parse_cpus(settings.cpu_dedicated_set),
        taken=taken,
        kept=record.pins,
    )


def _cpu(facts: HostFacts, settings: LibvirtSettings) -> Cpu:
    if not facts.is_qemu:
        return Cpu()
    flags = tuple(
        (flag.lstrip("+-"), "disable" if flag.startswith("-") else "require") for flag in settings.cpu_model_extra_flags
    )
    mode, model = settings.cpu_mode, ""
    if mode == "auto":
        plain = PLAIN_MODELS.get(facts.arch, "")
        if facts.virt_type == "kvm":
            mode = "host-model" if "host-model" in facts.cpu_modes else "host-passthrough"
        elif plain in facts.usable_models:
            mode, model = "custom", plain
        else:
            mode = "none"
    elif mode == "custom":
        wanted = settings.cpu_models
        found = next((name for name in wanted if not facts.usable_models or name in facts.usable_models), None)
        if found is None:
            known = ", ".join(wanted) or "there are none"
            raise NotSupported(f"This host's CPU can be none of the cpu_models: {known}.")
        model = found
    return Cpu(mode=mode, model=model, flags=() if mode == "none" else flags)


def _disks(
    shop: Workshop, wishes: Wishes, uuid: str, records: tuple[DiskRecord, ...], machine: str
) -> tuple[Disk, ...]:
    folder = shop.layout.guest(uuid)
    limits = _disk_limits(wishes)
    used: dict[str, int] = {}
    found: list[Disk] = []
    for record in records:
        bus = _bus(record, wishes, shop.facts, machine)
        prefix = _PREFIXES[bus]
        target = f"{prefix}{_LETTERS[used.setdefault(prefix, 0)]}"
        used[prefix] += 1
        backing = None if record.backing is None else shop.layout.seen(shop.layout.base / record.backing)
        found.append(
            Disk(
                file=shop.layout.seen(folder / record.file),
                format=record.format,
                target=target,
                bus=bus,
                device=record.device,
                cache=_cache(shop, record),
                backing=backing,
                keeps_owner=shop.relabels and shop.layout.private,
                # All guests share it, and the cache looks after it.
                backing_keeps_owner=shop.relabels,
                serial=record.serial,
                boot_order=record.boot_index + 1 if record.boot_index >= 0 else None,
                limits=limits if record.device == "disk" else (),
            )
        )
    return tuple(found)


def _bus(record: DiskRecord, wishes: Wishes, facts: HostFacts, machine: str) -> str:
    cd = record.device == "cdrom"
    wanted = record.bus or wishes.image("hw_cdrom_bus" if cd else "hw_disk_bus")
    if wanted is None:
        if not facts.is_qemu:
            wanted = "ide" if cd or facts.virt_type == "parallels" else "xen"
        elif not cd:
            wanted = "virtio"
        else:
            # Small kernels have no driver for q35's SATA; who reads virtio disks reads virtio SCSI.
            wanted = "ide" if facts.arch == "x86_64" and "q35" not in machine else "scsi"
    bus = wishes.choice(wanted, "hw_cdrom_bus" if cd else "hw_disk_bus", _BUSES, wanted)
    if bus == "ide" and "q35" in machine:
        raise NotSupported("The machine type q35 has no IDE disks: choose sata, scsi or virtio.")
    if facts.disk_buses and bus not in facts.disk_buses:
        raise NotSupported(f"This host has no {bus} disks.")
    return bus


def _cache(shop: Workshop, record: DiskRecord) -> str:
    if record.device == "cdrom":
        return "writeback"
    return shop.settings.disk_cachemode or ("none" if shop.facts.direct_io else "writeback")


def _disk_limits(wishes: Wishes) -> tuple[tuple[str, int], ...]:
    found = []
    for spec, name in _DISK_LIMITS.items():
        value = wishes.number(wishes.flavor(f"quota:{spec}"), f"quota:{spec}", least=1)
        if value is not None:
            found.append((name, value))
    return tuple(found)


def _cpu_tune(wishes: Wishes, facts: HostFacts) -> dict[str, int]:
    found = {}
    for spec, name in _CPU_TUNE.items():
        value = wishes.number(wishes.flavor(f"quota:{spec}"), f"quota:{spec}", least=1)
        if value is not None:
            require(facts.cgroups, f"its libvirt has no control groups, which quota:{spec} needs")
            found[name] = value
    return found


def _serials(shop: Workshop, wishes: Wishes, uuid: str) -> tuple[Serial, ...]:
    count = wishes.number(wishes.hardware("serial_port_count"), "hw:serial_port_count", least=1) or 1
    require(count <= 4, "a guest has at most 4 serial ports")
    log = shop.layout.seen(shop.layout.console_log(uuid))
    return tuple(
        Serial(socket=shop.layout.seen(shop.layout.socket(uuid, f"serial{number}")), log=log if number == 0 else "")
        for number in range(count)
    )


def _screens(shop: Workshop, uuid: str) -> tuple[Screen, ...]:
    settings, layout = shop.settings, shop.layout
    found = []
    if settings.vnc_enabled:
        if shop.vnc_on_socket:
            found.append(Screen(protocol="vnc", socket=layout.seen(layout.socket(uuid, "vnc"))))
        else:
            found.append(Screen(protocol="vnc", address=settings.vnc_server_listen or "127.0.0.1"))
    if settings.spice_enabled:
        # QEMU makes the socket itself, which it can only in directories that were made for it.
        socket = layout.seen(layout.socket(uuid, "spice")) if layout.private else ""
        found.append(Screen(protocol="spice", socket=socket))
    return tuple(found)


def _video(wishes: Wishes, facts: HostFacts) -> Video | None:
    if not facts.is_qemu:
        return None
    default = "vga" if facts.arch in ("x86_64", "i686") else "virtio"
    model = wishes.choice(wishes.image("hw_video_model"), "hw_video_model", _VIDEO, default)
    if facts.video_models and model not in facts.video_models:
        raise NotSupported(f"This host has no {model} graphics.")
    megabytes = wishes.number(wishes.image("hw_video_ram"), "hw_video_ram", least=1)
    most = wishes.number(wishes.flavor("hw_video:ram_max_mb"), "hw_video:ram_max_mb") or 0
    if megabytes is not None and megabytes > most:
        raise NotSupported(f"The image asks for {megabytes} MB of video memory; the flavor allows {most} MB.")
    return Video(model=model, vram_kib=None if megabytes is None else megabytes * 1024)


def _tablet(wishes: Wishes, facts: HostFacts) -> str | None:
    if not facts.is_qemu:
        return None
    bus = wishes.image("hw_input_bus")
    if bus is None and wishes.image("hw_pointer_model") == "usbtablet":
        bus = "usb"
    if bus is None:
        # Emulated USB keeps a CPU busy that has no help from the hardware.
        return "usb" if facts.virt_type == "kvm" else None
    return wishes.choice(bus, "hw_input_bus", ("usb", "virtio"), "usb")


def _rng(wishes: Wishes, facts: HostFacts, settings: LibvirtSettings) -> Rng | None:
    allowed = wishes.enabled(wishes.flavor("hw_rng:allowed"), "hw_rng:allowed", default=True)
    if not (facts.is_qemu and facts.rng and allowed and settings.rng_dev_path):
        return None
    return Rng(
        device=settings.rng_dev_path,
        bytes=wishes.number(wishes.flavor("hw_rng:rate_bytes"), "hw_rng:rate_bytes", least=1),
        period_ms=wishes.number(wishes.flavor("hw_rng:rate_period"), "hw_rng:rate_period", least=1),
    )


def _watchdog(wishes: Wishes) -> str | None:
    actions = ("disabled", "reset", "poweroff", "pause", "none")
    action = wishes.choice(wishes.hardware("watchdog_action"), "hw:watchdog_action", actions, "disabled")
    return None if action == "disabled" else action
