"""Prefilters: what Nova asks Placement for. They apply whichever filters are enabled, also to a host that is forced.

- The host is neither disabled nor forced down.
- One server may have as much of each resource class as the request asks for (`max_unit`).
- The host has the required traits, and none that is forbidden. By the settings, the format and the properties of the
  image require traits, too.
- By the settings, hosts of aggregates that name projects are for these projects, and hosts of aggregates with traits
  are for servers that require these traits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from micronova.conf.control import SchedulerSettings
from micronova.objects.explanation import MAX_UNIT
from micronova.objects.guest_properties import GuestProperties, image_property
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import RequestSpec
from micronova.placement import extra_specs
from micronova.scheduler.aggregate_metadata import names_project
from micronova.scheduler.filters.resources import large_enough
from micronova.scheduler.host_columns import Aggregates, Bools
from micronova.scheduler.host_view import HostView
from micronova.scheduler.no_valid_host import has_traits

ISOLATED: Final = "trait:"  # how the metadata keys of aggregates begin that keep others out
_PROPERTIES: Final = {
    "hw_cdrom_bus": "COMPUTE_STORAGE_BUS",
    "hw_disk_bus": "COMPUTE_STORAGE_BUS",
    "hw_video_model": "COMPUTE_GRAPHICS_MODEL",
    "hw_vif_model": "COMPUTE_NET_VIF_MODEL",
}


class PrefilterMask(NamedTuple):
    """Which hosts pass a prefilter."""

    name: str
    predicate: str  # of hosts that pass; users read "no host …"
    mask: Bools
    lack: str = "do not meet the request"  # of hosts that it removes; users read "3 hosts …"

    def describe(self) -> str:
        """Return what a host that passes is or has."""
        return self.predicate


@dataclass(frozen=True, slots=True)
class Prefilters:
    """Which of those that follow from settings are turned on; the others always are."""

    image_types: bool = False
    tenants: bool = False
    tenants_need_aggregates: bool = False
    image_properties: bool = False
    isolated_aggregates: bool = False

    @classmethod
    def of(cls, settings: SchedulerSettings) -> "Prefilters":
        """Return the prefilters with those that the settings turn on."""
        return cls(
            image_types=settings.query_placement_for_image_type_support,
            tenants=settings.limit_tenants_to_placement_aggregate,
            tenants_need_aggregates=settings.placement_aggregate_required_for_tenants,
            image_properties=settings.image_metadata_prefilter,
            isolated_aggregates=settings.enable_isolated_aggregate_filtering,
        )

    def masks(self, hosts: HostView, spec: RequestSpec) -> Iterator[PrefilterMask]:
        """Yield the masks of those that concern a request."""
        if not spec.ignore_status:
            enabled, down = hosts.column("enabled"), hosts.column("forced_down")
            if not enabled.all():
                yield PrefilterMask("ComputeStatus", "is enabled", enabled, "are disabled")
            if down.any():
                yield PrefilterMask("ForcedDown", "is up", np.logical_not(down), "are down")
        for name, amount in extra_specs.node_resources(spec.flavor, spec.image).items():
            if (mask := hosts.may_give(name, amount)) is not None:
                yield PrefilterMask(MAX_UNIT.format(name), large_enough(name, amount), mask, "are too small")
        required, forbidden = extra_specs.node_traits(spec.flavor, spec.image)
        # A volume has no format that a host would have to read.
        if self.image_types and not spec.flavor.root_on_volume and spec.image is not None and spec.image.disk_format:
            required |= {f"COMPUTE_IMAGE_TYPE_{spec.image.disk_format.upper()}"}
        if self.image_properties and spec.image is not None:
            required |= _traits_of_properties(spec, spec.image)
        if required or forbidden:
            yield _with_traits(hosts, required, forbidden)
        if self.tenants and (mask := self._of_tenant(hosts, spec)) is not None:
            yield PrefilterMask(
                "TenantAggregates", "is in an aggregate of the project", mask, "are not open to this project"
            )
        if self.isolated_aggregates:
            asked = extra_specs.all_required_traits(spec.flavor, spec.image, spec.ports)
            yield PrefilterMask(
                "IsolatedAggregates",
                "is free of aggregates that are kept for other traits",
                hosts.by_aggregates(("isolated", asked), lambda aggregates: _kept_for(aggregates) <= asked),
                "are kept for servers with other traits",
            )

    def masks_of_rebuild(self, hosts: HostView, spec: RequestSpec) -> Iterator[PrefilterMask]:
        """Yield the masks of what the new image of a server asks for. The server stays, whatever else its host became.

        Nova asks Placement for nothing then, and compares the traits of the image.
        """
        required, forbidden = extra_specs.node_traits_of_image(spec.flavor, spec.image)
        if required or forbidden:
            yield _with_traits(hosts, required, forbidden)

    def _of_tenant(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        """Return the hosts of aggregates that name the project; None if no aggregate does and none is needed.

        Whether an aggregate names the project is asked of all aggregates: one without hosts closes the others, too.
        """
        if not self.tenants_need_aggregates and not spec.has_aggregates:
            return None
        project = spec.project_id
        return hosts.by_aggregates(("tenant", project), lambda aggregates: _any_names(aggregates, project))


def _with_traits(hosts: HostView, required: frozenset[str], forbidden: frozenset[str]) -> PrefilterMask:
    key = ("traits", required, forbidden)
    return PrefilterMask(
        "Traits",
        has_traits(required, forbidden),
        hosts.by_facts(key, lambda facts: required <= facts.traits and not forbidden & facts.traits),
        "have other traits",
    )


def _any_names(aggregates: Aggregates, project: str) -> bool:
    return any(names_project(metadata, project) for _, metadata in aggregates)


def _kept_for(aggregates: Aggregates) -> set[str]:
    """Return the traits that servers have to require on hosts of these aggregates."""
    return {
        key.removeprefix(ISOLATED)
        for _, metadata in aggregates
        for key, value in metadata.items()
        if key.startswith(ISOLATED) and value == "required"
    }


def _traits_of_properties(spec: RequestSpec, image: ImageMeta) -> frozenset[str]:
    """Return the traits of hosts that offer what the properties of an image name."""
    named = [(prefix, image_property(image.properties, name)) for name, prefix in _PROPERTIES.items()]
    named.append(("HW_ARCH", GuestProperties(spec.flavor, image).architecture()))  # it has several names
    return frozenset(f"{prefix}_{value.replace('-', '_').upper()}" for prefix, value in named if value)


DEFAULT_PREFILTERS = Prefilters()
