"""What is asked before the filters, whichever are enabled: traits, formats of images, and aggregates of projects.

Nova asks Placement for these. They hold for a host that an administrator names, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from micronova.objects.scheduling import RequestSpec
from micronova.placement import extra_specs
from micronova.scheduler.host_table import Aggregates, Bools, HostView

ASKED_BEFORE: Final = {
    "Traits": "has the required traits and none that is forbidden",
    "TenantAggregates": "is in an aggregate of the project",
    "ResourceGroups": "has what the groups of resources of the flavor ask for",
}
"""What a host is or has that passes, for users."""

TENANT = "filter_tenant_id"  # how the metadata keys of aggregates begin that name a project


@dataclass(frozen=True, slots=True)
class Prefilters:
    """Which of them are turned on; traits always are."""

    image_types: bool = False
    tenants: bool = False
    tenants_need_aggregates: bool = False

    def verdicts(self, hosts: HostView, spec: RequestSpec) -> Iterator[tuple[str, Bools]]:
        """Yield the name and the mask of each that concerns a request."""
        required, forbidden = extra_specs.traits(spec.flavor, spec.image)
        if self.image_types and spec.image is not None and spec.image.disk_format:
            required |= {f"COMPUTE_IMAGE_TYPE_{spec.image.disk_format.upper()}"}
        if required or forbidden:
            key = ("traits", required, forbidden)
            yield (
                "Traits",
                hosts.by_facts(key, lambda facts: required <= facts.traits and not forbidden & facts.traits),
            )
        if self.tenants and (mask := self._of_tenant(hosts, spec.project_id)) is not None:
            yield "TenantAggregates", mask

    def _of_tenant(self, hosts: HostView, project: str) -> Bools | None:
        """Return the hosts of aggregates that name the project; None if there are none and none are needed."""
        mask = hosts.by_aggregates(("tenant", project), lambda aggregates: _name(aggregates, project))
        return mask if self.tenants_need_aggregates or mask.any() else None


def _name(aggregates: Aggregates, project: str) -> bool:
    """Return whether one of the aggregates names a project."""
    return any(
        key.startswith(TENANT) and value == project for _, metadata in aggregates for key, value in metadata.items()
    )


ONLY_TRAITS = Prefilters()
