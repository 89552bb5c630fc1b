"""Where a guest's CPUs, NUMA nodes, pages and devices are: what its order names."""

from typing import Any

import pytest

from micronova.objects.errors import NotSupported
from micronova.objects.guest_cpus import cpu_request
from micronova.objects.guest_properties import GuestProperties
from micronova.objects.orders import InstanceSpec
from micronova.objects.topology import AssignedDevice, Assignment, CellAssignment
from micronova.virt.libvirt.definition.topology import CpuPlan, pins_of, plan_cpus
from micronova.virt.libvirt.storage.records import PinRecord
from tests.unit.virt.libvirt.world import CELLS, flavor, instance


def guest(assignment: Assignment | None = None, **specs: Any) -> InstanceSpec:
    extra = {name.replace("__", ":"): str(value) for name, value in specs.items()}
    return instance(flavor=flavor(vcpus=4, ram=512, extra_specs=extra), image=None, assignment=assignment)


def planned(spec: InstanceSpec, shared: tuple[int, ...] = ()) -> CpuPlan:
    request = cpu_request(GuestProperties(spec.flavor, None), 4, 512)
    return plan_cpus(request, vcpus=4, cells=CELLS, shared=shared, pins=pins_of(spec))


PLACE = Assignment(
    cells=(
        CellAssignment(id=0, host=1, memory_mb=256, shared=(0,), pins={1: 5}, page_kib=2048),
        CellAssignment(id=1, host=0, memory_mb=256, shared=(2,), pins={3: 1}, page_kib=2048),
    ),
    emulator=(7,),
    devices=(AssignedDevice(alias="gpu", address="0000:0a:00.0"),),
)


def test_without_properties_there_is_nothing_to_place() -> None:
    assert pins_of(guest()) == PinRecord()
    plan = planned(guest())
    assert not plan.pins and not plan.cells and not plan.floating and plan.page_kib is None


def test_the_order_names_everything() -> None:
    spec = guest(PLACE, hw__cpu_policy="mixed", hw__cpu_dedicated_mask="1,3", hw__numa_nodes=2)
    assert pins_of(spec) == PinRecord(
        vcpus={1: 5, 3: 1}, cells={0: 1, 1: 0}, emulator=(7,), page_kib=2048, devices=("0000:0a:00.0",)
    )
    plan = planned(spec, shared=(0, 4, 6))
    assert plan.pins == {1: 5, 3: 1} and plan.emulator == (7,) and plan.page_kib == 2048
    # The other vCPUs use the shared CPUs of their own node.
    assert plan.floating == {0: (4, 6), 2: (0,)}
    assert [(cell.id, cell.vcpus, cell.host) for cell in plan.cells] == [(0, (0, 1), 1), (1, (2, 3), 0)]


def test_small_pages_are_ordinary_memory() -> None:
    place = Assignment(cells=(CellAssignment(id=0, host=0, memory_mb=512, shared=(0, 1, 2, 3), page_kib=4),))
    assert planned(guest(place, hw__mem_page_size="small")).page_kib is None


@pytest.mark.parametrize("spec", [guest(hw__cpu_policy="dedicated"), guest(pci_passthrough__alias="gpu:1")])
def test_an_order_without_a_place_is_refused(spec: InstanceSpec) -> None:
    with pytest.raises(NotSupported, match="does not say what of this host"):
        pins_of(spec)
