"""The flavor's extra specs and the image's properties that describe a guest's hardware, by Nova's names.

The API refuses an image with values that no host knows (`check_image_properties`); a host reads the rest.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from micronova.objects.cpu_sets import parse_cpus
from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.version_predicates import parse_predicates

TRUE_WORDS: Final = frozenset({"1", "true", "yes", "on", "t", "y"})
"""What counts as true in lower case, in properties of images and in the API's flags."""
FALSE_WORDS: Final = frozenset({"0", "false", "no", "off", "f", "n"})
"""What counts as false there."""
UNSUPPORTED_HARDWARE: Final = {
    "cpu_realtime": "real-time CPUs",
    "cpu_realtime_mask": "real-time CPUs",
    "ephemeral_encryption": "encrypted local disks",
    "ephemeral_encryption_format": "encrypted local disks",
    "ephemeral_encryption_secret_uuid": "encrypted local disks",
    "locked_memory": "locked memory",
    "maxphysaddr_bits": "a choice of physical address bits",
    "maxphysaddr_mode": "a choice of physical address bits",
    "mem_encryption": "encrypted memory",
    "mem_encryption_model": "encrypted memory",
    "pmem": "persistent memory",
    "redirected_usb_ports": "redirected USB ports",
    "sound_model": "sound devices",
    "tpm_model": "a TPM",
    "tpm_secret_security": "a TPM",
    "tpm_version": "a TPM",
    "usb_model": "a choice of USB controllers",
    "viommu_model": "an IOMMU in the guest",
    "virtio_packed_ring": "packed virtio rings",
}
"""What a flavor (`hw:NAME`) or an image (`hw_NAME`) may ask for, and no driver does."""
_OFF: Final = FALSE_WORDS | {"", "[]", "disabled", "none"}  # what asks for nothing
_MOST_DIGITS: Final = 18  # of a number in a property: it fits into 64 bits

_BUSES: Final = ("fdc", "ide", "sata", "scsi", "usb", "virtio", "xen", "lxc", "uml")
_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "hw_cdrom_bus": _BUSES,
    "hw_cpu_policy": ("shared", "dedicated", "mixed"),
    "hw_cpu_thread_policy": ("prefer", "isolate", "require"),
    "hw_disk_bus": _BUSES,
    "hw_firmware_type": ("bios", "uefi"),
    "hw_floppy_bus": _BUSES,
    "hw_input_bus": ("usb", "virtio"),
    "hw_pci_numa_affinity_policy": ("legacy", "preferred", "required", "socket"),
    "hw_pointer_model": ("usbtablet",),
    "hw_rescue_bus": _BUSES,
    "hw_rescue_device": ("cdrom", "disk", "floppy", "fs", "lun"),
    "hw_rng_model": ("virtio",),
    "hw_scsi_model": (
        "buslogic",
        "ibmvscsi",
        "lsilogic",
        "lsisas1068",
        "lsisas1078",
        "virtio-scsi",
        "vmpvscsi",
    ),
    "hw_video_model": ("bochs", "cirrus", "gop", "none", "qxl", "vga", "virtio", "vmvga", "xen"),
    "hw_vif_model": (
        "e1000",
        "e1000e",
        "igb",
        "lan9118",
        "ne2k_pci",
        "netfront",
        "pcnet",
        "rtl8139",
        "spapr-vlan",
        "sriov",
        "virtio",
        "vmxnet",
        "vmxnet3",
    ),
    "hw_watchdog_action": ("disabled", "none", "pause", "poweroff", "reset"),
    "img_config_drive": ("optional", "mandatory"),
    "os_secure_boot": ("required", "optional", "disabled"),
    "os_type": ("linux", "windows"),
}
_HYPERVISORS: Final = tuple(
    "baremetal bhyve docker fake hyperv ironic kqemu kvm lxc lxd openvz parallels phyp prsm qemu test uml vbox vmware "
    "vz xapi xen zvm".split()
)
_MODES: Final = ("baremetal", "exe", "hv", "hvm", "pv", "uml", "xen")
# Values in which capitals do not count; older names of properties are still in use.
_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "hw_vm_mode": _MODES,
    "hypervisor_type": _HYPERVISORS,
    "img_hv_type": _HYPERVISORS,
    "vm_mode": _MODES,
}
_VERSIONS: Final = ("img_hv_requested_version", "hypervisor_version_requires")
_ROOT_DEVICES: Final = ("img_root_device_name", "root_device_name")
_LONGEST_DEVICE: Final = 255  # characters, with /dev/
# Values in which capitals do not count either, and other names of some, which images for other hypervisors have.
_SYNONYMS: Final[dict[str, dict[str, str]]] = {
    "hw_scsi_model": {"lsilogicsas": "lsisas1068", "paravirtual": "vmpvscsi"},
    "hw_vif_model": {
        "virtuale1000": "e1000",
        "virtuale1000e": "e1000e",
        "virtualpcnet32": "pcnet",
        "virtualsriovethernetcard": "sriov",
        "virtualvmxnet": "vmxnet",
        "virtualvmxnet3": "vmxnet3",
    },
    "os_type": {},
}
_NUMBERED: Final = re.compile(r"hw_numa_(cpus|mem)\.\d{1,5}", re.ASCII)
_FLAGS: Final = (
    "hw_boot_menu",
    "hw_pmu",
    "hw_qemu_guest_agent",
    "hw_time_hpet",
    "hw_vif_multiqueue_enabled",
    "img_hide_hypervisor_id",
)
_NUMBERS: Final = (
    *(f"hw_cpu_{most}{part}" for most in ("", "max_") for part in ("sockets", "cores", "threads")),
    "hw_numa_nodes",
    "hw_serial_port_count",
    "hw_video_ram",
)
_ARCHITECTURES: Final = frozenset(
    "aarch64 alpha armv6 armv7b armv7l cris i686 ia64 lm32 m68k microblaze microblazeel mips mips64 mips64el mipsel "
    "openrisc parisc parisc64 ppc ppc64 ppc64le ppcemb ppcle s390 s390x sh4 sh4eb sparc sparc64 unicore32 x86_64 "
    "xtensa xtensaeb".split()
)
_OTHER_NAMES: Final = {"amd64": "x86_64"} | dict.fromkeys(("i386", "i486", "i586", "x86_32", "x86_32p"), "i686")


def canonical_architecture(text: str) -> str:
    """Return the one name of an architecture that has several, such as x86_64 for amd64; Nova knows the same others."""
    return _OTHER_NAMES.get(text.lower(), text.lower())


class GuestProperties:
    """Looks up extra specs and image properties."""

    def __init__(self, flavor: Flavor, image: ImageMeta | None) -> None:
        self._flavor: Mapping[str, str] = flavor.extra_specs
        self._image: Mapping[str, Any] = {} if image is None else image.properties

    def both(self, name: str, prefix: str = "hw") -> tuple[str | None, str | None]:
        """Return `hw:NAME` of the flavor and `hw_NAME` of the image."""
        return self.flavor(f"{prefix}:{name}"), self.image(f"{prefix}_{name}")

    def image_first(self, name: str) -> str | None:
        """Return `hw_NAME` of the image, or else `hw:NAME` of the flavor."""
        flavor, image = self.both(name)
        return flavor if image is None else image

    def agreed(self, name: str, prefix: str = "hw") -> str | None:
        """Return what flavor or image has; raise Invalid if both have it and differ."""
        flavor, image = self.both(name, prefix)
        if flavor and image and flavor != image:
            raise self._conflict(name, prefix, flavor, image)
        return flavor or image

    def agreed_flag(self, name: str) -> bool | None:
        """Return the boolean that flavor or image has; raise Invalid if both have one and differ."""
        found = [
            None if value is None else self.enabled(value, f"hw:{name}", default=False) for value in self.both(name)
        ]
        if None not in found and found[0] != found[1]:
            raise self._conflict(name, "hw", found[0], found[1])
        return next((value for value in found if value is not None), None)

    def image(self, name: str) -> str | None:
        """Return a property of the image."""
        return image_property(self._image, name)

    def flavor(self, name: str) -> str | None:
        """Return an extra spec of the flavor."""
        found = self._flavor.get(name)
        return None if found is None else str(found)

    def architecture(self) -> str | None:
        """Return the architecture that the image needs."""
        found = self.image("hw_architecture") or self.image("architecture")
        return None if found is None else _architecture(found)

    def enabled(self, value: str | None, name: str, default: bool) -> bool:
        """Parse a boolean; `name` is for the error message."""
        if value is None:
            return default
        text = value.strip().lower()
        if text in TRUE_WORDS:
            return True
        if not text or text in FALSE_WORDS:
            return False
        raise Invalid(f"{name} is {value!r}: it should be yes or no.")

    def number(self, value: str | None, name: str, *, least: int = 0) -> int | None:
        """Parse a number; `name` is for the error message."""
        if value is None:
            return None
        number = whole_number(value)
        if number is None or number < least:
            raise Invalid(f"{name} is {value[:64]!r}: it should be a number of at least {least}.")
        return number

    def choice(self, value: str | None, name: str, allowed: tuple[str, ...], default: str) -> str:
        """Return a value that must be one of several; `name` is for the error message."""
        if value is None:
            return default
        if value not in allowed:
            raise Invalid(f"{name} is {value!r}: it should be one of {', '.join(allowed)}.")
        return value

    def numbered(self, name: str) -> dict[int, str]:
        """Return the values of `hw:NAME.0`, `hw:NAME.1`…, or else `hw_NAME.0`…; raise Invalid if there are both."""

        def find(source: Mapping[str, Any], start: str) -> dict[int, str]:
            rest = {key.removeprefix(start): value for key, value in source.items() if key.startswith(start)}
            numbers = {key: whole_number(key) for key in rest if key.isdecimal() and len(key) < 6}
            return {number: str(rest[key]) for key, number in numbers.items() if number is not None}

        flavor, image = find(self._flavor, f"hw:{name}."), find(self._image, f"hw_{name}.")
        if flavor and image:
            raise Invalid(f"The image has hw_{name}, which the flavor sets already.")
        return flavor or image

    def _conflict(self, name: str, prefix: str, flavor: object, image: object) -> Invalid:
        return Invalid(
            f"The flavor has {prefix}:{name} {flavor} and the image {prefix}_{name} {image}: they have to be the same."
        )


def image_property(properties: Mapping[str, Any], name: str) -> str | None:
    """Return a property of an image, as drivers know its value: `Linux` is linux, `VirtualE1000` is e1000."""
    value = properties.get(name)
    if value is None:
        value = _of_adapter(properties.get("vmware_adaptertype"), name)
    if value is None:
        return None
    text = str(value)
    synonyms = _SYNONYMS.get(name)
    return text if synonyms is None else synonyms.get(text.lower(), text.lower())


def _of_adapter(adapter: Any, name: str) -> str | None:
    """Return the disk bus or its controller that an image for VMware names, by the property vmware_adaptertype."""
    if not adapter or name not in ("hw_disk_bus", "hw_scsi_model"):
        return None
    is_ide = str(adapter) == "ide"
    if name == "hw_disk_bus":
        return "ide" if is_ide else "scsi"
    return None if is_ide else str(adapter)


def choices(name: str, *, unsupported: Collection[str] = ()) -> tuple[str, ...]:
    """Return the values that a property of an image may have, without those that a driver does not support."""
    return tuple(value for value in _CHOICES[name] if value not in unsupported)


def asks(value: Any) -> bool:
    """Return whether the value of an extra spec or a property asks for something."""
    return value is not None and str(value).strip().lower() not in _OFF


def whole_number(text: str) -> int | None:
    """Return the number that a text of ASCII digits, perhaps with a minus sign, says; None if it is another text.

    `int` alone also takes underscores and the digits of other scripts.
    """
    digits = text.strip().removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > _MOST_DIGITS:
        return None
    return int(text)


def serial_ports(properties: GuestProperties) -> int:
    """Return the number of serial ports; an image may ask for fewer than its flavor has."""
    flavor, image = (properties.number(value, "hw:serial_port_count") for value in properties.both("serial_port_count"))
    if flavor and image and image > flavor:
        raise Invalid(f"The image's hw_serial_port_count is {image}; the flavor allows {flavor}.")
    return image or flavor or 1


def wants_queues(properties: GuestProperties, vcpus: int) -> bool:
    """Return whether interfaces get several queues; a guest with one CPU has no use for them."""
    return vcpus > 1 and bool(properties.agreed_flag("vif_multiqueue_enabled"))


def root_device_of(image: ImageMeta | None) -> str | None:
    """Return the name that an image gives to the root disk, with its directory; None if it gives none."""
    properties = {} if image is None else image.properties
    name = properties.get("img_root_device_name") or properties.get("root_device_name")
    return None if not name else _device_path(str(name))


def _device_path(name: str) -> str:
    return f"/dev/{name.removeprefix('/dev/')}"


def disk_config_of(auto_disk_config: object) -> str:
    """Return the disk config that an image asks for by its property auto_disk_config."""
    return "AUTO" if str(auto_disk_config).strip().lower() in TRUE_WORDS else "MANUAL"


def is_checked(name: str) -> bool:
    """Return whether a property of an image is one whose value is checked, and that hosts or the scheduler read."""
    return (
        any(name in names for names in (_CHOICES, _FLAGS, _NUMBERS, _NAMES))
        or name in ("architecture", "hw_architecture", "img_hv_requested_version", "img_root_device_name")
        or _NUMBERED.fullmatch(name) is not None
    )


def check_image_properties(properties: Mapping[str, Any]) -> None:
    """Raise Invalid if a property of an image has a value that it cannot have."""
    for name, value in properties.items():
        if value is None:
            continue
        text = str(value)
        if name in _CHOICES and image_property(properties, name) not in _CHOICES[name]:
            raise _wrong(name, text, f"one of {', '.join(_CHOICES[name])}")
        if name == "vmware_adaptertype" and (model := _of_adapter(text, "hw_scsi_model")) is not None:
            check_image_properties({"hw_scsi_model": model})
        if name in _FLAGS and text.strip().lower() not in TRUE_WORDS | FALSE_WORDS | {""}:
            raise _wrong(name, text, "yes or no")
        if name in _NUMBERS and not (text.isascii() and text.strip().isdecimal()):
            raise _wrong(name, text, "a number")
        if name in ("architecture", "hw_architecture"):
            _architecture(text)
        if name in _NAMES and text.lower() not in _NAMES[name]:
            raise _wrong(name, text, f"one of {', '.join(_NAMES[name])}")
        if name in _VERSIONS:
            _check_versions(name, text)
        if name in _ROOT_DEVICES and len(_device_path(text)) > _LONGEST_DEVICE:
            raise _wrong(name, text, "the name of a disk such as /dev/vda, of at most 255 characters")
        if numbered := _NUMBERED.fullmatch(name):
            _check_numbered(name, text, is_set=numbered[1] == "cpus")


def _check_versions(name: str, text: str) -> None:
    try:
        parse_predicates(text)
    except ValueError:
        raise _wrong(name, text, "versions such as '>=6.0, <8'") from None


def _check_numbered(name: str, text: str, *, is_set: bool) -> None:
    if not is_set:
        if whole_number(text) is None:
            raise _wrong(name, text, "a number of MiB")
        return
    try:
        parse_cpus(text)
    except ValueError:
        raise _wrong(name, text, "a set of CPUs such as 0-3,^2") from None


def _architecture(text: str) -> str:
    name = canonical_architecture(text)
    if name not in _ARCHITECTURES:
        raise _wrong("hw_architecture", text, "the name of an architecture such as x86_64")
    return name


def _wrong(name: str, text: str, right: str) -> Invalid:
    return Invalid(f"Invalid image metadata. Error: {name} is {text[:64]!r}: it should be {right}.")
