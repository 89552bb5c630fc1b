"""The properties of images by their newest names and with the values that Nova compares: `amd64` is x86_64, `yes` True.

Images may have properties by older names and in several spellings. What compares two images, or an image with what
operators have written, compares these.
"""

from collections.abc import Mapping
from typing import Any, Final

from micronova.objects.guest_properties import TRUE_WORDS, canonical_architecture, image_property, whole_number

_NEWER: Final = {
    "architecture": "hw_architecture",
    "auto_disk_config": "hw_auto_disk_config",
    "bdm_v2": "img_bdm_v2",
    "bittorrent": "img_bittorrent",
    "block_device_mapping": "img_block_device_mapping",
    "cache_in_nova": "img_cache_in_nova",
    "hypervisor_type": "img_hv_type",
    "hypervisor_version_requires": "img_hv_requested_version",
    "ipxe_boot": "hw_ipxe_boot",
    "mappings": "img_mappings",
    "owner_id": "img_owner_id",
    "root_device_name": "img_root_device_name",
    "vm_mode": "hw_vm_mode",
    "vmware_disktype": "hw_disk_type",
    "vmware_image_version": "img_version",
    "vmware_linked_clone": "img_linked_clone",
    "vmware_ostype": "os_distro",
    "xenapi_device_id": "hw_device_id",
    "xenapi_image_compression_level": "img_compression_level",
    "xenapi_skip_agent_inject_files_at_boot": "os_skip_agent_inject_files_at_boot",
    "xenapi_skip_agent_inject_ssh": "os_skip_agent_inject_ssh",
    "xenapi_use_agent": "img_use_agent",
}
_ADAPTER: Final = "vmware_adaptertype"
"""An older name of two properties: the bus of disks, and the model of its controller."""
_OF_ADAPTER: Final = ("hw_disk_bus", "hw_scsi_model")
_TRAIT: Final = "trait:"
_FLAGS: Final = frozenset(
    "hw_boot_menu hw_ephemeral_encryption hw_firmware_stateless hw_ipxe_boot hw_locked_memory hw_mem_encryption hw_pmu "
    "hw_qemu_guest_agent hw_time_hpet hw_vif_multiqueue_enabled hw_virtio_packed_ring img_bdm_v2 img_bittorrent "
    "img_cache_in_nova img_hide_hypervisor_id img_linked_clone img_use_agent os_require_quiesce "
    "os_skip_agent_inject_files_at_boot os_skip_agent_inject_ssh".split()
)
_NUMBERS: Final = frozenset(
    "hw_cpu_cores hw_cpu_max_cores hw_cpu_max_sockets hw_cpu_max_threads hw_cpu_sockets hw_cpu_threads hw_device_id "
    "hw_maxphysaddr_bits hw_numa_nodes hw_redirected_usb_ports hw_serial_port_count hw_video_ram img_compression_level "
    "img_version".split()
)
_HYPERVISORS: Final = {"xapi": "xen", "powervm": "phyp", "virtuozzo": "parallels"}
_MODES: Final = {"pv": "xen", "hv": "hvm", "baremetal": "hvm"}


def canonical_properties(properties: Mapping[str, Any]) -> dict[str, str]:
    """Return properties by their newest names, which win over older ones, with their values in one spelling.

    Traits that the image requires are one property, `traits_required`.
    """
    given = {name: value for name, value in properties.items() if value is not None}
    known = {_NEWER[name]: value for name, value in given.items() if name in _NEWER}
    known |= {name: value for name in _OF_ADAPTER if (value := image_property(given, name)) is not None}
    known |= {name: value for name, value in given.items() if canonical_name(name) == name}
    found = {name: _value(name, value) for name, value in known.items() if not name.startswith(_TRAIT)}
    traits = [
        name.removeprefix(_TRAIT) for name, value in given.items() if name.startswith(_TRAIT) and value == "required"
    ]
    return found | {"traits_required": str(traits)} if traits else found


def canonical_name(name: str) -> str:
    """Return the newest name of a property, the first one if it has become two."""
    return _OF_ADAPTER[0] if name == _ADAPTER else _NEWER.get(name, name)


def is_off(name: str, value: str) -> bool:
    """Return whether a canonical value asks for nothing: Nova does not compare it with what operators have written."""
    return not value or (name in _FLAGS and value == str(False)) or (name in _NUMBERS and value == "0")


def canonical_hypervisor(text: str) -> str:
    """Return the one name of a type of hypervisors that has several."""
    return _HYPERVISORS.get(text.lower(), text.lower())


def canonical_mode(text: str) -> str:
    """Return the one name of a mode of machines that has several."""
    return _MODES.get(text.lower(), text.lower())


def _value(name: str, value: Any) -> str:
    text = str(value)
    match name:
        case "hw_architecture":
            return canonical_architecture(text)
        case "img_hv_type":
            return canonical_hypervisor(text)
        case "hw_vm_mode":
            return canonical_mode(text)
        case _ if name in _FLAGS:
            return str(text.strip().lower() in TRUE_WORDS)
        case _ if name in _NUMBERS:
            number = whole_number(text)
            return text if number is None else str(number)
    return image_property({name: value}, name) or text
