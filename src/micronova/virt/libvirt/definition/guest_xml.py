"""A guest's definition as libvirt's XML. `compose` decides what is in it."""

import xml.etree.ElementTree as ET

from micronova.objects.cpu_sets import format_cpus
from micronova.virt.libvirt.client.xmltree import Element, child, element, parse, unparse
from micronova.virt.libvirt.definition.device_xml import devices
from micronova.virt.libvirt.definition.types import Definition, Owner

NAMESPACE = "urn:micronova:instance:1"
PREFIX = "micronova"
MANUFACTURER = "Micronova"
PRODUCT = "OpenStack Compute"  # cloud-init recognises OpenStack by this name

ET.register_namespace(PREFIX, NAMESPACE)


def domain_xml(guest: Definition) -> str:
    """Return the definition as text."""
    return unparse(domain(guest))


def domain(guest: Definition) -> Element:
    """Return the definition as an element."""
    found = element("domain", type=guest.virt_type)
    child(found, "uuid", guest.owner.uuid)
    child(found, "name", guest.name)
    child(found, "metadata").append(metadata(guest.owner))
    child(found, "memory", str(guest.memory_mb), unit="MiB")
    if guest.cpu_plan.page_kib is not None:
        pages = child(child(found, "memoryBacking"), "hugepages")
        nodes = ",".join(str(cell.id) for cell in guest.cpu_plan.cells)
        child(pages, "page", size=guest.cpu_plan.page_kib, unit="KiB", nodeset=nodes)
    child(
        found, "vcpu", str(guest.cpu_plan.vcpus), placement="static", cpuset=format_cpus(guest.cpu_plan.shared) or None
    )
    for part in (_tune(guest), _numa_tune(guest), _sysinfo(guest), _os(guest), _features(guest), _cpu(guest)):
        if part is not None:
            found.append(part)
    found.append(_clock(guest))
    child(found, "on_poweroff", "destroy")
    child(found, "on_reboot", "restart")
    # A guest that panics is kept, halted, for its owner to look at.
    child(found, "on_crash", "preserve" if guest.panic_model else "destroy")
    if guest.is_qemu:
        power = child(found, "pm")
        child(power, "suspend-to-mem", enabled="no")
        child(power, "suspend-to-disk", enabled="no")
    found.append(devices(guest))
    if guest.user is not None:
        # What libvirt itself makes for the guest (the variables of its firmware, saved memory) belongs to this user.
        label = child(found, "seclabel", type="static", model="dac", relabel="yes")
        child(label, "label", f"+{guest.user.uid}:+{guest.user.gid}")
    return found


def metadata(owner: Owner) -> Element:
    """Return the element by which a guest is recognised as ours."""
    found = Element(f"{{{NAMESPACE}}}instance", {"uuid": owner.uuid, "epoch": str(owner.epoch)})
    for name in ("cloud", "name", "project_id", "user_id", "flavor", "image_id"):
        value = getattr(owner, name)
        if value:
            ET.SubElement(found, f"{{{NAMESPACE}}}{name}").text = _printable(value)
    return found


def owner_of(text: str) -> Owner | None:
    """Return the owner from a whole definition, or from the element alone; None if there is none."""
    try:
        root = parse(text)
    except ET.ParseError:
        return None
    tag = f"{{{NAMESPACE}}}instance"
    found = root if root.tag == tag else root.find(f"./metadata/{tag}")
    # Some versions of libvirt return the element without its namespace.
    if found is None and root.tag == "instance":
        found = root
    if found is None:
        return None

    def text_of(name: str) -> str:
        return next((part.text or "" for part in found if part.tag.rpartition("}")[2] == name), "")

    try:
        return Owner(
            uuid=found.get("uuid", ""),
            epoch=int(found.get("epoch", "")),
            cloud=text_of("cloud"),
            name=text_of("name"),
            project_id=text_of("project_id"),
            user_id=text_of("user_id"),
            flavor=text_of("flavor"),
            image_id=text_of("image_id"),
        )
    except ValueError:
        return None


def _tune(guest: Definition) -> Element | None:
    plan = guest.cpu_plan
    found = element("cputune")
    for name, value in guest.cpu_tune.items():
        child(found, name, str(value))
    cpus_of = {vcpu: (cpu,) for vcpu, cpu in plan.pins.items()} | plan.floating
    for vcpu, cpus in sorted(cpus_of.items()):
        child(found, "vcpupin", vcpu=vcpu, cpuset=format_cpus(cpus))
    if plan.emulator:
        child(found, "emulatorpin", cpuset=format_cpus(plan.emulator))
    elif plan.pins:
        child(found, "emulatorpin", cpuset=format_cpus(tuple(sorted(set(plan.pins.values())))))
    return found if len(found) else None


def _numa_tune(guest: Definition) -> Element | None:
    assigned = [cell for cell in guest.cpu_plan.cells if cell.host is not None]
    if not assigned:
        return None
    found = element("numatune")
    hosts = sorted({cell.host for cell in assigned if cell.host is not None})
    child(found, "memory", mode="strict", nodeset=",".join(str(host) for host in hosts))
    for cell in assigned:
        child(found, "memnode", cellid=cell.id, mode="strict", nodeset=cell.host)
    return found


def _sysinfo(guest: Definition) -> Element | None:
    if not guest.is_qemu or not (guest.is_x86 or guest.arch == "aarch64"):
        return None
    found = element("sysinfo", type="smbios")
    system = child(found, "system")
    for name, value in (
        ("manufacturer", MANUFACTURER),
        ("product", PRODUCT),
        ("serial", guest.owner.uuid),
        ("uuid", guest.owner.uuid),
        ("family", "Virtual Machine"),
    ):
        child(system, "entry", value, name=name)
    return found


def _os(guest: Definition) -> Element:
    found = element("os", firmware="efi" if guest.uefi else None)
    child(found, "type", guest.os_type, arch=guest.arch, machine=guest.machine or None)
    if guest.uefi:
        firmware = child(found, "firmware")
        enabled = "yes" if guest.secure_boot else "no"
        child(firmware, "feature", enabled=enabled, name="secure-boot")
        child(firmware, "feature", enabled=enabled, name="enrolled-keys")
        if guest.secure_boot:
            child(found, "loader", secure="yes")
    if guest.kernel:
        child(found, "kernel", guest.kernel)
        if guest.ramdisk:
            child(found, "initrd", guest.ramdisk)
        child(found, "cmdline", _printable(guest.command_line))
    if guest.boot_menu:
        child(found, "bootmenu", enable="yes")
    if _sysinfo(guest) is not None:
        child(found, "smbios", mode="sysinfo")
    return found


def _features(guest: Definition) -> Element | None:
    if guest.os_type != "hvm":
        return None
    found = element("features")
    child(found, "acpi")
    if guest.is_x86:
        child(found, "apic")
    if guest.secure_boot:
        child(found, "smm", state="on")
    if guest.windows and guest.virt_type == "kvm":
        hyperv = child(found, "hyperv")
        for name in ("relaxed", "vapic"):
            child(hyperv, name, state="on")
        child(hyperv, "spinlocks", state="on", retries=8191)
        if guest.hide_hypervisor:
            child(hyperv, "vendor_id", state="on", value="1234567890ab")
    if guest.hide_hypervisor and guest.virt_type == "kvm":
        child(child(found, "kvm"), "hidden", state="on")
    if guest.pmu is not None:
        child(found, "pmu", state="on" if guest.pmu else "off")
    return found


def _cpu(guest: Definition) -> Element | None:
    cpu, plan = guest.cpu, guest.cpu_plan
    if not guest.is_qemu:
        return None
    found = element("cpu")
    if cpu.mode == "custom":
        found = element("cpu", mode="custom", match="exact", check="none" if guest.virt_type == "qemu" else "partial")
        child(found, "model", cpu.model, fallback="forbid")
    elif cpu.mode != "none":
        found = element("cpu", mode=cpu.mode)
    child(found, "topology", sockets=plan.sockets, cores=plan.cores, threads=plan.threads)
    for name, policy in cpu.flags:
        child(found, "feature", policy=policy, name=name)
    if plan.cells:
        numa = child(found, "numa")
        for cell in plan.cells:
            access = "shared" if plan.page_kib is not None else None
            child(
                numa,
                "cell",
                id=cell.id,
                cpus=format_cpus(cell.vcpus),
                memory=cell.memory_mb,
                unit="MiB",
                memAccess=access,
            )
    return found


def _clock(guest: Definition) -> Element:
    found = element("clock", offset="localtime" if guest.windows else "utc")
    if guest.is_qemu:
        child(found, "timer", name="rtc", tickpolicy="catchup")
        child(found, "timer", name="pit", tickpolicy="delay")
        if guest.is_x86:
            child(found, "timer", name="hpet", present="yes" if guest.hpet else "no")
        if guest.windows and guest.virt_type == "kvm":
            child(found, "timer", name="hypervclock", present="yes")
    return found


def _printable(text: str) -> str:
    """Remove what XML cannot represent, such as control characters in a server's name."""
    return "".join(character for character in text if character.isprintable())
