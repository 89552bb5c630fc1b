"""Single filters: requirements on capabilities and images, and how filters are found."""

import json
import logging
import random
import sys
from importlib import metadata
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from micronova.objects.errors import Invalid, NoValidHost
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import HostState, RequestSpec
from micronova.objects.version_predicates import version_fulfils
from micronova.scheduler.filter_scheduler import FilterScheduler
from micronova.scheduler.filters.aggregates import AggregateImagePropertiesIsolation
from micronova.scheduler.filters.attributes import TEXTS
from micronova.scheduler.filters.base import Compared, EachHost, FilterOptions, HostFilter, Scope
from micronova.scheduler.filters.capabilities import ComputeCapabilitiesFilter
from micronova.scheduler.filters.image import ImagePropertiesFilter
from micronova.scheduler.filters.operators import Requirement, key_in
from micronova.scheduler.filters.registry import BUILT_IN, load_filters
from micronova.scheduler.host_columns import Bools
from micronova.scheduler.host_view import HostView
from tests.unit.scheduler.factory import NOW, OPTIONS, a_flavor, a_host, a_scheduler, a_spec, a_table


@pytest.mark.parametrize(
    ("value", "requirement", "expected"),
    [
        ("123", "123", True),
        ("1234", "123", False),
        ("5", ">= 5", True),
        ("4", ">=5", False),
        ("12", "= 11", True),  # at least
        ("11", "= 12", False),
        ("12", "== 12.0", True),
        ("13", "!= 12", True),
        ("3", "<= 2", False),
        ("many", ">= 2", False),
        ("2", ">= many", False),
        ("2.1.0", "s== 2.1.0", True),
        ("2.1.1", "s!= 2.1.0", True),
        ("b", "s>= a", True),
        ("b", "s> b", False),
        ("b", "s<= b", True),
        ("b", "s< b", False),
        ("I am gcc 9", "<in> gcc", True),
        ("clang", "<in> gcc", False),
        (["aes", "avx"], "<in> aes", True),
        (["aes", "avx", "mmx"], "<all-in> aes mmx", True),
        (["aes"], "<all-in> aes mmx", False),
        ("aes mmx", "<all-in> aes mmx", True),
        ("gpu", "<or> fpu <or> gpu", True),
        ("gp", "<or> fpu <or> gpu", False),
    ],
)
def test_requirement(value: object, requirement: str, expected: bool) -> None:
    assert Requirement(requirement).match(value) is expected


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=12),
    st.sampled_from(["= ", "==", "!= ", ">=", "<= ", "s== ", "s>", "<in> ", "<or> 3 <or> ", ""]),
    st.integers(0, 20),
)
def test_a_column_is_judged_as_its_values(values: list[int], operator: str, operand: int) -> None:
    import numpy as np

    requirement = Requirement(f"{operator}{operand}")
    assert requirement.match_column(np.array(values, float)).tolist() == [requirement.match(v) for v in values]


def test_a_ratio_is_no_whole_number() -> None:
    """As text it is what Nova shows of it."""
    ratios = np.array([1.5, 16.0])
    assert Requirement("<or> 1 <or> 16").match_column(ratios, float).tolist() == [False, False]
    assert Requirement("<or> 1.5 <or> 16.0").match_column(ratios, float).tolist() == [True, True]


def test_namespace_of_extra_specs() -> None:
    assert key_in("capabilities", "capabilities:cpu_info:features") == "cpu_info:features"
    assert key_in("capabilities", "hypervisor_type") == "hypervisor_type"
    assert key_in("capabilities", "hw:cpu_policy") is None
    assert key_in("capabilities", "trait:HW_CPU") is None


def passing(each: type[HostFilter], spec: RequestSpec, *hosts: HostState) -> list[str] | None:
    view = a_table(*hosts).view()
    mask = Compared.of(each(OPTIONS).mask(view, spec)).mask
    return None if mask is None else [host.host for host, passes in zip(hosts, mask, strict=True) if passes]


HOSTS = (
    a_host("old", hypervisor_version=5_002_000, cpu_info={"features": ["aes"], "topology": {"cores": 4}}),
    a_host("new", cpu_info={"features": ["aes", "avx512"], "topology": {"cores": 16}}, num_instances=3),
    a_host("gpu", hypervisor_type="ironic", capabilities={"gpu": "A100", "numa:nodes": "2"}),
    a_host("full", used={"MEMORY_MB": 8000, "VCPU": 7}),
)


@pytest.mark.parametrize(
    ("extra_specs", "expected"),
    [
        ({}, None),
        ({"hw:cpu_policy": "dedicated"}, None),
        ({"capabilities:cpu_info:features": "<all-in> aes avx512"}, ["new"]),
        ({"capabilities:cpu_info:topology:cores": ">= 4"}, ["old", "new"]),
        ({"capabilities:cpu_info:topology:nothing:more": ">= 4"}, []),
        ({"capabilities:hypervisor_type": "s== QEMU"}, ["old", "new", "full"]),
        ({"hypervisor_type": "<or> ironic <or> xen"}, ["gpu"]),
        ({"capabilities:hypervisor_version": ">= 7000000"}, ["new", "gpu", "full"]),
        ({"capabilities:gpu": "A100"}, ["gpu"]),
        ({"gpu": "A100"}, ["old", "new", "gpu", "full"]),  # a host passes that does not know it, as in Nova
        ({"gpu": "H100"}, ["old", "new", "full"]),
        ({"colour": "blue"}, ["old", "new", "gpu", "full"]),
        ({"capabilities:numa:nodes": "2"}, ["gpu"]),
        ({"capabilities:free_ram_mb": ">= 4096"}, ["old", "new", "gpu"]),
        ({"capabilities:free_ram_mb": ">= 4096", "capabilities:cpu_info:topology:cores": ">= 8"}, ["new"]),
        ({"capabilities:free_disk_mb": "== 102400"}, ["old", "new", "gpu", "full"]),
        ({"capabilities:vcpus_used": "<= 6"}, ["old", "new", "gpu"]),
        ({"capabilities:vcpus_total": "= 8"}, ["old", "new", "gpu", "full"]),
        ({"capabilities:num_instances": "s== 3"}, ["new"]),
        ({"capabilities:host": "<in> u"}, ["gpu", "full"]),
    ],
)
def test_capabilities(extra_specs: dict[str, str], expected: list[str] | None) -> None:
    spec = a_spec(flavor=a_flavor(extra_specs=extra_specs))
    assert passing(ComputeCapabilitiesFilter, spec, *HOSTS) == expected


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({}, None),
        ({"os_distro": "debian"}, None),
        ({"hw_architecture": "amd64"}, ["kvm", "xen"]),
        ({"architecture": "aarch64"}, ["arm"]),
        ({"img_hv_type": "xapi"}, ["xen"]),
        ({"hw_vm_mode": "pv", "hw_architecture": "x86_64"}, ["xen"]),
        ({"hw_vm_mode": "hvm", "img_hv_type": "KVM"}, ["kvm", "arm"]),
        ({"img_hv_requested_version": ">=7.0, <8"}, ["kvm", "arm", "unknown"]),
        ({"hypervisor_version_requires": ">=4"}, ["kvm", "xen", "arm", "unknown"]),
        ({"hypervisor_version_requires": "rubbish"}, ["unknown"]),
    ],
)
def test_image_properties(properties: dict[str, Any], expected: list[str] | None) -> None:
    hosts = (
        a_host("kvm"),
        a_host("xen", supported=(("x86_64", "xen", "xen"),), hypervisor_version=4_017_000),
        a_host("arm", supported=(("aarch64", "kvm", "hvm"),)),
        a_host("unknown", supported=(), hypervisor_version=0),
    )
    spec = a_spec(image=ImageMeta(id="i", properties=properties))
    assert passing(ImagePropertiesFilter, spec, *hosts) == expected
    assert passing(ImagePropertiesFilter, a_spec(), *hosts) is None


@pytest.mark.parametrize(
    ("version", "predicates", "expected"),
    [
        (6_002_000, ">=6.0", True),
        (6_002_000, ">6.0, <6.2", False),
        (6_001_009, ">6.0, <6.2", True),
        (6_001_000, "!=6.1", False),
        (6_001_000, "6.1", False),  # Nova refuses it
        (6_001_000, ">= 6.1.0rc1", True),
        (6_001_000, "<6.1.0.dev3", False),
        (6_001_000, ">=6.1.post1", False),
        (6_001_000, "==v6.1", True),
        (6_001_000, "==6.1.0", True),
        (6_001_000, "~6.1", False),
    ],
)
def test_versions(version: int, predicates: str, expected: bool) -> None:
    assert version_fulfils(version, predicates) is expected


class OnlyH2(EachHost):
    """A filter as others may write it."""

    name = "OnlyH2"

    def passes(self, host: HostState, spec: RequestSpec) -> bool:
        return host.host == "h2" and host.num_instances < 2


class Broken(HostFilter):
    """A filter that fails when it is asked."""

    name = "Broken"

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        raise RuntimeError("out of order")


class Speechless(OnlyH2):
    """A filter that decides, and fails at all else."""

    name = "Speechless"
    asks_remaining = True

    def concerns(self, spec: RequestSpec) -> bool:
        raise RuntimeError("out of order")

    async def prepare(self, hosts: HostView, spec: RequestSpec) -> None:
        raise RuntimeError("out of order")

    def describe(self, spec: RequestSpec) -> str:
        raise RuntimeError("out of order")


class Unmakeable(OnlyH2):
    """A filter that cannot be made."""

    def __init__(self, options: FilterOptions) -> None:
        raise RuntimeError("no licence")


def with_filters(*names: str) -> FilterScheduler:
    scheduler = a_scheduler()
    return FilterScheduler(load_filters(OPTIONS, [*BUILT_IN, *names]), scheduler.weighers, random=scheduler._random)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str) -> list[metadata.EntryPoint]:
        values = {
            "OnlyH2": "OnlyH2",
            "Speechless": "Speechless",
            "Broken": "Broken",
            "Unmakeable": "Unmakeable",
            "Gone": "NoSuchName",
        }
        return [metadata.EntryPoint(name, f"{__name__}:{value}", group) for name, value in values.items()]

    monkeypatch.setattr(metadata, "entry_points", entry_points)


# What Nova 34 says of these.
@pytest.mark.parametrize(
    ("properties", "metadata", "expected"),
    [
        ({"architecture": "x86_64"}, {"hw_architecture": "aarch64"}, False),
        ({"hw_architecture": "amd64"}, {"hw_architecture": "x86_64"}, True),
        ({"hw_architecture": "x86_64"}, {"hw_architecture": "aarch64, x86_64"}, True),
        ({"hypervisor_type": "qemu"}, {"img_hv_type": "xen"}, False),
        ({"img_hv_type": "QEMU"}, {"img_hv_type": "qemu"}, True),
        ({"hw_vm_mode": "hv"}, {"hw_vm_mode": "hvm"}, True),
        ({"os_type": "Windows"}, {"os_type": "windows"}, True),
        ({"os_type": "Linux"}, {"os_type": "windows"}, False),
        ({"hw_vif_model": "VirtualE1000"}, {"hw_vif_model": "e1000"}, True),
        ({"hw_boot_menu": "yes"}, {"hw_boot_menu": "True"}, True),
        ({"hw_boot_menu": "true"}, {"hw_boot_menu": "true"}, False),
        ({"hw_boot_menu": "false"}, {"hw_boot_menu": "True"}, True),
        ({"hw_numa_nodes": "02"}, {"hw_numa_nodes": "2"}, True),
        ({"vmware_ostype": "windows"}, {"os_distro": "linux"}, False),
        ({"vmware_adaptertype": "ide"}, {"hw_disk_bus": "virtio"}, False),
        ({"trait:CUSTOM_X": "forbidden"}, {"trait:CUSTOM_X": "required"}, True),
        ({"vm_mode": "hvm"}, {"vm_mode": "xen"}, True),  # only newest names are compared
    ],
)
def test_images_are_compared_with_aggregates_by_canonical_properties(
    properties: dict[str, Any], metadata: dict[str, str], expected: bool
) -> None:
    hosts = a_table(a_host("h", aggregates=(("a", metadata),))).view()
    mask = AggregateImagePropertiesIsolation(OPTIONS).mask(
        hosts, a_spec(image=ImageMeta(id="i", properties=properties))
    )
    assert (True if mask is None else bool(mask[0])) is expected


@pytest.mark.usefixtures("plugins")
def test_a_plugin_is_asked_for_every_instance() -> None:
    scheduler = with_filters("OnlyH2")
    table = a_table(a_host("h1"), a_host("h2"), a_host("h3"))
    decision = scheduler.select(table, a_spec(), ["a", "b"], now=NOW)
    assert [each.selected.host for each in decision.destinations] == ["h2", "h2"]
    with pytest.raises(NoValidHost) as caught:
        scheduler.select(table, a_spec(), ["c"], now=NOW)
    refused = {"name": "OnlyH2", "removed": 3, "remaining": 0, "hosts": ("h1", "h2", "h3")}
    assert caught.value.details["reasons"][-1] == refused


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("name", ["Unmakeable", "Gone"])
def test_a_plugin_that_cannot_be_loaded_stops_the_scheduler(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(Invalid, match=f"filter {name} of a plugin cannot be loaded"):
        with_filters(name)
    assert name in caplog.text


@pytest.mark.usefixtures("plugins")
def test_a_plugin_that_fails_lets_no_host_pass(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = with_filters("Broken")
    with caplog.at_level(logging.ERROR), pytest.raises(NoValidHost) as caught:
        scheduler.select(a_table(a_host("h1")), a_spec(), ["i"], now=NOW)
    assert "no host is known to meet the request, because the filter Broken failed" in caught.value.message
    assert "out of order" not in caught.value.message  # for admins
    assert caught.value.details["reasons"][-1]["error"] == "RuntimeError: out of order"
    assert "Broken" in caplog.text


@pytest.mark.usefixtures("plugins")
async def test_a_plugin_that_fails_beside_its_decision_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """The request ended with the plugin's error, and not with that there is no host."""
    scheduler = with_filters("Speechless")
    table = a_table(a_host("h1"), a_host("h2"))
    with caplog.at_level(logging.ERROR):
        await scheduler.prepare(table, a_spec())
        assert scheduler.select(table, a_spec(), ["i"], now=NOW).destinations[0].selected.host == "h2"
        with pytest.raises(NoValidHost, match="no host meets all requirements of the request; 1 host does not meet"):
            scheduler.select(a_table(a_host("h1")), a_spec(), ["i"], now=NOW)
    assert caplog.text.count("the filter Speechless failed to") == 2


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.parametrize("fails", [OSError("no answer"), None])
def test_no_filter_that_fails_lets_hosts_pass(
    name: str, fails: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose answer is not a mask over the hosts."""

    def mask(self: HostFilter, hosts: HostView, spec: RequestSpec) -> Bools | None:
        if fails is not None:
            raise fails
        return np.ones(7, np.bool_)

    monkeypatch.setattr(BUILT_IN[name], "mask", mask)
    scheduler = FilterScheduler(load_filters(OPTIONS, [name]), [], random=random.Random(1))
    with pytest.raises(NoValidHost, match=f"because the filter {name} failed"):
        scheduler.select(a_table(a_host("h1")), a_spec(), ["i"], now=NOW)


class FailsLater(EachHost):
    """A filter that fails when the first server of a request has a host."""

    name = "FailsLater"
    scope = Scope.HOST

    def passes(self, host: HostState, spec: RequestSpec) -> bool:
        if host.num_instances:
            raise RuntimeError("out of order")
        return True


def test_a_filter_that_fails_between_two_servers_of_a_request_lets_no_host_pass() -> None:
    scheduler = FilterScheduler([FailsLater(OPTIONS)], [], random=random.Random(1))
    table = a_table(a_host("h1"))
    with pytest.raises(NoValidHost, match="because the filter FailsLater failed"):
        scheduler.select(table, a_spec(), ["a", "b"], now=NOW)


@pytest.mark.usefixtures("plugins")
def test_a_misspelt_filter_is_an_error() -> None:
    with pytest.raises(Invalid, match="RamFitler"):
        load_filters(OPTIONS, ["RamFitler"])


@pytest.mark.parametrize("first", ["$host", "$hypervisor_type", "$stats.zone", "$free_ram_mb"])
def test_a_comparison_runs_no_python_for_each_host(first: str) -> None:
    """Sixty names of hosts kept the scheduler busy for seconds in a large cloud."""
    hosts = 300
    table = a_table(*(a_host(f"h{number}", capabilities={"zone": f"z{number % 3}"}) for number in range(hosts)))
    json_filter = BUILT_IN["JsonFilter"](OPTIONS)

    def calls(operands: int) -> int:
        values = [10**30 + n for n in range(operands)] if "ram" in first else [f"name-{n}" for n in range(operands)]
        query = json.dumps(["in", first, *values[:-1], "$host" if first != "$free_ram_mb" else "$vcpus_total"])
        counted = 0

        def count(*_: object) -> None:
            nonlocal counted
            counted += 1

        sys.setprofile(count)
        try:
            json_filter.mask(table.view(), a_spec(hints={"query": [query]}))
        finally:
            sys.setprofile(None)
        return counted

    assert calls(60) - calls(2) < 58 * hosts / 2


def test_a_query_has_bounded_parts_and_looks_each_variable_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def hosts_of(hosts: HostView) -> list[str]:
        asked.append(len(hosts))
        return [each.host for each in hosts.selections()]

    monkeypatch.setitem(TEXTS, "host", hosts_of)
    json_filter, table = BUILT_IN["JsonFilter"](OPTIONS), a_table(a_host("h1"), a_host("h2"))
    longest = json.dumps(["in", "$host", *["$host"] * 61, "h2"])
    mask = Compared.of(json_filter.mask(table.view(), a_spec(hints={"query": [longest]}))).mask
    assert mask is not None and mask.all() and asked == [2]
    for longer in (["in", "$host", *["$host_ip"] * 542], ["in", "$host", *["$host"] * 63]):
        with pytest.raises(Invalid, match="more than 64 operators and operands"):
            json_filter.check({"query": [json.dumps(longer)]}, {})
