"""A guest's devices as libvirt's XML. `compose` decides what is in them."""

from micronova.virt.libvirt.client.xmltree import Element, child, element
from micronova.virt.libvirt.definition.types import (
    Definition,
    Disk,
    Interface,
    ISCSISource,
    NBDSource,
    RBDSource,
    Screen,
    Serial,
    VolumeSource,
)
from micronova.virt.libvirt.host import is_qemu


def devices(guest: Definition) -> Element:
    """Return the element with all devices."""
    found = element("devices")
    if guest.emulator:
        child(found, "emulator", guest.emulator)
    found.extend(disk(each, guest.virt_type) for each in guest.disks)
    _controllers(found, guest)
    found.extend(interface(each, guest.virt_type) for each in guest.interfaces)
    for number, port in enumerate(guest.serials):
        found.append(serial(port, number))
    if guest.os_type != "hvm":
        child(child(found, "console", type="pty"), "target", type="xen")
    if guest.guest_agent:
        channel = child(found, "channel", type="unix")
        child(channel, "target", type="virtio", name="org.qemu.guest_agent.0")
    if guest.tablet:
        child(found, "input", type="tablet", bus=guest.tablet)
    found.extend(graphics(screen) for screen in guest.screens)
    if any(screen.protocol == "spice" for screen in guest.screens):
        # Guests have no sound card; without this libvirt makes SPICE carry sound.
        child(found, "audio", id=1, type="none")
    if guest.video:
        video = child(found, "video")
        child(video, "model", type=guest.video.model, vram=guest.video.vram_kib, heads=1)
    found.extend(host_device(address) for address in guest.host_devices)
    found.extend(mediated_device(uuid) for uuid in guest.mdevs)
    if guest.watchdog:
        child(found, "watchdog", model=guest.watchdog_model, action=guest.watchdog)
    if guest.rng:
        rng = child(found, "rng", model="virtio")
        if guest.rng.bytes:
            child(rng, "rate", bytes=guest.rng.bytes, period=guest.rng.period_ms)
        child(rng, "backend", guest.rng.device, model="random")
    _balloon(found, guest)
    if guest.panic_model:
        child(found, "panic", model=guest.panic_model)
    return found


def host_device(address: str) -> Element:
    """Return a PCI device of the host; libvirt takes it from the host's driver and gives it back."""
    domain, bus, rest = address.split(":")
    slot, function = rest.split(".")
    found = element("hostdev", mode="subsystem", type="pci", managed="yes")
    parts = {"domain": domain, "bus": bus, "slot": slot, "function": function}
    child(child(found, "source"), "address", **{name: f"0x{part}" for name, part in parts.items()})
    return found


def mediated_device(uuid: str) -> Element:
    """Return a mediated device of the host, which the guest sees as a PCI device."""
    found = element("hostdev", mode="subsystem", type="mdev", managed="no", model="vfio-pci")
    child(child(found, "source"), "address", uuid=uuid)
    return found


def disk(disk: Disk, virt_type: str = "qemu") -> Element:
    """Return a disk."""
    found = element("disk", type="file" if disk.volume is None else "network", device=disk.device)
    if is_qemu(virt_type):
        io = "native" if disk.cache in ("none", "directsync") and disk.volume is None else None
        discard = "unmap" if disk.device == "disk" and disk.discard else None
        child(found, "driver", name="qemu", type=disk.format, cache=disk.cache, io=io, discard=discard)
    else:
        child(found, "driver", name="qemu", type=disk.format)
    if disk.volume is None:
        _source(found, disk.file, virt_type)
    else:
        found.append(volume_source(disk.volume))
    # The whole chain is given, so that libvirt does not probe the files' headers.
    if disk.backing is not None:
        backing = child(found, "backingStore", type="file")
        child(backing, "format", type="raw")
        _source(backing, disk.backing, virt_type)
        child(backing, "backingStore")
    elif is_qemu(virt_type):
        child(found, "backingStore")
    child(found, "target", dev=disk.target, bus=disk.bus)
    if disk.device == "cdrom" or disk.readonly:
        child(found, "readonly")
    if disk.shareable:
        child(found, "shareable")
    if disk.serial:
        child(found, "serial", disk.serial)
    if disk.boot_order is not None:
        child(found, "boot", order=disk.boot_order)
    if disk.limits:
        tune = child(found, "iotune")
        for name, value in disk.limits:
            child(tune, name, str(value))
    return found


def volume_source(volume: VolumeSource) -> Element:
    """Return where the data of a volume is."""
    match volume:
        case NBDSource():
            found = element("source", protocol="nbd", name=volume.export)
            if volume.socket:
                child(found, "host", transport="unix", socket=volume.socket)
            else:
                child(found, "host", name=volume.host, port=volume.port)
        case RBDSource():
            found = element("source", protocol="rbd", name=volume.name)
            for host, port in volume.monitors:
                child(found, "host", name=host, port=port)
            _login(found, "ceph", volume.user, volume.login)
        case ISCSISource():
            found = element("source", protocol="iscsi", name=volume.name)
            child(found, "host", name=volume.host, port=volume.port)
            _login(found, "iscsi", volume.user, volume.login)
            child(child(found, "initiator"), "iqn", name=volume.initiator)
    if volume.secret:
        child(child(found, "encryption", format="luks"), "secret", type="passphrase", uuid=volume.secret)
    return found


def _login(source: Element, kind: str, user: str, secret: str) -> None:
    if user:
        child(child(source, "auth", username=user), "secret", type=kind, uuid=secret)


def _source(parent: Element, file: str, virt_type: str) -> None:
    found = child(parent, "source", file=file)
    if is_qemu(virt_type):
        # The file stays the agent's; an access control list lets the guest's user use it.
        child(found, "seclabel", model="dac", relabel="no")


def interface(interface: Interface, virt_type: str = "qemu") -> Element:
    """Return a network interface."""
    found = element("interface", type="bridge" if interface.bridge else "ethernet")
    child(found, "mac", address=interface.mac)
    if interface.bridge:
        child(found, "source", bridge=interface.bridge)
    child(found, "target", dev=interface.device)
    if interface.script:
        child(found, "script", path=interface.script)
    if interface.model:
        child(found, "model", type=interface.model)
    if is_qemu(virt_type) and interface.queues > 1:
        child(found, "driver", name="vhost" if virt_type == "kvm" else "qemu", queues=interface.queues)
    if interface.mtu:
        child(found, "mtu", size=interface.mtu)
    if not interface.linked:
        child(found, "link", state="down")
    if interface.boot_order is not None:
        child(found, "boot", order=interface.boot_order)
    return found


def serial(port: Serial, number: int) -> Element:
    """Return a serial port."""
    found = element("serial", type="unix" if port.socket else "pty")
    if port.socket:
        child(found, "source", mode="bind", path=port.socket)
    if port.log:
        child(found, "log", file=port.log, append="on")
    child(found, "target", port=number)
    return found


def graphics(screen: Screen) -> Element:
    """Return a VNC or SPICE server. It has no password: only the console proxy reaches it, and checks tokens."""
    if screen.socket:
        found = element("graphics", type=screen.protocol)
        child(found, "listen", type="socket", socket=screen.socket)
    else:
        found = element("graphics", type=screen.protocol, autoport="yes", listen=screen.address)
        child(found, "listen", type="address", address=screen.address)
    if screen.protocol == "spice":
        # The browser's client supports neither image dictionaries nor, on our page, video streams.
        child(found, "image", compression="auto_lz")
        child(found, "streaming", mode="off")
    return found


def _controllers(devices: Element, guest: Definition) -> None:
    if any(disk.bus == "scsi" for disk in guest.disks):
        child(devices, "controller", type="scsi", index=0, model=guest.scsi_model)
    if guest.is_qemu:
        usb = guest.tablet == "usb" or any(disk.bus == "usb" for disk in guest.disks)
        if not usb:
            # Otherwise libvirt adds one, and firmware and guest spend time on it.
            child(devices, "controller", type="usb", model="none")
        if guest.pcie_ports:
            child(devices, "controller", type="pci", index=0, model="pcie-root")
        for _ in range(guest.pcie_ports):
            child(devices, "controller", type="pci", model="pcie-root-port")


def _balloon(devices: Element, guest: Definition) -> None:
    if not guest.is_qemu:
        return
    if guest.balloon_period is None:
        child(devices, "memballoon", model="none")
    else:
        child(child(devices, "memballoon", model="virtio"), "stats", period=guest.balloon_period)
