"""Where a guest's CPUs, NUMA nodes and huge pages are."""

from typing import Any

import pytest

from micronova.objects.errors import InsufficientResources, Invalid
from micronova.objects.guest_cpus import cpu_request
from micronova.objects.guest_properties import GuestProperties
from micronova.virt.libvirt.definition.topology import CpuPlan, plan_cpus
from micronova.virt.libvirt.storage.records import PinRecord
from tests.unit.virt.libvirt.world import CELLS, flavor


def properties(**specs: Any) -> GuestProperties:
    return GuestProperties(flavor(extra_specs={f"hw:{name}": str(value) for name, value in specs.items()}), None)


def planned(vcpus: int = 2, memory_mb: int = 1024, taken: tuple[int, ...] = (), **specs: Any) -> CpuPlan:
    asked = properties(**{name.replace("__", "."): value for name, value in specs.items()})
    return plan_cpus(
        cpu_request(asked, vcpus, memory_mb),
        vcpus=vcpus,
        cells=CELLS,
        dedicated=tuple(range(8)),
        taken=taken,
    )


def test_without_properties_there_is_nothing_to_place() -> None:
    plan = planned()
    assert not plan.pins and not plan.cells and plan.page_kib is None


def test_dedicated_cpus_of_one_node() -> None:
    plan = planned(cpu_policy="dedicated")
    assert plan.pins == {0: 0, 1: 2}  # both threads of a core, before the next core
    assert [(cell.id, cell.vcpus, cell.host) for cell in plan.cells] == [(0, (0, 1), 0)]
    assert planned(cpu_policy="dedicated", taken=(0, 1, 2)).pins == {0: 4, 1: 6}
    with pytest.raises(InsufficientResources):
        planned(vcpus=4, cpu_policy="dedicated", taken=(0, 4))


def test_thread_policies() -> None:
    assert planned(cpu_policy="dedicated", cpu_thread_policy="isolate").pins == {0: 0, 1: 1}
    assert planned(cpu_policy="dedicated", cpu_thread_policy="isolate", taken=(2,)).pins == {0: 4, 1: 5}
    assert planned(cpu_policy="dedicated", cpu_thread_policy="require", taken=(2,)).pins == {0: 1, 1: 3}


def test_mixed_policy_pins_some() -> None:
    assert planned(vcpus=3, cpu_policy="mixed", cpu_dedicated_mask="1-2").pins == {1: 0, 2: 2}
    assert planned(vcpus=3, cpu_policy="mixed", cpu_dedicated_mask="^0").pins == {1: 0, 2: 2}
    with pytest.raises(Invalid, match="cpu_dedicated_mask"):
        planned(vcpus=2, cpu_policy="mixed", cpu_dedicated_mask="0-1")


def test_emulator_threads_get_a_cpu_of_their_own() -> None:
    plan = planned(cpu_policy="dedicated", emulator_threads_policy="isolate")
    assert plan.emulator and plan.emulator[0] not in plan.pins.values()


def test_numa_nodes() -> None:
    plan = planned(vcpus=4, numa_nodes=2)
    assert [(cell.vcpus, cell.memory_mb, cell.host) for cell in plan.cells] == [((0, 1), 512, 0), ((2, 3), 512, 1)]
    plan = planned(vcpus=3, numa_nodes=2, numa_cpus__0="0", numa_cpus__1="1-2", numa_mem__0=256, numa_mem__1=768)
    assert [(cell.vcpus, cell.memory_mb) for cell in plan.cells] == [((0,), 256), ((1, 2), 768)]
    for wrong in (
        {"numa_nodes": 3},  # 4 CPUs
        {"numa_nodes": 2, "numa_cpus__0": "0-3"},
        {"numa_nodes": 2, "numa_cpus__0": "0-1", "numa_cpus__1": "1-2", "numa_mem__0": 512, "numa_mem__1": 512},
        {"numa_nodes": 2, "numa_cpus__0": "0-1", "numa_cpus__1": "2-3", "numa_mem__0": 512, "numa_mem__1": 1},
    ):
        with pytest.raises(Invalid):
            planned(vcpus=4, **wrong)
    with pytest.raises(InsufficientResources):
        planned(vcpus=3, memory_mb=1023, numa_nodes=3)


def test_huge_pages() -> None:
    assert planned(mem_page_size="2MB").page_kib == 2048
    assert planned(mem_page_size="large").page_kib == 2048
    assert planned(mem_page_size="2048").page_kib == 2048
    assert planned(mem_page_size="small").page_kib is None
    with pytest.raises(InsufficientResources, match="1048576 KiB"):
        planned(mem_page_size="1GB")
    with pytest.raises(InsufficientResources, match="fewer than 4096 MB"):
        planned(memory_mb=4096, mem_page_size="large")
    with pytest.raises(Invalid, match="should be small, large"):
        planned(mem_page_size="huge")


def test_pins_are_kept_over_restarts() -> None:
    again = plan_cpus(
        cpu_request(properties(cpu_policy="dedicated"), 2, 512),
        vcpus=2,
        cells=CELLS,
        dedicated=(0, 1, 2, 3),
        taken=(0, 1, 2, 3),
        kept=PinRecord(vcpus={0: 5, 1: 7}, cells={0: 1}),
    )
    assert again.pins == {0: 5, 1: 7}
    assert again.cells[0].host == 1
