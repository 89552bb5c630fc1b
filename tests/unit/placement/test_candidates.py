"""Allocation candidates as a function of plain data. Placement's own tests (`make placement-gabbi`) have many more."""

import dataclasses
import itertools
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from micronova.objects.bounded_search import StepBudget
from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.placement import candidates, extra_specs
from micronova.placement.candidates import RequestSteps
from micronova.placement.model import Inventory, Provider, RequestGroup, ResourceRequest
from micronova.placement.standard import SHARES_VIA_AGGREGATE


def _stock(total: int, used: int = 0, **more: int) -> Inventory:
    units = {"min_unit": 1, "max_unit": total, "step_size": 1, **more}
    return Inventory(total=total, reserved=0, allocation_ratio=1.0, capacity=total, used=used, **units)


def _provider(name: str, parent: str | None = None, root: str | None = None, **more: object) -> Provider:
    stock = more.pop("stock", {})
    assert isinstance(stock, dict)
    traits, aggregates = frozenset(more.get("traits", ())), frozenset(more.get("aggregates", ()))  # type: ignore[call-overload]
    return Provider(
        uuid=name, name=name, parent=parent, root=root or name, traits=traits, aggregates=aggregates, inventories=stock
    )


def _node(name: str) -> list[Provider]:
    """A compute node with two interfaces."""
    return [
        _provider(name, stock={"VCPU": _stock(4)}, aggregates=["rack"]),
        *(
            _provider(
                f"{name}:{port}", name, name, stock={"BANDWIDTH": _stock(10, step_size=2)}, traits=[f"NET_{port}"]
            )
            for port in "ab"
        ),
    ]


def _found(request: ResourceRequest, *providers: Provider) -> list[dict[str, dict[str, int]]]:
    return [{uuid: dict(own) for uuid, own in each.allocations.items()} for each in candidates.find(request, providers)]


def _net(suffix: str, amount: int, **more: object) -> RequestGroup:
    return RequestGroup(suffix=suffix, resources={"BANDWIDTH": amount}, **more)  # type: ignore[arg-type]


def _cpus(suffix: str, amount: int) -> RequestGroup:
    return RequestGroup(suffix=suffix, resources={"VCPU": amount})


def test_a_group_without_a_suffix_is_spread_over_the_tree() -> None:
    request = ResourceRequest(groups=(RequestGroup(resources={"VCPU": 1, "BANDWIDTH": 4}),))
    assert _found(request, *_node("n")) == [
        {"n": {"VCPU": 1}, "n:a": {"BANDWIDTH": 4}},
        {"n": {"VCPU": 1}, "n:b": {"BANDWIDTH": 4}},
    ]


def test_a_group_with_a_suffix_needs_one_provider_with_its_traits() -> None:
    wanted = RequestGroup(suffix="1", resources={"VCPU": 1, "BANDWIDTH": 4})
    assert _found(ResourceRequest(groups=(wanted,)), *_node("n")) == []
    required = _net("1", 4, required=(frozenset({"NET_b", "NET_c"}),))
    assert _found(ResourceRequest(groups=(required,)), *_node("n")) == [{"n:b": {"BANDWIDTH": 4}}]
    forbidden = _net("1", 4, forbidden=frozenset({"NET_b"}))
    assert _found(ResourceRequest(groups=(forbidden,)), *_node("n")) == [{"n:a": {"BANDWIDTH": 4}}]


def test_groups_together_take_no_more_than_there_is() -> None:
    both = (_net("1", 6), _net("2", 6))
    assert len(_found(ResourceRequest(groups=both), *_node("n"))) == 2  # one of each interface, in two ways
    small = (_net("1", 4), _net("2", 4))
    assert len(_found(ResourceRequest(groups=small), *_node("n"))) == 4
    assert len(_found(ResourceRequest(groups=small, isolate=True), *_node("n"))) == 2


@pytest.mark.parametrize(("groups", "isolate", "capacity"), [(8, True, 8), (20, True, 8), (12, False, 1)])
def test_more_groups_than_providers_are_refused_at_once(groups: int, isolate: bool, capacity: int) -> None:
    """Trying all orders of the groups would take minutes, for each tree."""
    free = (_provider(f"p{n}", "n", "n", stock={"BANDWIDTH": _stock(capacity)}) for n in range(groups - 1))
    request = ResourceRequest(groups=tuple(_net(str(number), 1) for number in range(groups)), isolate=isolate, limit=1)
    tree = [_provider("n"), *free]
    begin = time.process_time()
    assert _found(request, *tree) == []
    assert time.process_time() - begin < 1
    one_more = _provider("last", "n", "n", stock={"BANDWIDTH": _stock(capacity)})
    assert len(_found(request, *tree, one_more)) == 1


def test_a_list_of_candidates_has_an_end() -> None:
    tree = [_provider("n"), *(_provider(f"p{n}", "n", "n", stock={"BANDWIDTH": _stock(8)}) for n in range(8))]
    for limit in (None, 999_999_999):
        request = ResourceRequest(groups=tuple(_net(str(number), 1) for number in range(6)), limit=limit)
        assert len(_found(request, *tree)) == candidates.MOST_CANDIDATES


@given(st.integers(0, 1 << 32))
def test_the_candidates_are_all_combinations_that_fit(seed: int) -> None:
    chance = random.Random(seed)
    tree = [
        _provider("n"),
        *(_provider(f"p{n}", "n", "n", stock={"BANDWIDTH": _stock(chance.randint(1, 4))}) for n in range(3)),
        _provider("q", "p0", "n", stock={"BANDWIDTH": _stock(2)}),
    ]
    groups = tuple(_net(str(number), chance.randint(1, 3)) for number in range(chance.randint(1, 4)))
    subtrees = (frozenset(("0", "1")),) if len(groups) > 1 and chance.random() < 0.4 else ()
    request = ResourceRequest(groups=groups, isolate=chance.random() < 0.5, same_subtrees=subtrees)
    expected = set()
    for chosen in itertools.product(tree[1:], repeat=len(groups)):
        total = Counter[str]()
        for group, each in zip(groups, chosen, strict=True):
            total[each.uuid] += group.resources["BANDWIDTH"]
        related = {each.uuid for each in chosen[:2]} if subtrees else {"p1"}
        if (
            all(each.inventories["BANDWIDTH"].has(total[each.uuid]) for each in chosen)
            and not (request.isolate and len({each.uuid for each in chosen}) < len(chosen))
            and (len(related) == 1 or related == {"p0", "q"})
        ):
            expected.add(tuple(each.uuid for each in chosen))
    found = candidates.find(request, tree)
    assert {tuple(each.mappings[group.suffix][0] for group in groups) for each in found} == expected
    assert bool(candidates.find(dataclasses.replace(request, limit=1), tree)) is bool(expected)


def test_units_are_kept() -> None:
    assert _found(ResourceRequest(groups=(_net("1", 3),)), *_node("n")) == []


def test_a_sharing_provider_serves_the_trees_of_its_aggregates() -> None:
    disk = _provider("disk", stock={"DISK_GB": _stock(100)}, traits=[SHARES_VIA_AGGREGATE], aggregates=["rack"])
    far = _provider("far", stock={"VCPU": _stock(4)}, aggregates=["another"])
    request = ResourceRequest(groups=(RequestGroup(resources={"VCPU": 1, "DISK_GB": 10}),))
    assert _found(request, *_node("n"), disk, far) == [{"n": {"VCPU": 1}, "disk": {"DISK_GB": 10}}]


def test_what_the_consumer_takes_besides_counts_for_the_largest_unit() -> None:
    """It is used already, so it does not count twice."""
    tree = [
        _provider("n", stock={"VCPU": _stock(40, used=6, max_unit=10)}),
        _provider("n:a", "n", "n", stock={"VCPU": _stock(10)}),
    ]
    request = ResourceRequest(groups=(_cpus("x", 6),))
    for held, found in ((0, [{"n"}, {"n:a"}]), (4, [{"n"}, {"n:a"}]), (5, [{"n:a"}])):
        besides = {("n", "VCPU"): held}
        assert [set(each.allocations) for each in candidates.find(request, tree, held=besides)] == found
    of_any = ResourceRequest(groups=(RequestGroup(resources={"VCPU": 6}),))
    assert [set(each.allocations) for each in candidates.find(of_any, tree, held={("n", "VCPU"): 5})] == [{"n:a"}]
    assert candidates.how_many(request, tree, "n", {"VCPU": 6}, 9) == 1
    both = ResourceRequest(groups=(_cpus("x", 3), _cpus("y", 3)))
    for held, most in ((4, 6), (5, 3)):
        found_both = candidates.find(both, tree, held={("n", "VCPU"): held})
        assert max(each.allocations.get("n", {}).get("VCPU", 0) for each in found_both) == most


def test_how_many_fit_into_a_tree() -> None:
    request = ResourceRequest(groups=(_net("1", 6),))
    assert candidates.how_many(request, _node("n"), "n", {"VCPU": 1}, 9) == 2
    assert candidates.how_many(request, _node("n"), "n", {"VCPU": 3}, 9) == 2
    own = ResourceRequest(groups=(RequestGroup(suffix="1", resources={"VCPU": 1}),))
    assert candidates.how_many(own, _node("n"), "n", {"VCPU": 1}, 9) == 2  # what it takes of the node counts, too


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(1, 7),
    st.sampled_from(["", "1"]),
)
def test_many_consumers_of_one_class_are_counted_at_once(
    stocks: list[tuple[int, int, int]], amount: int, suffix: str
) -> None:
    """As many as there are if each takes its part after the other, and with one search instead of one for each."""
    devices = [
        _provider(f"d{number}", "n", "n", stock={"VGPU": _stock(total, used, step_size=step)})
        for number, (total, used, step) in enumerate(stocks)
    ]
    tree = [_provider("n"), *devices]
    request = ResourceRequest(groups=(RequestGroup(suffix=suffix, resources={"VGPU": amount}),))
    expected, left = 0, tree
    while found := candidates.find(dataclasses.replace(request, limit=1), left):
        expected, left = expected + 1, candidates.take(left, candidates.amounts_of(found[0]))
    with mock.patch.object(candidates, "find", wraps=candidates.find) as searched:
        assert candidates.how_many(request, tree, "n", {"VCPU": 1}, 1000) == expected
        assert candidates.how_many(request, tree, "n", {"VCPU": 1}, 2) == min(expected, 2)
    assert searched.call_count == 2


def test_one_request_has_one_budget_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Each tree had a budget and a line in the log of its own."""
    groups = tuple(
        RequestGroup(suffix=f"_{number}", resources={"VGPU": 2}, required=(frozenset({"GOOD"}),))
        for number in range(15)
    )
    trees = [
        each
        for root in "abc"
        for each in (
            _provider(root, stock={"VGPU": _stock(100)}),
            *(
                _provider(f"{root}{number}", root, root, stock={"VGPU": _stock(3)}, traits=["GOOD"])
                for number in range(14)
            ),
        )
    ]
    spent = Counter[str]()

    def spend(budget: StepBudget, steps: int = 1) -> None:
        spent["steps"] += steps
        real(budget, steps)

    real = StepBudget.spend
    with (
        mock.patch.object(candidates, "MOST_STEPS_OF_A_REQUEST", 25_000),
        mock.patch.object(StepBudget, "spend", spend),
    ):
        assert candidates.find(ResourceRequest(groups=groups, limit=1), trees) == []
    assert 25_000 < spent["steps"] < 26_000
    assert len(caplog.records) == 1


def test_a_sharing_provider_of_another_tree_may_serve_a_group_without_resources() -> None:
    """Here it serves another group, too, and both have to be in one subtree."""
    node = _provider("n", stock={"VCPU": _stock(4)}, aggregates=["rack"])
    disks = _provider("s", stock={"DISK_GB": _stock(9)}, aggregates=["rack"], traits=["GOOD", SHARES_VIA_AGGREGATE])
    groups = (
        RequestGroup(suffix="_a", resources={}, required=(frozenset({"GOOD"}),)),
        RequestGroup(suffix="_b", resources={"DISK_GB": 5}),
        RequestGroup(suffix="_c", resources={"VCPU": 1}),
    )
    request = ResourceRequest(groups=groups, same_subtrees=(frozenset({"_a", "_b"}),))
    [found] = candidates.find(request, [node, disks], ["n"])
    assert found.mappings == {"_a": ("s",), "_b": ("s",), "_c": ("n",)}
    apart = dataclasses.replace(disks, aggregates=frozenset())
    assert candidates.find(request, [node, apart], ["n"]) == []


def _many_of_each(traits: Mapping[str, Sequence[str]]) -> list[Provider]:
    """A tree with 28 providers of each of three classes, of which some have traits."""
    return [
        _provider("n"),
        *(
            _provider(name, "n", "n", stock={resource_class: _stock(1)}, traits=traits.get(name, ()))
            for resource_class in ("CUSTOM_A", "CUSTOM_B", "CUSTOM_C")
            for number in range(28)
            for name in [f"{resource_class}-{number}"]
        ),
    ]


def _three_classes(*required: str) -> ResourceRequest:
    resources = {"CUSTOM_A": 1, "CUSTOM_B": 1, "CUSTOM_C": 1}
    group = RequestGroup(resources=resources, required=tuple(frozenset({name}) for name in required))
    return ResourceRequest(groups=(group,), limit=1)


@pytest.mark.parametrize("last", ["CUSTOM_A-27", "CUSTOM_B-27", "CUSTOM_C-27"])
def test_providers_with_the_required_traits_are_tried_first(last: str) -> None:
    """There are 21,952 choices, more than a search may take steps."""
    steps = RequestSteps()
    tree = _many_of_each({last: ("GOOD",), "CUSTOM_A-26": ("FAST",), "CUSTOM_C-26": ("LARGE",)})
    for required in (("GOOD",), ("GOOD", "FAST") if last != "CUSTOM_A-27" else ("GOOD", "LARGE")):
        steps.most = 100
        [found] = candidates.find(_three_classes(*required), tree, steps=steps)
        assert last in found.allocations
    assert steps.ended_early == 0


def test_a_search_among_too_many_choices_has_ended_early() -> None:
    """Nobody can say of the tree that it lacks what was asked for."""
    steps = RequestSteps()
    assert candidates.find(_three_classes("NOBODY"), _many_of_each({}), steps=steps) == []
    assert steps.ended_early == 0
    alone = _many_of_each({"CUSTOM_A-1": ("GOOD",), "CUSTOM_A-2": ("FAST",)})
    assert candidates.find(_three_classes("GOOD", "FAST"), alone, steps=steps) == []
    assert steps.ended_early == 1


def test_a_group_with_more_choices_than_are_listed_has_ended_early() -> None:
    """Of 5,100 providers those that are listed are in no common subtree with the other group's."""
    device = _provider("near", "n", "n", stock={"CUSTOM_A": _stock(1), "CUSTOM_B": _stock(1)})
    far = [_provider(f"far-{number}", "n", "n", stock={"CUSTOM_A": _stock(1)}) for number in range(5_100)]
    request = ResourceRequest(
        groups=(
            RequestGroup(suffix="_a", resources={"CUSTOM_A": 1}),
            RequestGroup(suffix="_b", resources={"CUSTOM_B": 1}),
        ),
        same_subtrees=(frozenset({"_a", "_b"}),),
        limit=1,
    )
    steps = RequestSteps()
    assert candidates.find(request, [_provider("n"), *far, device], steps=steps) == []
    assert steps.ended_early == 1
    assert candidates.find(request, [_provider("n"), device, *far], steps=steps)


def test_groups_that_a_tree_has_too_little_for_take_no_search() -> None:
    """Nine groups, and eight devices of which each serves one, or two but in other amounts."""
    tree = [
        _provider("n"),
        *(_provider(f"d{number}", "n", "n", stock={"VGPU": _stock(3)}) for number in range(8)),
    ]
    for amounts in ([2] * 9, [1] * 25, [3] * 4 + [2] * 5):
        groups = tuple(
            RequestGroup(suffix=f"_{number}", resources={"VGPU": amount}) for number, amount in enumerate(amounts)
        )
        with mock.patch.object(StepBudget, "spend", side_effect=AssertionError("searched")):
            assert candidates.find(ResourceRequest(groups=groups), tree) == []
        assert candidates.find(ResourceRequest(groups=groups[1:], limit=1), tree)


def _flavor(**specs: str) -> Flavor:
    named = {key.replace("__", ":"): value for key, value in specs.items()}
    return Flavor(id="1", name="f", ram=64, vcpus=2, disk=1, extra_specs=named)


def test_extra_specs_replace_and_add_amounts() -> None:
    flavor = _flavor(
        resources__VCPU="0", resources__VGPU="1", resources_NET__BANDWIDTH="5", trait_NET__CUSTOM_A="required"
    )
    assert extra_specs.node_resources(flavor, None) == {"MEMORY_MB": 64, "DISK_GB": 1}
    groups = extra_specs.resource_request(flavor, None)
    assert groups is not None
    anywhere, one = groups.groups
    assert (anywhere.suffix, anywhere.resources, anywhere.required) == ("", {"VGPU": 1}, ())
    assert (one.suffix, one.resources, one.required) == ("_NET", {"BANDWIDTH": 5}, (frozenset({"CUSTOM_A"}),))
    assert extra_specs.resource_request(_flavor(), None) is None


def test_a_class_of_a_group_is_not_taken_of_the_flavor_too() -> None:
    for name, rest in (
        ("VCPU", {"MEMORY_MB": 64, "DISK_GB": 1}),
        ("MEMORY_MB", {"VCPU": 2, "DISK_GB": 1}),
        ("DISK_GB", {"VCPU": 2, "MEMORY_MB": 64}),
    ):
        group = {f"resources_A__{name}": "3"}
        assert extra_specs.node_resources(_flavor(**group), None) == rest
        request = extra_specs.resource_request(_flavor(**group), None)
        assert request is not None and [each.resources for each in request.groups] == [{name: 3}]
        # Who names both has both, and who names none of it has none.
        assert extra_specs.node_resources(_flavor(**group, **{f"resources__{name}": "5"}), None) == {**rest, name: 5}
        assert extra_specs.node_resources(_flavor(**{f"resources_A__{name}": "0"}), None) == rest


def test_traits_without_a_suffix_may_be_those_of_any_provider_that_serves_the_server() -> None:
    """A node with the trait of its host, and two GPUs below it of which one has the wanted type."""
    image = ImageMeta(id="i", properties={"trait:CUSTOM_HOST": "required"})
    specs = {"resources__VGPU": "1", "trait__CUSTOM_NVIDIA_35": "required", "trait__CUSTOM_OLD": "forbidden"}
    flavor = _flavor(**specs)
    assert extra_specs.node_traits(flavor, image) == (frozenset(), frozenset({"CUSTOM_OLD"}))
    only_node = _flavor(trait__CUSTOM_NVIDIA_35="required")
    assert extra_specs.node_traits(only_node, image)[0] == {"CUSTOM_NVIDIA_35", "CUSTOM_HOST"}
    request = extra_specs.resource_request(flavor, image)
    assert request is not None

    def served(of_node: set[str], *of_gpus: set[str]) -> list[str]:
        stock = {"VGPU": Inventory(1, 0, 1, 8, 1, 1.0, 1, 0)}
        node = Provider("n", "n", None, "n", traits=frozenset(of_node))
        gpus = [
            Provider(f"g{number}", f"g{number}", "n", "n", traits=frozenset(traits), inventories=stock)
            for number, traits in enumerate(of_gpus)
        ]
        return [provider for each in candidates.find(request, [node, *gpus]) for provider in each.allocations]

    assert served({"CUSTOM_HOST"}, {"CUSTOM_NVIDIA_36"}, {"CUSTOM_NVIDIA_35"}) == ["g1"]
    assert served({"CUSTOM_HOST", "CUSTOM_NVIDIA_35"}, set(), {"CUSTOM_OLD"}) == ["g0"]
    assert served(set(), {"CUSTOM_NVIDIA_35"}) == []


def test_dedicated_cpus_follow_from_the_policy_of_flavor_or_image() -> None:
    dedicated = {"PCPU": 2, "MEMORY_MB": 64, "DISK_GB": 1}
    assert extra_specs.node_resources(_flavor(hw__cpu_policy="dedicated"), None) == dedicated
    image = ImageMeta(id="i", properties={"hw_cpu_policy": "dedicated"})
    assert extra_specs.node_resources(_flavor(resources__VGPU="1"), image) == dedicated
    assert extra_specs.node_resources(_flavor(resources__PCPU="2"), None) == dedicated
    assert extra_specs.node_resources(_flavor(resources__PCPU="0", hw__cpu_policy="dedicated"), None) == dedicated
    extra_specs.check(_flavor(resources__PCPU="2", resources__VCPU="0"))
    for specs in ({"resources__PCPU": "2", "resources__VCPU": "2"}, {"resources1__PCPU": "2"}):
        with pytest.raises(Invalid, match="PCPU"):
            extra_specs.check(_flavor(**specs))


def test_the_trait_of_threads_needs_dedicated_cpus_and_no_thread_policy() -> None:
    threads = {"trait__HW_CPU_HYPERTHREADING": "required"}
    prefers = ImageMeta(id="i", properties={"hw_cpu_thread_policy": "prefer"})
    extra_specs.check(_flavor(**threads, resources__PCPU="2"))
    extra_specs.check(_flavor(**threads, hw__cpu_policy="dedicated"))
    for specs, image in (({}, None), ({"hw__cpu_policy": "shared"}, None), ({"resources__PCPU": "2"}, prefers)):
        with pytest.raises(Invalid, match="trait:HW_CPU_HYPERTHREADING"):
            extra_specs.check(_flavor(**threads, **specs), image)


def test_amounts_of_cpus_contradict_a_policy_of_flavor_or_image() -> None:
    image = ImageMeta(id="i", properties={"hw_cpu_policy": "dedicated"})
    for name in ("VCPU", "PCPU"):
        for policy in ("dedicated", "mixed", "shared"):
            with pytest.raises(Invalid, match=f"resources1:{name} .* contradicts the CPU policy {policy}"):
                extra_specs.check(_flavor(**{f"resources1__{name}": "2"}, hw__cpu_policy=policy))
        with pytest.raises(Invalid, match=f"resources:{name} .* contradicts the CPU policy dedicated"):
            extra_specs.check(_flavor(**{f"resources__{name}": "2"}), image)
    extra_specs.check(_flavor(resources__VCPU="0"), image)  # as in Nova, no amount is no contradiction
    extra_specs.check(_flavor(resources__VCPU="2"))


def test_flavor_and_image_must_not_contradict_each_other() -> None:
    image = ImageMeta(id="i", properties={"trait:CUSTOM_A": "required"})
    extra_specs.check(_flavor(trait__CUSTOM_A="required"), image)
    with pytest.raises(Invalid, match="CUSTOM_A is both"):
        extra_specs.check(_flavor(trait__CUSTOM_A="forbidden"), image)
