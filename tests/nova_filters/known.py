"""Differences from Nova's filters and weighers that are meant, with their reasons; docs/nova-filters.md lists them."""

import json
import re
from typing import Any

from micronova.objects.image_properties import canonical_properties
from tests.nova_filters.cases import Case
from tests.nova_numa.known import CACHES
from tests.unit.scheduler.fitting_oracle import amounts

_GLUED = re.compile(r"(<all-in>|<or>|<in>|s==|s!=|s>=|s<=|s>|s<|==|!=|>=|<=|=)\S")


def reason_for_verdict(
    case: Case, name: str, position: int, ours: bool, nova: bool | str, without_caches: bool | str
) -> str:
    """Return why a verdict on a host differs, "" if there is no reason.

    `without_caches` is that of Nova's NUMATopologyFilter if it forgets which cells it has tried.
    """
    specs = case.spec.flavor.extra_specs
    if isinstance(nova, str):
        if name in ("AggregateInstanceExtraSpecsFilter", "ComputeCapabilitiesFilter") and "could not convert" in nova:
            return "Nova's filter fails on a number that is none; here it does not match"
        if name == "NUMATopologyFilter" and case.spec.image is None:
            return "Nova's filter fails without an image; in Nova every request has one"
        return ""
    if name in ("AggregateInstanceExtraSpecsFilter", "ComputeCapabilitiesFilter"):
        if any(_GLUED.match(text) for key, text in specs.items() if _reads(name, key)):
            return "an operator without a space is an operator here"
        if name == "ComputeCapabilitiesFilter" and "<all-in>" in specs.get("capabilities:cpu_info:features", ""):
            return "<all-in> looks for elements of a list, in Nova for parts of its text"
    if name == "NUMATopologyFilter":
        host = case.hosts[position]
        needed = amounts(case.spec.flavor, None)
        if nova and any(host.capacity.get(each, 0) - host.used.get(each, 0) < needed[each] for each in needed):
            return "in Nova only Placement counts amounts, which the host has too little of"
        if nova != without_caches and ours == without_caches:
            return CACHES
    if name == "ImagePropertiesFilter" and nova and _asks_only_for_a_version(case):
        return "Nova ignores the version of the hypervisor if the image names nothing else"
    if name == "ImagePropertiesFilter" and nova and _is_a_mode_there(case, position):
        return "Nova looks for a type of hypervisor among modes of machines, too: xen is both"
    if name == "JsonFilter" and _negated_within(json.loads(case.spec.hints["query"][0])):
        return "not within another operator is always true in Nova"
    if name == "AggregateImagePropertiesIsolation" and "own_colour" in (
        case.spec.image.properties if case.spec.image else {}
    ):
        return "Nova compares only properties that it knows"
    return ""


def _reads(name: str, key: str) -> bool:
    namespace, colon, _ = key.partition(":")
    own = "capabilities" if name == "ComputeCapabilitiesFilter" else "aggregate_instance_extra_specs"
    return not colon or namespace == own


def _asks_only_for_a_version(case: Case) -> bool:
    default = case.settings.image_properties_default_architecture
    return not default and not {"hw_architecture", "img_hv_type", "hw_vm_mode"} & _properties(case).keys()


def _is_a_mode_there(case: Case, position: int) -> bool:
    wanted = _properties(case).get("img_hv_type")
    return any(wanted == mode != hypervisor for _, hypervisor, mode in case.hosts[position].supported)


def _properties(case: Case) -> dict[str, str]:
    return canonical_properties(case.spec.image.properties) if case.spec.image else {}


def _negated_within(query: Any) -> bool:
    return isinstance(query, list) and any(
        isinstance(each, list) and (each[0] == "not" or _negated_within(each)) for each in query[1:]
    )


def reason_for_weights(case: Case, name: str, nova: list[float] | str) -> str:
    """Return why the weights of a weigher differ, "" if there is no reason."""
    if name == "MetricsWeigher" and isinstance(nova, str) and "ComputeHostMetricNotFound" in nova:
        return "Nova's weigher fails without a required metric; here MetricsFilter removes such hosts"
    if name == "ImagePropertiesWeigher" and case.spec.image and "own_colour" in case.spec.image.properties:
        return "Nova compares only properties that it knows"
    return ""
