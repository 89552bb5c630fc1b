"""What this host and its hypervisor can do, read once at the start."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.cpu_sets import parse_cpus
from micronova.objects.errors import NotSupported
from micronova.virt.libvirt.client.binding import Connect
from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.client.xmltree import Element, parse

SECURE_MACHINE: Final = "q35"
"""The only x86 machine type with secure boot: its firmware can protect its variables from the guest."""
HARDWARE_FLAGS: Final = frozenset({"vmx", "svm"})
DEFAULT_URIS: Final = {"xen": "xen:///system", "parallels": "parallels:///system"}
_OPEN_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A NUMA node of the host."""

    id: int
    memory_mb: int
    cpus: tuple[int, ...]
    siblings: tuple[tuple[int, ...], ...] = ()  # hardware threads of the same core
    pages: dict[int, int] = field(default_factory=dict)  # KiB -> how many there are
    socket: int | None = None  # None: the host does not say, or the node is in several


def is_qemu(virt_type: str) -> bool:
    """Return whether QEMU runs guests of this type, with or without KVM."""
    return virt_type in ("kvm", "qemu")


def is_x86(arch: str) -> bool:
    """Return whether guests of this architecture are PCs."""
    return arch in ("x86_64", "i686")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What the driver's decisions depend on."""

    virt_type: str  # kvm | qemu | xen | parallels
    hypervisor: str  # QEMU, Xen…
    version: int
    arch: str
    os_type: str = "hvm"
    emulator: str = ""
    machines: frozenset[str] = frozenset()
    cpu_model: str = ""
    cpu_vendor: str = ""
    cpu_features: tuple[str, ...] = ()
    guest_features: frozenset[str] = frozenset()  # of the CPU of guests
    host_model: str = ""  # the CPU of guests with the mode host-model
    host_model_features: tuple[tuple[str, str], ...] = ()  # that differ from the model: (name, require | disable)
    cpu_topology: dict[str, int] = field(default_factory=dict)
    usable_models: frozenset[str] = frozenset()
    cpu_modes: frozenset[str] = frozenset()
    disk_buses: frozenset[str] = frozenset()
    video_models: frozenset[str] = frozenset()
    graphics: frozenset[str] = frozenset()
    rng: bool = True
    uefi: bool = False
    secure_boot: bool = False
    cells: tuple[Cell, ...] = ()
    supported: tuple[tuple[str, str, str], ...] = ()  # architecture, virt_type, type of operating system
    cgroups: bool = True  # whether shares and limits of CPU and disk can be set
    direct_io: bool = True  # whether the file system of the disks supports O_DIRECT

    @property
    def is_qemu(self) -> bool:
        """Whether QEMU runs the guests, with or without KVM."""
        return is_qemu(self.virt_type)

    @property
    def is_x86(self) -> bool:
        """Whether the guests are PCs."""
        return is_x86(self.arch)


def read_facts(
    connection: Connect, settings: LibvirtSettings, *, flags: frozenset[str], cgroups: bool, folder: Path
) -> HostFacts:
    """Read the facts from libvirt; `folder` is on the file system of the disks. Blocks."""
    capabilities = parse(connection.getCapabilities())
    arch = capabilities.findtext("./host/cpu/arch") or os.uname().machine
    offered = _domain_types(capabilities, arch)
    virt_type = choose_virt_type(settings.virt_type, flags, frozenset(offered))
    os_type, emulator = offered[virt_type]
    machine = settings.hw_machine_type or ("pc" if is_x86(arch) else "virt")
    domain = secure = Element("domainCapabilities")
    if is_qemu(virt_type):
        # Other hypervisors report little of this, and their guests have few of these choices.
        domain = secure = parse(connection.getDomainCapabilities(None, arch, machine, virt_type))
        if arch == "x86_64":
            secure = parse(connection.getDomainCapabilities(None, arch, SECURE_MACHINE, virt_type))
    found = parse_facts(
        capabilities,
        domain,
        secure,
        arch=arch,
        virt_type=virt_type,
        os_type=os_type,
        emulator=emulator,
        hypervisor=connection.getType(),
        version=connection.getVersion(),
        cgroups=cgroups,
        direct_io=can_bypass_cache(folder),
    )
    check_screens(found, settings)
    return found


def check_screens(found: HostFacts, settings: LibvirtSettings) -> None:
    """Raise LibvirtMissing if the settings ask for a kind of screen that this host's hypervisor lacks."""
    if settings.spice_enabled and "spice" not in found.graphics:
        raise LibvirtMissing(
            f"This host's {found.hypervisor} has no SPICE, which libvirt.spice_enabled wants: install a QEMU that has "
            "it (Debian: qemu-system-x86), or switch it off."
        )


def parse_facts(
    capabilities: Element,
    domain: Element,
    secure: Element,
    *,
    arch: str,
    virt_type: str,
    hypervisor: str,
    version: int,
    os_type: str = "hvm",
    emulator: str = "",
    cgroups: bool = True,
    direct_io: bool = True,
) -> HostFacts:
    """Return the facts from libvirt's capabilities, and its domain capabilities without and with secure boot."""
    cpu = capabilities.find("./host/cpu")
    cpu = Element("cpu") if cpu is None else cpu
    topology = cpu.find("topology")
    model = domain.find("./cpu/mode[@name='host-model']")
    model = Element("mode") if model is None else model
    firmware = _values(domain, "./os/enum[@name='firmware']")
    return HostFacts(
        virt_type=virt_type,
        hypervisor=hypervisor,
        version=version,
        arch=arch,
        os_type=os_type,
        emulator=domain.findtext("path") or emulator,
        machines=frozenset(
            machine.text or "" for machine in capabilities.iterfind(f"./guest/arch[@name='{arch}']/machine")
        ),
        cpu_model=cpu.findtext("model") or "",
        cpu_vendor=cpu.findtext("vendor") or "",
        cpu_features=tuple(sorted(feature.get("name", "") for feature in cpu.iterfind("feature"))),
        host_model=model.findtext("model") or "",
        host_model_features=tuple(
            (feature.get("name", ""), feature.get("policy", "")) for feature in model.iterfind("feature")
        ),
        cpu_topology={} if topology is None else {name: int(value) for name, value in topology.items()},
        usable_models=frozenset(
            model.text or ""
            for model in domain.iterfind("./cpu/mode[@name='custom']/model")
            if model.get("usable") == "yes"
        ),
        cpu_modes=frozenset(
            mode.get("name", "") for mode in domain.iterfind("./cpu/mode") if mode.get("supported") == "yes"
        ),
        disk_buses=_values(domain, "./devices/disk/enum[@name='bus']"),
        video_models=_values(domain, "./devices/video/enum[@name='modelType']"),
        graphics=_values(domain, "./devices/graphics/enum[@name='type']"),
        rng=(rng := domain.find("./devices/rng")) is not None and rng.get("supported") == "yes",
        uefi="efi" in firmware,
        secure_boot="efi" in firmware and "yes" in _values(secure, "./os/loader/enum[@name='secure']"),
        cells=parse_cells(capabilities),
        supported=_supported(capabilities),
        cgroups=cgroups,
        direct_io=direct_io,
    )


def parse_cells(capabilities: Element) -> tuple[Cell, ...]:
    """Return the NUMA nodes from libvirt's capabilities."""
    return tuple(_cell(cell) for cell in capabilities.iterfind("./host/topology/cells/cell"))


def choose_virt_type(wanted: str, flags: frozenset[str], offered: frozenset[str]) -> str:
    """Return the type of guests to run: KVM if the CPU has the instructions, else emulation.

    That /dev/kvm opens proves nothing: nested under some hypervisors it exists, and no guest ever boots.
    """
    if wanted == "auto":
        if "kvm" in offered and flags & HARDWARE_FLAGS:
            return "kvm"
        wanted = "qemu" if "qemu" in offered else next(iter(sorted(offered)), "qemu")
    if wanted not in offered:
        found = ", ".join(sorted(offered)) or "nothing"
        raise LibvirtMissing(f"This host's libvirt cannot run {wanted} guests, only {found}: install qemu-system-x86.")
    return wanted


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the CPU's feature flags."""
    try:
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    except OSError:
        pass
    return frozenset()


def can_bypass_cache(folder: Path) -> bool:
    """Return whether files in a directory can be opened for direct I/O, which cache mode "none" needs."""
    if not _OPEN_DIRECT:
        return False
    file = folder / ".direct"
    try:
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY | _OPEN_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        file.unlink(missing_ok=True)
    return True


def kvm_group(virt_type: str, device: Path = Path("/dev/kvm")) -> int | None:
    """Return the group that a guest needs in order to use /dev/kvm; None if it needs none."""
    try:
        status = device.stat()
    except OSError:
        return None
    everybody = status.st_mode & 0o006 == 0o006
    return status.st_gid if virt_type == "kvm" and not everybody and status.st_mode & 0o060 == 0o060 else None


def require(condition: bool, reason: str) -> None:
    """Raise NotSupported with the reason unless the condition holds."""
    if not condition:
        raise NotSupported(f"This host cannot do that: {reason}.")


def _domain_types(capabilities: Element, arch: str) -> dict[str, tuple[str, str]]:
    """Return the types of guests that libvirt offers: virt_type -> type of operating system, emulator."""
    found: dict[str, tuple[str, str]] = {}
    for guest in capabilities.iterfind("guest"):
        os_type = guest.findtext("os_type") or "hvm"
        for architecture in guest.iterfind(f"arch[@name='{arch}']"):
            emulator = architecture.findtext("emulator") or ""
            for domain in architecture.iterfind("domain"):
                kind = domain.get("type", "")
                if kind not in found or os_type == "hvm":
                    found[kind] = (os_type, domain.findtext("emulator") or emulator)
    return found


def _supported(capabilities: Element) -> tuple[tuple[str, str, str], ...]:
    found = [
        (arch.get("name", ""), domain.get("type", ""), guest.findtext("os_type") or "hvm")
        for guest in capabilities.iterfind("guest")
        for arch in guest.iterfind("arch")
        for domain in arch.iterfind("domain")
    ]
    return tuple(dict.fromkeys(found))


def _values(root: Element, path: str) -> frozenset[str]:
    return frozenset(value.text or "" for value in root.iterfind(f"{path}/value"))


def _cell(cell: Element) -> Cell:
    cpus = [cpu for cpu in cell.iterfind("./cpus/cpu") if cpu.get("id")]
    return Cell(
        id=int(cell.get("id", "0")),
        memory_mb=int(cell.findtext("memory") or 0) // 1024,
        cpus=tuple(int(cpu.get("id", "0")) for cpu in cpus),
        siblings=tuple(dict.fromkeys(parse_cpus(cpu.get("siblings", cpu.get("id", "0"))) for cpu in cpus)),
        pages={int(pages.get("size", "0")): int(pages.text or 0) for pages in cell.iterfind("pages")},
        socket=int(sockets.pop()) if len(sockets := {cpu.get("socket_id", "") for cpu in cpus} - {""}) == 1 else None,
    )
