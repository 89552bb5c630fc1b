"""What flavor and image ask for together. The topologies are those that Nova 34 chooses for the same input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.objects.guest_cpus import CpuRequest, cpu_request, cpu_topology, page_size
from micronova.objects.guest_properties import GuestProperties
from micronova.objects.image import ImageMeta


def _properties(flavor: dict[str, object], image: dict[str, object], prefix: str = "") -> GuestProperties:
    specs = {f"hw:{prefix}{name}": str(value) for name, value in flavor.items()}
    return GuestProperties(
        Flavor(id="1", name="f", ram=512, vcpus=1, disk=1, extra_specs=specs),
        ImageMeta(id="i", properties={f"hw_{prefix}{name}": value for name, value in image.items()}),
    )


@pytest.mark.parametrize(
    ("vcpus", "flavor", "image", "chosen"),
    [
        (8, {}, {}, (8, 1, 1)),
        (8, {"sockets": 2}, {}, (2, 4, 1)),
        (8, {"cores": 4, "threads": 2}, {}, (1, 4, 2)),
        (12, {}, {"sockets": 2, "threads": 3}, (2, 2, 3)),
        # Preferences that do not fit are followed as far as possible.
        (1, {}, {"cores": 2}, (1, 1, 1)),
        (2, {}, {"sockets": 1, "cores": 4, "threads": 1}, (1, 2, 1)),
        (3, {"threads": 2}, {}, (3, 1, 1)),
        (4, {"sockets": 3}, {}, (4, 1, 1)),
        (8, {"cores": 3}, {}, (8, 1, 1)),
        (12, {"sockets": 5, "cores": 3}, {}, (4, 3, 1)),
        (8, {"sockets": 0}, {"cores": 0}, (8, 1, 1)),
        # The image's preferences replace the flavor's.
        (4, {"sockets": 1}, {"sockets": 2}, (2, 2, 1)),
        (6, {"cores": 2}, {"threads": 2}, (3, 1, 2)),
        # Limits hold; the image may only make them narrower.
        (4, {"max_sockets": 1}, {}, (1, 4, 1)),
        (4, {"max_sockets": 4}, {"max_sockets": 1}, (1, 4, 1)),
        (7, {}, {"max_cores": 3}, (7, 1, 1)),
        (8, {"max_sockets": 1, "threads": 2}, {}, (1, 4, 2)),
        (8, {"sockets": 4, "max_sockets": 2}, {}, (2, 4, 1)),
        (8, {}, {"max_sockets": 2, "max_threads": 1}, (2, 4, 1)),
        (4, {"max_sockets": 2}, {"sockets": 4}, None),
        (4, {"max_sockets": 1}, {"max_sockets": 4}, None),
        (8, {"max_sockets": 1, "max_cores": 2, "max_threads": 2}, {}, None),
    ],
)
def test_cpu_topology(
    vcpus: int, flavor: dict[str, object], image: dict[str, object], chosen: tuple[int, int, int] | None
) -> None:
    properties = _properties(flavor, image, "cpu_")
    if chosen is not None:
        assert cpu_topology(properties, vcpus) == chosen
        return
    with pytest.raises(Invalid):
        cpu_topology(properties, vcpus)


def test_a_flavor_of_very_many_cpus_takes_no_time() -> None:
    assert cpu_topology(_properties({}, {}), 2**31 - 1) == (2**31 - 1, 1, 1)
    with pytest.raises(Invalid, match="at most"):
        cpu_request(_properties({"cpu_policy": "dedicated"}, {}), 2**31 - 1, 512)


@pytest.mark.parametrize(
    ("flavor", "image", "chosen"),
    [
        ("large", None, "large"),
        ("2MB", None, 2048),
        ("4", None, 4),
        ("any", None, "any"),
        ("small", None, "small"),
        ("any", "2MB", 2048),
        ("large", "1GiB", 1048576),
        ("large", "small", "small"),
    ],
)
def test_page_sizes(flavor: str, image: str | None, chosen: int | str | None) -> None:
    asked: dict[str, object] = {} if image is None else {"mem_page_size": image}
    assert page_size(_properties({"mem_page_size": flavor}, asked)) == chosen


def test_the_vcpus_that_are_pinned() -> None:
    def pinned(policy: str, **more: str) -> tuple[int, ...]:
        return cpu_request(_properties({"cpu_policy": policy, **more}, {}), 4, 512).pinned

    assert pinned("shared") == ()
    assert pinned("dedicated") == (0, 1, 2, 3)
    assert pinned("mixed", cpu_dedicated_mask="1-2") == (1, 2)
    assert pinned("mixed", cpu_dedicated_mask="^0") == (1, 2, 3)


def _of_specs(specs: dict[str, str], image: dict[str, object]) -> CpuRequest:
    flavor = Flavor(id="1", name="f", ram=512, vcpus=2, disk=1, extra_specs=specs)
    return cpu_request(GuestProperties(flavor, ImageMeta(id="i", properties=image)), 2, 512)


def test_an_amount_of_dedicated_cpus() -> None:
    assert _of_specs({"resources:PCPU": "2"}, {}).pinned == (0, 1)
    assert _of_specs({"resources:PCPU": "0"}, {}).pinned == ()
    assert _of_specs({"resources:PCPU": "3", "hw:emulator_threads_policy": "isolate"}, {}).dedicated == 3
    for amount in ("1", "3"):
        with pytest.raises(Invalid, match=f"resources:PCPU is {amount}: it should be 2"):
            _of_specs({"resources:PCPU": amount}, {})


@pytest.mark.parametrize("policy", [{"resources:PCPU": "2"}, {"hw:cpu_policy": "dedicated"}])
def test_the_trait_of_threads_is_a_thread_policy(policy: dict[str, str]) -> None:
    trait = "trait:HW_CPU_HYPERTHREADING"
    assert _of_specs(policy | {trait: "required"}, {}).thread_policy == "require"
    assert _of_specs(policy | {trait: "forbidden"}, {}).thread_policy == "isolate"
    assert _of_specs(policy, {trait: "required"}).thread_policy == "require"


def test_the_trait_of_threads_means_nothing_without_dedicated_cpus() -> None:
    assert _of_specs({"trait:HW_CPU_HYPERTHREADING": "required"}, {}).thread_policy == "prefer"


def _with_nodes(image: dict[str, object]) -> GuestProperties:
    return _properties({}, {"numa_nodes": 2, "numa_cpus.0": "0", "numa_cpus.1": "1", **image})


@pytest.mark.parametrize(
    "image",
    [
        {"numa_mem.0": "-512", "numa_mem.1": "1024"},
        {"numa_mem.0": "0", "numa_mem.1": "512"},
        {"numa_mem.0": "2_56", "numa_mem.1": "256"},
        {"numa_mem.0": "\u0662\u0665\u0666", "numa_mem.1": "256"},
        {"numa_mem.0": "256", "numa_mem.1": "256", "numa_cpus.0": "0-1", "numa_cpus.1": ""},
        {"numa_mem.0": "256", "numa_mem.1": "256", "numa_cpus.1": "\u0661"},
        {"numa_mem.0": "9" * 5000, "numa_mem.1": "256"},
    ],
)
def test_each_numa_node_has_cpus_and_memory(image: dict[str, object]) -> None:
    with pytest.raises(Invalid):
        cpu_request(_with_nodes(image), 2, 512)


@given(memory=st.lists(st.integers(-4096, 4096), min_size=1, max_size=4), form=st.sampled_from(["{}", " {}", "{:_}"]))
def test_no_accepted_numa_node_takes_less_than_nothing(memory: list[int], form: str) -> None:
    image: dict[str, object] = {"numa_nodes": len(memory)}
    for number, megabytes in enumerate(memory):
        image |= {f"numa_cpus.{number}": str(number), f"numa_mem.{number}": form.format(megabytes)}
    try:
        cells = cpu_request(_properties({}, image), len(memory), sum(memory)).cells
    except Invalid:
        assert min(memory) < 1 or form == "{:_}"
        return
    assert [cell.memory_mb for cell in cells] == memory and min(memory) >= 1


@pytest.mark.parametrize("size", ["0", "0MB", "-2048", "2_048", "\u0662MB", "9" * 5000, "4XB"])
def test_sizes_of_pages_that_are_none(size: str) -> None:
    with pytest.raises(Invalid, match="it should be small, large, any"):
        page_size(_properties({"mem_page_size": size}, {}))
