"""What a request, a flavor or an image may ask for and this cloud does not do: refused, never ignored.

Create, resize and rebuild refuse it. What Nova accepts without any effect is accepted, and reported in the log and in
dry runs (`without_effect.py`): misspelt names, extra specs and hints that no enabled filter honours.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Final

from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.objects.guest_properties import UNSUPPORTED_HARDWARE, GuestProperties, asks
from micronova.objects.image import ImageMeta
from micronova.objects.image_properties import canonical_name
from micronova.objects.pci_devices import Alias, device_requests
from micronova.objects.scheduling import GROUP_HINT
from micronova.placement import extra_specs
from micronova.servers import extra_spec_rules
from micronova.servers.honoured import GetHonoured
from micronova.servers.without_effect import (
    REFUSED_PROPERTIES,
    hints_without_effect,
    metadata_without_effect,
    nodes_without_effect,
    without_effect,
)

log = logging.getLogger(__name__)


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
_MOST_REPORTED: Final = 1000  # flavors, images and hints that are not reported again


class Unsupported:
    """Refuses what the drivers and the enabled filters do not do."""

    def __init__(self, honoured: GetHonoured, aliases: Mapping[str, Alias] | None = None) -> None:
        self._honoured = honoured
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
            self._report("hints", hints_without_effect(hints, self._honoured))

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
        self._report(flavor.id, without_effect(flavor, None, self._honoured))

    def check_devices(self, flavor: Flavor, image: ImageMeta | None) -> None:
        """Raise Invalid if the flavor asks for PCI devices that no alias names, or the image contradicts it.

        Report NUMA nodes that the server does not get.
        """
        device_requests(GuestProperties(flavor, image), self._aliases)
        self._report(flavor.id, nodes_without_effect(flavor, image))

    def check_properties(self, image: ImageMeta, flavor: Flavor) -> None:
        """Raise Invalid if the image has a property that would have no effect, or that contradicts the flavor's."""
        extra_specs.check(flavor, image)
        for name, value in image.properties.items():
            lacking = REFUSED_PROPERTIES.get(canonical_name(name))
            if lacking is not None and asks(value):
                raise _refusal(f"The property {name} of image {image.id}", lacking)
        if image.properties.get("os_command_line") and not image.properties.get("kernel_id"):
            raise Invalid(
                f"The property os_command_line of image {image.id} has no effect, because it has no kernel_id: give it "
                "both, or none."
            )
        self._report(image.id, without_effect(None, image, self._honoured))

    def remarks(self, flavor: Flavor, image: ImageMeta | None, hints: Mapping[str, Sequence[str]]) -> list[str]:
        """Return a sentence for each part of a request that has no effect."""
        return [
            *without_effect(flavor, image, self._honoured),
            *nodes_without_effect(flavor, image),
            *hints_without_effect(hints, self._honoured),
        ]

    def remarks_of_aggregate(self, name: str, metadata: Mapping[str, str], ratios: Mapping[str, float]) -> list[str]:
        """Return a sentence for each metadata of an aggregate that has no effect; see `metadata_without_effect`."""
        return metadata_without_effect(name, metadata, ratios, self._honoured)

    def _report(self, id: str, remarks: Sequence[str]) -> None:
        """Log what has no effect, once for each flavor, image or hint."""
        if not remarks or (id, *remarks) in self._reported:
            return
        if len(self._reported) >= _MOST_REPORTED:
            self._reported.clear()
        self._reported.add((id, *remarks))
        for each in remarks:
            log.warning("%s", each)


def _refusal(what: str, lacking: str) -> Invalid:
    return Invalid(f"{what} is not supported: this cloud does not offer {lacking}. Choose another one.")
