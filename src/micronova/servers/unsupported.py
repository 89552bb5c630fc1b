"""What a request, a flavor or an image may ask for and this cloud does not do: refused, never ignored.

Create, resize and rebuild refuse it.

Enabled filters of the scheduler may honour scheduler hints and namespaces of extra specs (`Honoured`). Extra specs
without a namespace are not refused, because they may belong to a filter or to another program.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.objects.guest_properties import GuestProperties
from micronova.objects.image import ImageMeta
from micronova.objects.pci_devices import Alias, device_requests
from micronova.placement import extra_specs


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

_ENCRYPTED_DISKS: Final = "encrypted local disks"
_ENCRYPTED_MEMORY: Final = "encrypted memory"
_REALTIME: Final = "real-time CPUs"
_TPM: Final = "a TPM"
_VIF_LIMITS: Final = "limits of interfaces in a flavor (use a QoS policy of the network service)"
_RESERVATIONS: Final = "reservations, limits and shares of VMware"
_USB: Final = "a choice of USB controllers"

# Hardware that a flavor (`hw:NAME`) or an image (`hw_NAME`) may ask for.
_HARDWARE: Final = {
    "cpu_realtime": _REALTIME,
    "cpu_realtime_mask": _REALTIME,
    "ephemeral_encryption": _ENCRYPTED_DISKS,
    "ephemeral_encryption_format": _ENCRYPTED_DISKS,
    "ephemeral_encryption_secret_uuid": _ENCRYPTED_DISKS,
    "locked_memory": "locked memory",
    "maxphysaddr_bits": "a choice of physical address bits",
    "maxphysaddr_mode": "a choice of physical address bits",
    "mem_encryption": _ENCRYPTED_MEMORY,
    "mem_encryption_model": _ENCRYPTED_MEMORY,
    "pmem": "persistent memory",
    "redirected_usb_ports": "redirected USB ports",
    "sound_model": "sound devices",
    "tpm_model": _TPM,
    "tpm_secret_security": _TPM,
    "tpm_version": _TPM,
    "usb_model": _USB,
    "viommu_model": "an IOMMU in the guest",
    "virtio_packed_ring": "packed virtio rings",
}
_FLAVOR: Final = {
    **{f"hw:{name}": what for name, what in _HARDWARE.items()},
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
    **{f"hw_{name}": what for name, what in _HARDWARE.items()},
    "block_device_mapping": "block devices in an image",
    "cinder_encryption_key_id": "encrypted images",
    "hw_emulation_architecture": "emulation of another architecture",
    "hw_firmware_stateless": "stateless firmware",
    "hw_ipxe_boot": "a boot over the network",
}
_OFF: Final = frozenset({"", "0", "[]", "disabled", "f", "false", "n", "no", "none", "off"})


class Unsupported:
    """Refuses what the drivers and the enabled filters do not do."""

    def __init__(self, honoured: Callable[[], Honoured], aliases: Mapping[str, Alias] | None = None) -> None:
        self._honoured = honoured  # called when a request first depends on it
        self._aliases = aliases or {}  # of PCI devices

    def check_hints(self, hints: Mapping[str, Sequence[str]]) -> None:
        """Raise Invalid if a request has hints without a filter, or malformed ones."""
        for hint in sorted(_HINTS.keys() & hints.keys()):
            if hint not in self._honoured().hints:
                raise Invalid(
                    f"The scheduler hint {hint} is not supported: no enabled filter honours it "
                    f"(in Nova {_HINTS[hint]} does). Remove it from the request."
                )
        if _HINTS.keys() & hints.keys():
            for check in self._honoured().checks:
                check(hints, {})

    def check_flavor(self, flavor: Flavor) -> None:
        """Raise Invalid if the flavor has an extra spec that would have no effect."""
        extra_specs.check(flavor)
        for name, value in flavor.extra_specs.items():
            namespace, colon, _ = name.partition(":")
            granular = _GRANULAR.fullmatch(namespace)
            kind = granular[1] if granular else namespace
            if granular and colon:
                continue  # the scheduler itself honours resources and traits
            if colon and kind in _NAMESPACES and kind not in self._honoured().extra_specs:
                raise _refusal(f"The extra spec {name} of flavor {flavor.name}", _NAMESPACES[kind])
            if name in _FLAVOR and _asks(value):
                raise _refusal(f"The extra spec {name} of flavor {flavor.name}", _FLAVOR[name])
        if any(name.partition(":")[0] in _NAMESPACES for name in flavor.extra_specs):
            for check in self._honoured().checks:
                check({}, flavor.extra_specs)

    def check_devices(self, flavor: Flavor, image: ImageMeta | None) -> None:
        """Raise Invalid if the flavor asks for PCI devices that no alias names, or the image contradicts it."""
        device_requests(GuestProperties(flavor, image), self._aliases)

    def check_properties(self, image: ImageMeta, flavor: Flavor) -> None:
        """Raise Invalid if the image has a property that would have no effect, or that contradicts the flavor's."""
        extra_specs.check(flavor, image)
        for name, value in image.properties.items():
            if name in _IMAGE and _asks(value):
                raise _refusal(f"The property {name} of image {image.id}", _IMAGE[name])
        if image.properties.get("os_command_line") and not image.properties.get("kernel_id"):
            raise Invalid(
                f"The property os_command_line of image {image.id} has no effect, because it has no kernel_id: give it "
                "both, or none."
            )


def _asks(value: Any) -> bool:
    """Return whether a value asks for something."""
    return value is not None and str(value).strip().lower() not in _OFF


def _refusal(what: str, lacking: str) -> Invalid:
    return Invalid(f"{what} is not supported: this cloud does not offer {lacking}. Choose another one.")
