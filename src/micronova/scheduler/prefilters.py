"""Prefilters: required traits (also for the format of the image) and aggregates of projects.

They apply whichever filters are enabled, also to a host that an administrator forces. Nova asks Placement for these.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from micronova.objects.scheduling import RequestSpec
from micronova.placement import extra_specs
from micronova.scheduler.host_table import Aggregates, Bools, HostView

TENANT: Final = "filter_tenant_id"  # how the metadata keys of aggregates begin that name a project


class PrefilterMask(NamedTuple):
    """Which hosts pass a prefilter."""

    name: str
    predicate: str  # of hosts that pass; users read "no host …"
    mask: Bools

    def describe(self) -> str:
        """Return what a host that passes is or has."""
        return self.predicate


@dataclass(frozen=True, slots=True)
class Prefilters:
    """Which of them are turned on; traits always are."""

    image_types: bool = False
    tenants: bool = False
    tenants_need_aggregates: bool = False

    def masks(self, hosts: HostView, spec: RequestSpec) -> Iterator[PrefilterMask]:
        """Yield the masks of those that concern a request."""
        required, forbidden = extra_specs.node_traits(spec.flavor, spec.image)
        if self.image_types and spec.image is not None and spec.image.disk_format:
            required |= {f"COMPUTE_IMAGE_TYPE_{spec.image.disk_format.upper()}"}
        if required or forbidden:
            key = ("traits", required, forbidden)
            yield PrefilterMask(
                "Traits",
                "has the required traits and none that is forbidden",
                hosts.by_facts(key, lambda facts: required <= facts.traits and not forbidden & facts.traits),
            )
        if self.tenants and (mask := self._of_tenant(hosts, spec)) is not None:
            yield PrefilterMask("TenantAggregates", "is in an aggregate of the project", mask)

    def _of_tenant(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        """Return the hosts of aggregates that name the project; None if no aggregate does and none is needed.

        The aggregates decide, and not the hosts: those of the project may have none now, or not the one asked for.
        """
        if not self.tenants_need_aggregates and not spec.has_aggregates:
            return None
        project = spec.project_id
        return hosts.by_aggregates(("tenant", project), lambda aggregates: _name(aggregates, project))


def _name(aggregates: Aggregates, project: str) -> bool:
    return any(names_project(metadata, project) for _, metadata in aggregates)


def names_project(metadata: Mapping[str, str], project: str) -> bool:
    """Return whether an aggregate with this metadata names a project."""
    return any(key.startswith(TENANT) and value == project for key, value in metadata.items())


ONLY_TRAITS = Prefilters()
