"""What is asked before the filters."""

import msgspec
import pytest

from micronova.conf.control import SchedulerSettings
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import HostState, RequestSpec
from micronova.placement import extra_specs
from micronova.scheduler.host_table import HostTable
from micronova.scheduler.prefilters import Prefilters

FLAVOR = Flavor(id="1", name="f", ram=1, vcpus=1, disk=1)


def _table() -> HostTable:
    table = HostTable()
    mine = (("mine", {"filter_tenant_id": "p"}),)
    others = (("others", {"filter_tenant_id_2": "q"}),)
    table.update(
        [
            HostState(
                host="a", node="a", node_uuid="a", traits=("COMPUTE_IMAGE_TYPE_RAW", "CUSTOM_A"), aggregates=mine
            ),
            HostState(host="b", node="b", node_uuid="b", traits=("COMPUTE_IMAGE_TYPE_QCOW2",), aggregates=others),
            HostState(host="c", node="c", node_uuid="c"),
        ]
    )
    return table


def _passing(prefilters: Prefilters, spec: RequestSpec) -> str:
    hosts = _table().view()
    left = set(range(3))
    for each in prefilters.masks(hosts, spec):
        left &= {position for position in range(3) if each.mask[position]}
    return "".join(place.host for position, place in enumerate(hosts.selections()) if position in left)


def _spec(project: str = "p", **more: str) -> RequestSpec:
    extra = {key.replace("__", ":"): value for key, value in more.items() if key.startswith("trait")}
    flavor = Flavor(id="1", name="f", ram=1, vcpus=1, disk=1, extra_specs=extra)
    image = ImageMeta(id="i", disk_format=more["disk_format"]) if "disk_format" in more else None
    return RequestSpec(
        project_id=project, user_id="u", flavor=flavor, image=image, has_aggregates=project in ("p", "q")
    )


def test_traits() -> None:
    assert _passing(Prefilters(), _spec()) == "abc"
    assert _passing(Prefilters(), _spec(trait__CUSTOM_A="required")) == "a"
    assert _passing(Prefilters(), _spec(trait__CUSTOM_A="forbidden")) == "bc"


def test_formats_of_images_count_if_the_setting_says_so() -> None:
    assert _passing(Prefilters(), _spec(disk_format="qcow2")) == "abc"
    assert _passing(Prefilters(image_types=True), _spec(disk_format="qcow2")) == "b"


def test_formats_of_images_do_not_count_for_servers_that_boot_from_volumes() -> None:
    spec = _spec(disk_format="vmdk")
    assert _passing(Prefilters(image_types=True), spec) == ""
    flavor = msgspec.structs.replace(spec.flavor, root_on_volume=True)
    assert _passing(Prefilters(image_types=True), msgspec.structs.replace(spec, flavor=flavor)) == "abc"


@pytest.mark.parametrize(("project", "optional", "needed"), [("p", "a", "a"), ("q", "b", "b"), ("r", "abc", "")])
def test_projects_have_the_hosts_of_their_aggregates(project: str, optional: str, needed: str) -> None:
    assert _passing(Prefilters(), _spec(project)) == "abc"
    assert _passing(Prefilters(tenants=True), _spec(project)) == optional
    assert _passing(Prefilters(tenants=True, tenants_need_aggregates=True), _spec(project)) == needed


def test_a_project_whose_aggregates_have_no_host_has_none() -> None:
    spec = msgspec.structs.replace(_spec("r"), has_aggregates=True)
    assert _passing(Prefilters(tenants=True), spec) == ""


def test_aggregates_are_kept_for_servers_that_require_their_traits() -> None:
    def passing(wanted: dict[str, str], properties: dict[str, str] | None = None, *, on: bool = True) -> str:
        table = HostTable()
        metadata: dict[str, dict[str, str]] = {
            "a": {"trait:CUSTOM_A": "required"},
            "b": {"trait:CUSTOM_A": "required", "trait:CUSTOM_B": "required"},
            "c": {"trait:CUSTOM_C": "wanted", "ssd": "required"},
        }
        table.update(
            HostState(
                host=name, node=name, node_uuid=name, aggregates=((name, values),), traits=("CUSTOM_A", "CUSTOM_B")
            )
            for name, values in metadata.items()
        )
        image = ImageMeta(id="i", properties=properties or {})
        flavor = msgspec.structs.replace(FLAVOR, extra_specs=wanted)
        spec = RequestSpec(project_id="p", user_id="u", flavor=flavor, image=image)
        left = set("abc")
        prefilters = Prefilters.of(SchedulerSettings(enable_isolated_aggregate_filtering=on))
        for each in prefilters.masks(table.view(), spec):
            left &= {name for name, passes in zip("abc", each.mask, strict=True) if passes}
        return "".join(sorted(left))

    assert passing({}, on=False) == "abc"
    assert passing({}) == "c"
    assert passing({"trait:CUSTOM_A": "required"}) == "ac"
    assert passing({"trait:CUSTOM_A": "required"}, {"trait:CUSTOM_B": "required"}) == "abc"
    assert passing({"resources1:CUSTOM_X": "1", "trait1:CUSTOM_A": "required"}) == "ac"
    assert passing({"trait:CUSTOM_D": "forbidden"}) == "c"
    # Groups are those of flavors: an image that names one asks for nothing, as in Nova.
    assert passing({}, {"trait1:CUSTOM_A": "required"}) == "c"
    assert passing({}, {"trait1:CUSTOM_A": "banana"}) == "c"


def test_properties_of_images_count_if_the_setting_says_so() -> None:
    table = HostTable()
    table.update(
        [
            HostState(host="a", node="a", node_uuid="a", traits=("COMPUTE_STORAGE_BUS_VIRTIO", "HW_ARCH_X86_64")),
            HostState(host="b", node="b", node_uuid="b", traits=("COMPUTE_NET_VIF_MODEL_SPAPR_VLAN",)),
        ]
    )

    def passing(on: bool, **properties: str) -> list[bool]:
        image = ImageMeta(id="i", properties=properties)
        spec = RequestSpec(project_id="p", user_id="u", flavor=FLAVOR, image=image)
        masks = list(Prefilters.of(SchedulerSettings(image_metadata_prefilter=on)).masks(table.view(), spec))
        return list(masks[0].mask) if masks else [True, True]

    assert passing(False, hw_disk_bus="virtio") == [True, True]
    assert passing(True, os_type="linux") == [True, True]
    assert passing(True, hw_disk_bus="virtio", hw_architecture="x86_64") == [True, False]
    for name in ("hw_architecture", "architecture"):  # which is an older name of the same
        assert passing(True, **{name: "amd64"}) == [True, False]
        assert passing(True, **{name: "s390x"}) == [False, False]
    assert passing(True, hw_vif_model="spapr-vlan") == [False, True]
    assert passing(True, hw_cdrom_bus="virtio", hw_video_model="qxl") == [False, False]


def test_secure_boot_needs_hosts_that_have_it() -> None:
    """A host without it refuses the build, which counts as one of the few attempts."""
    secure = "COMPUTE_SECURITY_UEFI_SECURE_BOOT"
    table = HostTable()
    table.update(
        [
            HostState(host="a", node="a", node_uuid="a"),
            HostState(host="b", node="b", node_uuid="b", traits=(secure,)),
        ]
    )

    def passing(of_flavor: str = "", of_image: str = "", *, rebuild: bool = False) -> str:
        flavor = msgspec.structs.replace(FLAVOR, extra_specs={"os:secure_boot": of_flavor} if of_flavor else {})
        image = ImageMeta(id="i", properties={"os_secure_boot": of_image} if of_image else {})
        spec = RequestSpec(project_id="p", user_id="u", flavor=flavor, image=image)
        prefilters = Prefilters()
        masks = prefilters.masks_of_rebuild(table.view(), spec) if rebuild else prefilters.masks(table.view(), spec)
        left = set("ab")
        for each in masks:
            left &= {name for name, passes in zip("ab", each.mask, strict=True) if passes}
        return "".join(sorted(left))

    assert passing() == passing("disabled") == passing("", "optional") == passing("", "disabled") == "ab"
    assert passing("required") == passing("", "required") == passing("required", "required") == "b"
    assert passing("", "required", rebuild=True) == "b"
    assert passing("required", rebuild=True) == "ab"  # compared when the server was placed

    # A flavor with a class of the cloud's own is served by providers that together have the trait.
    flavor = msgspec.structs.replace(FLAVOR, extra_specs={"os:secure_boot": "required", "resources:CUSTOM_X": "1"})
    request = extra_specs.resource_request(flavor, None)
    assert request is not None and request.groups[0].required == (frozenset({secure}),)
    assert extra_specs.all_required_traits(flavor, None) == {secure}
