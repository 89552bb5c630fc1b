"""What is asked before the filters."""

import msgspec
import pytest

from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import HostState, RequestSpec
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
    for _, _, mask in prefilters.masks(hosts, spec):
        left &= {position for position in range(3) if mask[position]}
    return "".join(each.host for position, each in enumerate(hosts.selections()) if position in left)


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


@pytest.mark.parametrize(("project", "optional", "needed"), [("p", "a", "a"), ("q", "b", "b"), ("r", "abc", "")])
def test_projects_have_the_hosts_of_their_aggregates(project: str, optional: str, needed: str) -> None:
    assert _passing(Prefilters(), _spec(project)) == "abc"
    assert _passing(Prefilters(tenants=True), _spec(project)) == optional
    assert _passing(Prefilters(tenants=True, tenants_need_aggregates=True), _spec(project)) == needed


def test_a_project_whose_aggregates_have_no_host_has_none() -> None:
    spec = msgspec.structs.replace(_spec("r"), has_aggregates=True)
    assert _passing(Prefilters(tenants=True), spec) == ""
