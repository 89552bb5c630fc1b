"""The parts of flavors, images, requests and aggregates that are accepted, as in Nova, and have no effect here.

Each function returns sentences, for the log and for dry runs. `unsupported.py` has what is refused.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Final

from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.objects.guest_cpus import cpu_request
from micronova.objects.guest_properties import UNSUPPORTED_HARDWARE, GuestProperties, is_checked
from micronova.objects.host_limits import cut_text
from micronova.objects.image import ImageMeta
from micronova.objects.image_properties import canonical_name
from micronova.objects.scheduling import GROUP_HINT
from micronova.placement import extra_specs
from micronova.servers import extra_spec_rules
from micronova.servers.honoured import GetHonoured, Honoured

_DISKS_IN_IMAGES: Final = "block devices in an image (a flavor has swap and ephemeral disks)"
REFUSED_PROPERTIES: Final = {
    **{f"hw_{name}": what for name, what in UNSUPPORTED_HARDWARE.items()},
    "cinder_encryption_key_id": "encrypted images",
    "hw_emulation_architecture": "emulation of another architecture",
    "hw_firmware_stateless": "stateless firmware",
    "hw_ipxe_boot": "a boot over the network",
    "img_block_device_mapping": _DISKS_IN_IMAGES,
    "img_mappings": _DISKS_IN_IMAGES,
}
"""Properties of images by their newest names, with what they ask for; a value that asks for nothing is accepted."""
_DESCRIBES: Final = frozenset(
    "auto_disk_config bdm_v2 hw_cpu_policy hw_cpu_thread_policy hw_machine_type hw_mem_page_size img_owner_id "
    "img_signature img_signature_certificate_uuid img_signature_hash_method img_signature_key_type os_admin_user "
    "os_command_line os_distro os_require_quiesce os_shutdown_timeout os_version".split()
)
"""Properties of images that are honoured with any value, or that only describe an image."""
_COMPARED_BY_FILTERS: Final = frozenset(("hw_vm_mode", "img_hv_requested_version", "img_hv_type"))
"""Properties of images that nothing reads but filters."""
_READ_BY_NOTHING: Final = frozenset({"hw_floppy_bus"})  # its value is checked
_OF_NOVA: Final = re.compile(r"(hw|img|vmware|xenapi)_.*|os_(?!glance_|hash_|hidden).*", re.DOTALL)
_OF_FILTERS: Final = ("aggregate_instance_extra_specs", "capabilities")  # namespaces; refused without their filters
_NODES: Final = re.compile(r"hw[:_]numa_(cpus|mem)\.[0-9]+")
_MOST_NAMES: Final = 5  # of one flavor, image, request or aggregate
_NOTHING: Final = "nothing on this cloud honours it"


def without_effect(flavor: Flavor | None, image: ImageMeta | None, honoured: GetHonoured = Honoured) -> list[str]:
    """Return a sentence for each extra spec and property that is accepted, and that nothing on this cloud honours."""
    found: list[str] = []
    if flavor is not None:
        reasons = {name: _reason(name, honoured) for name in sorted(flavor.extra_specs)}
        found += _first(
            f"The extra spec {_shown(name)} of flavor {_shown(flavor.name)} has no effect{reason}."
            for name, reason in reasons.items()
            if reason
        )
    if image is not None:
        found += _first(
            f"The property {_shown(name)} of image {image.id} has no effect: {_NOTHING}."
            for name in sorted(image.properties)
            if not _is_read(name, honoured)
        )
    return found


def nodes_without_effect(flavor: Flavor, image: ImageMeta | None) -> list[str]:
    """Return a sentence for each extra spec and property that describes NUMA nodes of a server that gets none."""
    named = [f"extra spec {name} of flavor {_shown(flavor.name)}" for name in _nodes_in(flavor.extra_specs)]
    if image is not None:
        named += [f"property {name} of image {image.id}" for name in _nodes_in(image.properties)]
    try:
        if not named or cpu_request(GuestProperties(flavor, image), flavor.vcpus, flavor.ram).cells:
            return []
    except Invalid:  # so the request is refused
        return []
    reason = "flavor and image ask neither for NUMA nodes nor for a size of memory pages nor for dedicated CPUs"
    return _first(f"The {each} has no effect: {reason}." for each in named)


def hints_without_effect(hints: Iterable[str], honoured: GetHonoured = Honoured) -> list[str]:
    """Return a sentence for each scheduler hint that no enabled filter honours."""
    unknown = sorted(set(hints) - {GROUP_HINT})
    return _first(
        f"The scheduler hint {_shown(name)} has no effect: no enabled filter honours it."
        for name in unknown
        if name not in honoured().hints
    )


def _reason(name: str, honoured: GetHonoured) -> str:
    """Return why an extra spec has no effect, "" if it has one."""
    namespace, colon, _ = name.partition(":")
    if extra_specs.is_of_placement(name) or (colon and namespace in _OF_FILTERS):
        return ""
    if extra_spec_rules.is_known(name) or honoured().reads_extra_spec(name):
        return ""
    if not colon and "capabilities" in honoured().extra_specs:
        return " on hosts that report no capability of this name: no other enabled filter honours it"
    return f": {_NOTHING}"


def _is_read(name: str, honoured: GetHonoured) -> bool:
    if extra_specs.is_of_placement(name) or name == extra_specs.GROUP_POLICY:
        return name.startswith("trait:")
    newest = canonical_name(name)
    if newest in _COMPARED_BY_FILTERS:
        return honoured().reads_property(name)
    if not _OF_NOVA.fullmatch(newest) or not _DESCRIBES.isdisjoint((name, newest)) or newest in REFUSED_PROPERTIES:
        return True
    return (is_checked(newest) and newest not in _READ_BY_NOTHING) or honoured().reads_property(name)


def _nodes_in(source: Iterable[str]) -> list[str]:
    return sorted(name for name in source if _NODES.fullmatch(name))


def _first(remarks: Iterable[str]) -> list[str]:
    return [each for _, each in zip(range(_MOST_NAMES), remarks, strict=False)]


def _shown(name: str) -> str:
    return cut_text(name, 64)


# --- aggregates ---

_READERS: Final[dict[str, tuple[str, ...]]] = {
    "cpu_allocation_ratio": ("AggregateCoreFilter",),
    "disk_allocation_ratio": ("AggregateDiskFilter",),
    "filter_tenant_id": ("AggregateMultiTenancyIsolation", "limit_tenants_to_placement_aggregate"),
    "image_props_weight_multiplier": ("filter_scheduler.image_props_weight_multiplier",),
    "instance_type": ("AggregateTypeAffinityFilter",),
    "max_instances_per_host": ("AggregateNumInstancesFilter",),
    "max_io_ops_per_host": ("AggregateIoOpsFilter",),
    "ram_allocation_ratio": ("AggregateRamFilter",),
    "trait:": ("enable_isolated_aggregate_filtering",),
}
"""What reads the metadata of aggregates that begin so: filters, or settings (of the section `scheduler`)."""
_PREFIXES: Final = ("filter_tenant_id", "trait:")
RATIOS: Final = {
    "cpu_allocation_ratio": "VCPU",
    "disk_allocation_ratio": "DISK_GB",
    "ram_allocation_ratio": "MEMORY_MB",
}
"""The metadata that lowers the allocation ratio of a resource class."""


def metadata_without_effect(
    aggregate: str, metadata: Mapping[str, str], ratios: Mapping[str, float], honoured: GetHonoured = Honoured
) -> list[str]:
    """Return a sentence for each metadata of an aggregate that the scheduler would read with other settings.

    `ratios` are the largest allocation ratios of the aggregate's own hosts, by resource class.
    """
    found = []
    for key, value in sorted(metadata.items()):
        kind = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), key)
        readers = _READERS.get(kind)
        if readers is None:
            continue
        if not honoured().enabled & set(readers):
            found.append((key, f"it needs {' or '.join(map(_named, readers))}"))
        elif kind == "trait:" and value != "required":
            found.append((key, "of traits of aggregates only the value required counts"))
        elif (own := ratios.get(RATIOS.get(key, ""))) is not None and _number(value) > own:
            reason = f"the allocation ratio of its hosts is at most {own:g}, and metadata only lowers it"
            found.append((key, reason))
    return _first(
        f"The metadata {_shown(key)} of aggregate {_shown(aggregate)} has no effect: {reason}." for key, reason in found
    )


def _named(reader: str) -> str:
    if reader[0].isupper():
        return f"the filter {reader}"
    return f"the setting {reader if '.' in reader else f'scheduler.{reader}'}"


def _number(text: str) -> float:
    """Return the number that a text says; what is none is below all numbers."""
    try:
        number = float(text)
    except ValueError:
        return -math.inf
    return number if math.isfinite(number) else -math.inf
