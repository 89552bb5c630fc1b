"""What is accepted without effect is reported, and what has an effect is not."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from micronova.cli.unsupported import unsupported
from micronova.conf.settings import load
from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.servers.honoured import Honoured
from micronova.servers.unsupported import Unsupported
from micronova.servers.without_effect import without_effect

NO_HINTS: Mapping[str, Sequence[str]] = {}


def _with(*filters: str, **scheduler: bool) -> Unsupported:
    """What refuses and reports with these filters, or the default ones, and these settings of the scheduler."""
    return unsupported(load(environ={}, filter_scheduler={"enabled_filters": filters or None}, scheduler=scheduler))


DEFAULT = _with()


def _flavor(extra_specs: dict[str, str]) -> Flavor:
    return Flavor(id="1", name="f", ram=1024, vcpus=2, disk=1, extra_specs=extra_specs)


def _image(properties: dict[str, Any]) -> ImageMeta:
    return ImageMeta(id="i", properties=properties)


def _about(remarks: Sequence[str]) -> list[str]:
    """Give the names that remarks are about."""
    assert all(" has no effect" in each and each.endswith(".") for each in remarks)
    return [each.split(" of ")[0].split(" has no")[0].rpartition(" ")[2] for each in remarks]


@pytest.mark.parametrize(
    "extra_specs",
    [
        {"capabilities:gpu": "A100"},
        {"capabilities:uefi": "true"},
        {"capabilities:virt_type": "kvm"},
        {"trait:NO_SUCH": "required"},
        {"resources:NO_SUCH": "1"},
        {"resources_A:NO_SUCH": "1", "trait_A:NO_SUCH": "required"},
    ],
)
def test_what_filters_hosts_is_not_reported(extra_specs: dict[str, str]) -> None:
    """Hosts report capabilities by names of their own; a trait or a class that no host has refuses every host."""
    assert without_effect(_flavor(extra_specs), None) == []
    assert DEFAULT.remarks(_flavor(extra_specs), None, NO_HINTS) == []


def test_extra_specs_that_no_enabled_filter_reads() -> None:
    given = {"ssd": "true", "vendor:note": "x", "hypervisor_type": "QEMU", "hw:cpu_polcy": "dedicated"}
    assert _about(DEFAULT.remarks(_flavor(given), None, NO_HINTS)) == ["hw:cpu_polcy", "ssd", "vendor:note"]
    [remark] = DEFAULT.remarks(_flavor({"ssd": "true"}), None, NO_HINTS)
    assert remark == (
        "The extra spec ssd of flavor f has no effect on hosts that report no capability of this name: "
        "no other enabled filter honours it."
    )
    without = _with("ComputeFilter").remarks(_flavor(given), None, NO_HINTS)
    assert _about(without) == ["hw:cpu_polcy", "hypervisor_type", "ssd", "vendor:note"]
    assert without[2] == "The extra spec ssd of flavor f has no effect: nothing on this cloud honours it."
    aggregates = _with("AggregateInstanceExtraSpecsFilter")
    assert _about(aggregates.remarks(_flavor(given), None, NO_HINTS)) == ["hw:cpu_polcy", "vendor:note"]
    plugin = Unsupported(lambda: Honoured(reads_extra_spec=lambda name: name.startswith("vendor:")))
    assert _about(plugin.remarks(_flavor({"vendor:note": "x"}), None, NO_HINTS)) == []


def test_hints_that_no_enabled_filter_reads() -> None:
    hints = {"group": ["g"], "same_host": ["s"], "diferent_host": ["s"]}
    [remark] = DEFAULT.remarks(_flavor({}), None, hints)
    assert remark == "The scheduler hint diferent_host has no effect: no enabled filter honours it."
    plugin = Unsupported(lambda: Honoured(hints=frozenset({"diferent_host", "same_host"})))
    assert plugin.remarks(_flavor({}), None, hints) == []


def test_hints_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    told = _with()
    for _ in range(2):
        told.check_hints({"diferent_host": ["s"]})
    assert [each.getMessage() for each in caplog.records] == [
        "The scheduler hint diferent_host has no effect: no enabled filter honours it."
    ]


@pytest.mark.parametrize(
    ("extra_specs", "properties", "reported"),
    [
        ({"hw:numa_cpus.0": "0-1", "hw:numa_mem.0": "1024"}, {}, ["hw:numa_cpus.0", "hw:numa_mem.0"]),
        ({}, {"hw_numa_cpus.0": "0-1", "hw_numa_mem.0": "1024"}, ["hw_numa_cpus.0", "hw_numa_mem.0"]),
        ({"hw:numa_cpus.0": "0-1", "hw:numa_mem.0": "1024"}, {"hw_numa_nodes": "1"}, []),
        ({"hw:numa_nodes": "1"}, {"hw_numa_cpus.0": "0-1", "hw_numa_mem.0": "1024"}, []),
        ({"hw:cpu_policy": "dedicated", "hw:numa_cpus.0": "0-1", "hw:numa_mem.0": "1024"}, {}, []),
        ({"hw:mem_page_size": "large", "hw:numa_cpus.0": "0-1", "hw:numa_mem.0": "1024"}, {}, []),
    ],
)
def test_numa_nodes_that_nobody_asked_for(
    caplog: pytest.LogCaptureFixture, extra_specs: dict[str, str], properties: dict[str, str], reported: list[str]
) -> None:
    flavor, image, told = _flavor(extra_specs), _image(properties), _with()
    assert _about(told.remarks(flavor, image, NO_HINTS)) == reported
    told.check_devices(flavor, image)
    assert _about([each.getMessage() for each in caplog.records]) == reported


def test_properties_of_images_that_count_only_in_flavors() -> None:
    given = {
        "trait:HW_CPU_X86_AVX2": "required",
        "trait_A:HW_CPU_X86_AVX2": "required",
        "trait1:HW_CPU_X86_AVX2": "required",
        "resources:VCPU": "4",
        "resources1:CUSTOM_GOLD": "4",
    }
    counts_not = sorted(given.keys() - {"trait:HW_CPU_X86_AVX2"})
    assert _about(DEFAULT.remarks(_flavor({}), _image(given), NO_HINTS)) == counts_not
    assert _about(DEFAULT.remarks(_flavor({}), _image({"group_policy": "none"}), NO_HINTS)) == ["group_policy"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("trait1:HW_CPU_X86_AVX2", "banana", "must be required or forbidden, not 'banana'"),
        ("resources:VCPU", "many", "must be a whole number"),
        ("resources1:CUSTOM_GOLD", "-1", "must be a whole number"),
        ("group_policy", "apart", "The property group_policy of image i must be none or isolate"),
    ],
)
def test_malformed_properties_are_refused_although_they_count_only_in_flavors(
    name: str, value: str, message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        DEFAULT.check_properties(_image({name: value}), _flavor({}))


def test_properties_of_images_that_only_filters_read() -> None:
    given = {"hw_vm_mode": "hvm", "img_hv_requested_version": ">=6.0", "img_hv_type": "kvm"}
    older = {"hypervisor_type": "kvm", "hypervisor_version_requires": ">=6.0", "vm_mode": "hvm"}
    for properties in (given, older):
        assert DEFAULT.remarks(_flavor({}), _image(properties), NO_HINTS) == []
        assert _with("AggregateImagePropertiesIsolation").remarks(_flavor({}), _image(properties), NO_HINTS) == []
        assert _about(_with("ComputeFilter").remarks(_flavor({}), _image(properties), NO_HINTS)) == sorted(properties)


def test_properties_of_images_that_nothing_reads() -> None:
    given = {"hw_floppy_bus": "fdc", "vmware_disktype": "thin", "xenapi_use_agent": "true", "os_distro": "debian"}
    counts = {"vmware_adaptertype": "ide", "hw_disk_bus": "virtio", "note": "x"}
    about = _about(DEFAULT.remarks(_flavor({}), _image(given | counts), NO_HINTS))
    assert about == ["hw_floppy_bus", "vmware_disktype", "xenapi_use_agent"]


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("hw_ipxe_boot", "a boot over the network"),
        ("ipxe_boot", "a boot over the network"),
        ("mappings", "block devices in an image"),
        ("img_mappings", "block devices in an image"),
    ],
)
def test_properties_are_refused_by_all_their_names(name: str, lacking: str) -> None:
    with pytest.raises(Invalid, match=f"The property {name} of image i is not supported.*{lacking}"):
        DEFAULT.check_properties(_image({name: "true"}), _flavor({}))
    DEFAULT.check_properties(_image({name: ""}), _flavor({}))


def test_older_names_of_properties_are_reported_as_newest_ones_are() -> None:
    nothing = {"cache_in_nova": "true", "bittorrent": "true", "vmware_linked_clone": "true"}
    known = {"owner_id": "p", "auto_disk_config": "true", "bdm_v2": "true", "architecture": "amd64", "note": "x"}
    assert _about(DEFAULT.remarks(_flavor({}), _image(nothing | known), NO_HINTS)) == sorted(nothing)
    compares = _with("AggregateImagePropertiesIsolation")
    assert compares.remarks(_flavor({}), _image(nothing), NO_HINTS) == []


@pytest.mark.parametrize(("setting", "effect"), [(0.0, False), (1.0, True)])
def test_the_multiplier_of_alike_images_needs_its_setting(setting: float, effect: bool) -> None:
    told = unsupported(load(environ={}, filter_scheduler={"image_props_weight_multiplier": setting}))
    remarks = told.remarks_of_aggregate("a", {"image_props_weight_multiplier": "2"}, {})
    needs = "it needs the setting filter_scheduler.image_props_weight_multiplier."
    assert (remarks == []) if effect else remarks[0].endswith(needs)


@pytest.mark.parametrize(
    ("key", "value", "reader"),
    [
        ("filter_tenant_id", "p", "AggregateMultiTenancyIsolation"),
        ("filter_tenant_id_2", "p", "AggregateMultiTenancyIsolation"),
        ("filter_tenant_id", "p", "scheduler.limit_tenants_to_placement_aggregate"),
        ("instance_type", "m1.small", "AggregateTypeAffinityFilter"),
        ("trait:CUSTOM_GOLD", "required", "scheduler.enable_isolated_aggregate_filtering"),
        ("max_instances_per_host", "4", "AggregateNumInstancesFilter"),
        ("max_io_ops_per_host", "4", "AggregateIoOpsFilter"),
        ("cpu_allocation_ratio", "2", "AggregateCoreFilter"),
        ("ram_allocation_ratio", "1", "AggregateRamFilter"),
        ("disk_allocation_ratio", "1", "AggregateDiskFilter"),
    ],
)
def test_metadata_of_aggregates_needs_its_filter_or_setting(key: str, value: str, reader: str) -> None:
    [remark] = DEFAULT.remarks_of_aggregate("a", {key: value, "availability_zone": "east", "rack": "7"}, {})
    assert remark.startswith(f"The metadata {key} of aggregate a has no effect: it needs the ") and reader in remark
    setting = reader.removeprefix("scheduler.")
    able = _with(reader) if setting == reader else _with(**{setting: True})
    assert able.remarks_of_aggregate("a", {key: value}, {"VCPU": 2.0}) == []


def test_metadata_of_aggregates_only_lowers_the_ratio_of_hosts() -> None:
    told = _with("AggregateCoreFilter")
    [remark] = told.remarks_of_aggregate("a", {"cpu_allocation_ratio": "16"}, {"VCPU": 4.0})
    assert remark == (
        "The metadata cpu_allocation_ratio of aggregate a has no effect: the allocation ratio of its hosts is at most "
        "4, and metadata only lowers it."
    )
    for value in ("4", "0.5", "many"):  # what is no number is logged by the filter
        assert told.remarks_of_aggregate("a", {"cpu_allocation_ratio": value}, {"VCPU": 4.0}) == []


def test_traits_of_aggregates_have_one_value() -> None:
    told = _with(enable_isolated_aggregate_filtering=True)
    [remark] = told.remarks_of_aggregate("a", {"trait:CUSTOM_GOLD": "yes", "trait:CUSTOM_OLD": "required"}, {})
    assert "trait:CUSTOM_GOLD" in remark and "only the value required counts" in remark
