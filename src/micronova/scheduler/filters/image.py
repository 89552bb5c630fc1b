"""ImagePropertiesFilter: compares what an image needs with what hosts can run."""

from collections.abc import Mapping
from typing import Any

from micronova.objects.guest_properties import canonical_architecture
from micronova.objects.image_properties import canonical_hypervisor, canonical_mode
from micronova.objects.scheduling import RequestSpec
from micronova.objects.version_predicates import version_fulfils
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.host_columns import Bools, Facts
from micronova.scheduler.host_view import HostView

_READ = frozenset(
    "architecture hw_architecture hw_vm_mode hypervisor_type hypervisor_version_requires img_hv_requested_version "
    "img_hv_type vm_mode".split()
)


class ImagePropertiesFilter(HostFilter):
    """Passes hosts that can run the image's architecture, hypervisor type and version, and machine mode."""

    name = "ImagePropertiesFilter"
    predicate = "can run images with these properties"
    lack = "cannot run the image"
    scope = Scope.REQUEST
    compares_images = True

    def reads_property(self, name: str) -> bool:
        return name in _READ

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        wanted = _wanted(
            spec.image.properties if spec.image else {}, self.options.settings.image_properties_default_architecture
        )
        if not any(wanted):
            return None
        return hosts.by_facts((self.name, *wanted), lambda host: _can_run(host, *wanted))


def _wanted(properties: Mapping[str, Any], default_architecture: str) -> tuple[str, str, str, str]:
    def look(name: str, old_name: str) -> str:
        value = properties.get(name)
        if value is None:
            value = properties.get(old_name)
        return "" if value is None else str(value).strip()

    return (
        canonical_architecture(look("hw_architecture", "architecture") or default_architecture),
        canonical_hypervisor(look("img_hv_type", "hypervisor_type")),
        canonical_mode(look("hw_vm_mode", "vm_mode")),
        look("img_hv_requested_version", "hypervisor_version_requires"),
    )


def _can_run(host: Facts, architecture: str, hypervisor: str, mode: str, version: str) -> bool:
    if (architecture or hypervisor or mode) and not any(
        architecture in ("", canonical_architecture(an_architecture))
        and hypervisor in ("", canonical_hypervisor(a_hypervisor))
        and mode in ("", canonical_mode(a_mode))
        for an_architecture, a_hypervisor, a_mode in host.supported
    ):
        return False
    # A host with an unknown version passes.
    return not version or not host.hypervisor_version or version_fulfils(host.hypervisor_version, version)
