"""What a request, a flavor or an image may ask for and this cloud does not do: refused, never ignored.

Create, resize and rebuild refuse it. An unknown name in a namespace of Nova's is accepted, as in Nova. The log and dry
runs say that it has no effect.

Enabled filters of the scheduler may honour scheduler hints and namespaces of extra specs (`Honoured`). Extra specs
without a namespace are not refused, because they may belong to a filter or to another program.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.objects.guest_properties import UNSUPPORTED_HARDWARE, GuestProperties, asks, is_checked
from micronova.objects.host_limits import cut_text
from micronova.objects.image import ImageMeta
from micronova.objects.pci_devices import Alias, device_requests
from micronova.objects.scheduling import GROUP_HINT
from micronova.placement import extra_specs
from micronova.servers import extra_spec_rules

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Honoured:
    """What the enabled filters take into account."""

    hints: frozenset[str] = frozenset()
    extra_specs: frozenset[str] = frozenset()  # namespaces, without a colon
    # They raise Invalid for malformed hints and extra specs.
    checks: tuple[Callable[[Mapping[str, Sequence[str]], Mapping[str, str]], None], ...] = ()


# Scheduler hints of Nova, with the filter that honours them there.
_HINTS: Final = {
    "build_near_host_ip": "SimpleCIDRAffinityFilter",
    "cidr": "SimpleCIDRAffinityFilter",
    "different_cell": "DifferentCellFilter",
    "different_host": "DifferentHostFilter",
    "query": "JsonFilter",
    "same_host": "SameHostFilter",
    "target_cell": "TargetCellFilter",
}
# Namespaces of extra specs that filters may honour. A group such as `resources1` or `trait_GPU` counts as its kind.
_NAMESPACES: Final = {
    "aggregate_instance_extra_specs": "aggregates that match extra specs",
    "capabilities": "capabilities of hosts",
}
_GRANULAR: Final = re.compile(r"(resources|trait)[a-zA-Z0-9_-]{0,64}")

_DISKS_IN_IMAGES: Final = "block devices in an image (a flavor has swap and ephemeral disks)"
_VIF_LIMITS: Final = "limits of interfaces in a flavor (use a QoS policy of the network service)"
_RESERVATIONS: Final = "reservations, limits and shares of VMware"

_FLAVOR: Final = {
    **{f"hw:{name}": what for name, what in UNSUPPORTED_HARDWARE.items()},
    "accel:device_profile": "accelerators",
    "vmware:hw_version": "VMware",
    "vmware:storage_policy": "VMware",
    **{
        f"quota:vif_{way}_{what}": _VIF_LIMITS
        for way in ("inbound", "outbound")
        for what in ("average", "peak", "burst")
    },
    **{
        f"quota:{resource}_{kind}": _RESERVATIONS
        for resource in ("cpu", "memory", "disk_io", "vif")
        for kind in ("limit", "reservation", "shares_level", "shares_share")
    },
}
_IMAGE: Final = {
    **{f"hw_{name}": what for name, what in UNSUPPORTED_HARDWARE.items()},
    "block_device_mapping": _DISKS_IN_IMAGES,
    "cinder_encryption_key_id": "encrypted images",
    "hw_emulation_architecture": "emulation of another architecture",
    "hw_firmware_stateless": "stateless firmware",
    "hw_ipxe_boot": "a boot over the network",
    "img_block_device_mapping": _DISKS_IN_IMAGES,
    "img_mappings": _DISKS_IN_IMAGES,
    "mappings": _DISKS_IN_IMAGES,
}
_DESCRIBES: Final = frozenset(
    "hw_cpu_policy hw_cpu_thread_policy hw_machine_type hw_mem_page_size img_signature img_signature_certificate_uuid "
    "img_signature_hash_method img_signature_key_type os_admin_user os_command_line os_distro os_require_quiesce "
    "os_shutdown_timeout os_version".split()
)
"""Properties of images that are honoured with any value, or that only describe an image."""
_OF_NOVA: Final = re.compile(r"(hw|img)_.*|os_(?!glance_|hash_|hidden).*", re.DOTALL)  # names that Nova gives
_MOST_REPORTED: Final = 1000  # flavors and images that are not reported again
_MOST_NAMES: Final = 5  # of one of them


class Unsupported:
    """Refuses what the drivers and the enabled filters do not do."""

    def __init__(self, honoured: Callable[[], Honoured], aliases: Mapping[str, Alias] | None = None) -> None:
        self._honoured = honoured  # called when a request first depends on it
        self._aliases = aliases or {}  # of PCI devices
        self._reported: set[tuple[str, ...]] = set()

    def check_hints(self, hints: Mapping[str, Sequence[str]]) -> None:
        """Raise Invalid if a request has hints without a filter, or malformed ones."""
        for hint in sorted(_HINTS.keys() & hints.keys()):
            if hint not in self._honoured().hints:
                raise Invalid(
                    f"The scheduler hint {hint} is not supported: no enabled filter honours it "
                    f"(in Nova {_HINTS[hint]} does). Remove it from the request."
                )
        if hints.keys() - {GROUP_HINT}:  # no filter checks it; the others may be those of a plugin's filter
            for check in self._honoured().checks:
                check(hints, {})

    def check_flavor(self, flavor: Flavor, image: ImageMeta | None = None) -> None:
        """Raise Invalid if the flavor has an extra spec that would have no effect, or contradicts the image."""
        extra_specs.check(flavor, image)
        for name, value in flavor.extra_specs.items():
            namespace, colon, _ = name.partition(":")
            granular = _GRANULAR.fullmatch(namespace)
            kind = granular[1] if granular else namespace
            if granular and colon:
                continue  # the scheduler itself honours resources and traits
            if colon and kind in _NAMESPACES and kind not in self._honoured().extra_specs:
                raise _refusal(f"The extra spec {name} of flavor {flavor.name}", _NAMESPACES[kind])
            if name in _FLAVOR and asks(value):
                raise _refusal(f"The extra spec {name} of flavor {flavor.name}", _FLAVOR[name])
        if any(
            name.partition(":")[0] in _NAMESPACES or extra_spec_rules.is_of_others(name) for name in flavor.extra_specs
        ):
            for check in self._honoured().checks:
                check({}, flavor.extra_specs)
        self._report(flavor.id, without_effect(flavor, None))

    def check_devices(self, flavor: Flavor, image: ImageMeta | None) -> None:
        """Raise Invalid if the flavor asks for PCI devices that no alias names, or the image contradicts it."""
        device_requests(GuestProperties(flavor, image), self._aliases)

    def check_properties(self, image: ImageMeta, flavor: Flavor) -> None:
        """Raise Invalid if the image has a property that would have no effect, or that contradicts the flavor's."""
        extra_specs.check(flavor, image)
        for name, value in image.properties.items():
            if name in _IMAGE and asks(value):
                raise _refusal(f"The property {name} of image {image.id}", _IMAGE[name])
        if image.properties.get("os_command_line") and not image.properties.get("kernel_id"):
            raise Invalid(
                f"The property os_command_line of image {image.id} has no effect, because it has no kernel_id: give it "
                "both, or none."
            )
        self._report(image.id, without_effect(None, image))

    def _report(self, id: str, remarks: Sequence[str]) -> None:
        """Log what has no effect, once for each flavor or image."""
        if not remarks or (id, *remarks) in self._reported:
            return
        if len(self._reported) >= _MOST_REPORTED:
            self._reported.clear()
        self._reported.add((id, *remarks))
        for each in remarks:
            log.warning("%s", each)


def without_effect(flavor: Flavor | None, image: ImageMeta | None) -> list[str]:
    """Return a sentence for each extra spec and property that is accepted, and that nothing on this cloud honours."""
    found = []
    if flavor is not None:
        unknown = sorted(filter(extra_spec_rules.is_unknown, flavor.extra_specs))
        found += [f"The extra spec {_shown(name)} of flavor {_shown(flavor.name)}" for name in unknown[:_MOST_NAMES]]
    if image is not None:
        unknown = sorted(name for name in image.properties if _OF_NOVA.fullmatch(name) and not _is_read(name))
        found += [f"The property {_shown(name)} of image {image.id}" for name in unknown[:_MOST_NAMES]]
    return [f"{each} has no effect: nothing on this cloud honours it." for each in found]


def _is_read(name: str) -> bool:
    return name in _DESCRIBES or name in _IMAGE or is_checked(name)


def _shown(name: str) -> str:
    return cut_text(name, 64)


def _refusal(what: str, lacking: str) -> Invalid:
    return Invalid(f"{what} is not supported: this cloud does not offer {lacking}. Choose another one.")
