"""Filters that keep flavors, images and projects to the hosts of aggregates."""

from collections.abc import Mapping, Sequence

from micronova.objects.image_properties import canonical_name, canonical_properties, is_off
from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.aggregate_metadata import PROJECT_KEY, values_of
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.filters.operators import Requirement, check_requirements, key_in
from micronova.scheduler.host_columns import Aggregates, Bools
from micronova.scheduler.host_view import HostView

_NAMESPACE = "aggregate_instance_extra_specs"


class AggregateInstanceExtraSpecsFilter(HostFilter):
    """Passes hosts whose aggregates have each extra spec of the namespace `aggregate_instance_extra_specs`.

    Extra specs without a namespace count, including those that are meant for another filter or program.
    """

    name = "AggregateInstanceExtraSpecsFilter"
    predicate = "is in an aggregate that the extra specs of the flavor ask for"
    lack = "are in other aggregates"
    scope = Scope.REQUEST
    extra_specs = frozenset({_NAMESPACE})

    def check(self, hints: Mapping[str, Sequence[str]], extra_specs: Mapping[str, str]) -> None:
        check_requirements(extra_specs, _NAMESPACE)

    def reads_extra_spec(self, name: str) -> bool:
        return key_in(_NAMESPACE, name) is not None

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        specs = spec.flavor.extra_specs.items()
        wanted = tuple((key, text) for name, text in specs if (key := key_in(_NAMESPACE, name)) is not None)
        if not wanted:
            return None
        return hosts.by_aggregates((self.name, *wanted), lambda aggregates: _has_all(aggregates, wanted))


def _has_all(aggregates: Aggregates, wanted: tuple[tuple[str, str], ...]) -> bool:
    return all(any(map(Requirement(text).match, values_of(aggregates, key))) for key, text in wanted)


class AggregateImagePropertiesIsolation(HostFilter):
    """Removes hosts with an aggregate that has a property of the image with another value.

    Compared are newest names and canonical values, as in Nova. A flag that is off and a number that is 0 ask for
    nothing. With a namespace in the settings, only keys of the metadata count that begin with it and the separator.
    """

    name = "AggregateImagePropertiesIsolation"
    predicate = "takes images with these properties"
    lack = "do not take the image"
    scope = Scope.REQUEST
    compares_images = True

    @property
    def _prefix(self) -> str:
        settings = self.options.settings
        namespace = settings.aggregate_image_properties_isolation_namespace
        return namespace + settings.aggregate_image_properties_isolation_separator if namespace else ""

    def reads_property(self, name: str) -> bool:
        return canonical_name(name).startswith(self._prefix)

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        prefix = self._prefix
        properties = tuple(
            (name, value)
            for name, value in canonical_properties(spec.image.properties if spec.image else {}).items()
            if not is_off(name, value) and name.startswith(prefix)
        )
        if not properties:
            return None
        return hosts.by_aggregates((self.name, *properties), lambda aggregates: _allows(aggregates, properties))


def _allows(aggregates: Aggregates, properties: tuple[tuple[str, str], ...]) -> bool:
    for name, value in properties:
        values = values_of(aggregates, name)
        if values and value not in values:
            return False
    return True


class AggregateMultiTenancyIsolation(HostFilter):
    """Removes hosts of aggregates that are for other projects: `filter_tenant_id…` in their metadata lists projects."""

    name = "AggregateMultiTenancyIsolation"
    predicate = "is open to this project"
    lack = "are not open to this project"
    scope = Scope.REQUEST

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        project = spec.project_id
        return hosts.by_aggregates((self.name, project), lambda aggregates: _admits(aggregates, project))


def _admits(aggregates: Aggregates, project: str) -> bool:
    keys = {key for _, metadata in aggregates for key in metadata if key.startswith(PROJECT_KEY)}
    projects = frozenset[str]().union(*(values_of(aggregates, key) for key in keys))
    return not projects or project in projects


class AggregateTypeAffinityFilter(HostFilter):
    """Removes hosts of aggregates that are for other flavors: `instance_type` in their metadata lists names of them."""

    name = "AggregateTypeAffinityFilter"
    predicate = "takes this flavor"
    lack = "do not take the flavor"
    scope = Scope.REQUEST

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        flavor = spec.flavor.name
        return hosts.by_aggregates((self.name, flavor), lambda aggregates: _takes(aggregates, flavor))


def _takes(aggregates: Aggregates, flavor: str) -> bool:
    flavors = values_of(aggregates, "instance_type")
    return not flavors or flavor in flavors
