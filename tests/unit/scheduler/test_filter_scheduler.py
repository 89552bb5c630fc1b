"""The decision: forced and requested hosts, groups, alternates, chance, and what is said when there is no host."""

import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from micronova.objects.errors import NoValidHost
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import GroupSpec, RequestSpec
from micronova.scheduler.filter_scheduler import NOT_ENOUGH, FilterScheduler
from micronova.scheduler.filters.registry import load_filters
from micronova.scheduler.host_table import HostTable, HostView
from micronova.scheduler.weights.base import HostWeigher
from micronova.scheduler.weights.registry import load_weighers
from tests.unit.scheduler.factory import NOW, OPTIONS, a_flavor, a_host, a_scheduler, a_spec, a_table, free_of


def place(table: HostTable, spec: RequestSpec, count: int = 1, **options: Any) -> list[str]:
    decision = a_scheduler(**options).select(table, spec, [f"i{number}" for number in range(count)], now=NOW)
    return [each.selected.host for each in decision.destinations]


def test_the_answer_has_the_names_that_earlier_versions_send() -> None:
    decision = a_scheduler().select(a_table(a_host("h1")), a_spec(), ["i"], now=NOW)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(decision))
    assert set(sent) == {"placements", "explanation"}
    assert set(sent["placements"][0]) == {"instance_uuid", "selected", "alternates"}


def test_a_request_has_the_names_that_earlier_versions_store_and_send() -> None:
    spec = a_spec(server_group=GroupSpec(id="g", policy="affinity"))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(spec))
    assert sent["group"]["id"] == "g"


def test_the_emptiest_host_wins_and_the_reason_is_told() -> None:
    table = a_table(a_host("h1", used={"MEMORY_MB": 4096}), a_host("h2"), a_host("h3", used={"MEMORY_MB": 1024}))
    decision = a_scheduler().select(table, a_spec(), ["i"], now=NOW)
    (destination,) = decision.destinations
    assert destination.selected.host == "h2"
    assert [each.host for each in destination.alternates] == ["h3", "h1"]
    (winner,) = decision.explanation.winners
    assert winner.weighers == {"RAMWeigher": 1.0, "CPUWeigher": 1.0, "DiskWeigher": 1.0}  # it has the most of each
    assert [step.name for step in decision.explanation.filters][:2] == ["Capacity(VCPU)", "RetryFilter"]
    assert free_of(table)["uuid-h2"]["MEMORY_MB"] == 8192 - 1024


def test_a_negative_multiplier_stacks() -> None:
    table = a_table(a_host("h1", used={"MEMORY_MB": 4096}), a_host("h2"))
    multipliers = {"RAMWeigher": -1.0, "CPUWeigher": 0.0, "DiskWeigher": 0.0, "IoOpsWeigher": 0.0}
    assert place(table, a_spec(), 4, multipliers=multipliers) == ["h1"] * 4


def test_processors_are_respected_though_no_default_filter_looks_at_them() -> None:
    table = a_table(a_host("h1", capacity={"VCPU": 2, "MEMORY_MB": 8192, "DISK_GB": 100}))
    with pytest.raises(NoValidHost) as caught:
        place(table, a_spec(flavor=a_flavor(vcpus=3)))
    assert caught.value.message == f"{NOT_ENOUGH}: no host has 3 free vCPUs."
    refused = {"name": "Capacity(VCPU)", "removed": 1, "remaining": 0, "hosts": ("h1",)}
    assert caught.value.details["reasons"] == [refused]


def test_any_resource_class() -> None:
    class Gold(HostWeigher):
        name = "Gold"

        def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
            return hosts.free("CUSTOM_GOLD")

    hosts = [
        a_host(f"h{gold}", capacity={"VCPU": 9, "MEMORY_MB": 9000, "DISK_GB": 90, "CUSTOM_GOLD": gold})
        for gold in (1, 3, 2)
    ]
    weighers = [*load_weighers(with_plugins=False), Gold()]
    scheduler = FilterScheduler(load_filters(OPTIONS), weighers, random=random.Random(1))
    assert scheduler.select(a_table(*hosts), a_spec(), ["i"], now=NOW).destinations[0].selected.host == "h3"


def test_not_enough_for_all_means_none() -> None:
    table = a_table(a_host("h1", used={"MEMORY_MB": 6000}), a_host("h2", used={"MEMORY_MB": 7000}))
    before = free_of(table)
    with pytest.raises(NoValidHost) as caught:
        place(table, a_spec(), 4)
    assert free_of(table) == before
    assert caught.value.details["placed"] == 3
    refused = {"name": "RamFilter", "removed": 2, "remaining": 0, "hosts": ("h1", "h2")}
    assert refused in caught.value.details["reasons"]
    assert Counter(place(table, a_spec(), 3)) == {"h1": 2, "h2": 1}


def test_an_empty_cloud_has_no_valid_host() -> None:
    with pytest.raises(NoValidHost):
        place(HostTable(), a_spec())
    with pytest.raises(NoValidHost):
        place(HostTable(), a_spec(), 2)


def test_a_forced_host_is_not_filtered_but_must_have_room() -> None:
    table = a_table(a_host("h1"), a_host("down", enabled=False, last_seen=0.0, zone="elsewhere"))
    spec = a_spec(force_host="down", availability_zone="nova", ignore_hosts=("down",))
    decision = a_scheduler().select(table, spec, ["i"], now=NOW)
    assert decision.destinations[0].selected.host == "down"
    assert decision.destinations[0].alternates == ()
    assert decision.explanation.forced
    assert place(table, spec, 2) == ["down", "down"]
    with pytest.raises(NoValidHost) as caught:
        place(table, a_spec(force_host="down", flavor=a_flavor(ram=100_000)))
    assert [step["name"] for step in caught.value.details["reasons"] if step["removed"]] == ["Capacity(MEMORY_MB)"]
    with pytest.raises(NoValidHost):
        place(table, a_spec(force_host="nowhere"))


def test_a_forced_node() -> None:
    table = a_table(*(a_host("h", node=f"n{number}", node_uuid=f"u{number}") for number in range(3)))
    for spec in (a_spec(force_host="h", force_node="n2"), a_spec(force_node="n2")):
        decision = a_scheduler().select(table, spec, ["i"], now=NOW)
        assert decision.destinations[0].selected.node == "n2"


def test_a_requested_host_is_filtered() -> None:
    table = a_table(a_host("h1"), a_host("h2", enabled=False))
    assert place(table, a_spec(requested_host="h1")) == ["h1"]
    with pytest.raises(NoValidHost) as caught:
        place(table, a_spec(requested_host="h2"))
    assert caught.value.details["hosts"] == 1
    assert caught.value.details["reasons"][-1]["name"] == "ComputeFilter"


def group(policy: str, most: int = 1, **hosts: int) -> RequestSpec:
    return a_spec(server_group=GroupSpec(id="g", policy=policy, max_server_per_host=most, hosts=hosts))


def test_groups() -> None:
    def cloud() -> HostTable:
        return a_table(*(a_host(f"h{number}", used={"MEMORY_MB": 512 * number}) for number in range(4)))

    assert place(cloud(), group("anti-affinity", h0=1), 3) == ["h1", "h2", "h3"]
    with pytest.raises(NoValidHost) as caught:
        place(cloud(), group("anti-affinity", h0=1), 4)
    assert caught.value.details["reasons"][-1]["name"] == "ServerGroupAntiAffinityFilter"
    assert Counter(place(cloud(), group("anti-affinity", 2, h0=2), 6)) == {"h1": 2, "h2": 2, "h3": 2}
    assert place(cloud(), group("affinity"), 3) == ["h0", "h0", "h0"]
    assert place(cloud(), group("affinity", h3=1), 3) == ["h3", "h3", "h3"]
    with pytest.raises(NoValidHost):  # the host has no room for nine
        place(cloud(), group("affinity"), 9)
    soft = {"ServerGroupSoftAffinityWeigher": 100.0, "ServerGroupSoftAntiAffinityWeigher": 100.0}
    assert place(cloud(), group("soft-affinity", h2=1), 3, multipliers=soft) == ["h2", "h2", "h2"]
    assert set(place(cloud(), group("soft-anti-affinity"), 4, multipliers=soft)) == {"h0", "h1", "h2", "h3"}
    assert len(place(cloud(), group("soft-anti-affinity"), 8, multipliers=soft)) == 8


def test_the_first_member_of_an_affinity_group_has_alternates() -> None:
    decision = a_scheduler().select(a_table(a_host("h1"), a_host("h2")), group("affinity"), ["i"], now=NOW)
    assert [each.host for each in decision.destinations[0].alternates] == ["h2"]


def test_alternates() -> None:
    hosts = [a_host(f"h{number}", used={"MEMORY_MB": number}) for number in range(8)]
    hosts.append(a_host("h0", node="second", node_uuid="second"))
    decision = a_scheduler(max_attempts=4).select(a_table(*hosts), a_spec(), ["i"], now=NOW)
    assert decision.destinations[0].selected.host == "h0"
    assert [each.host for each in decision.destinations[0].alternates] == ["h1", "h2", "h3"]
    decision = a_scheduler(max_attempts=1).select(a_table(*hosts), a_spec(), ["i"], now=NOW)
    assert decision.destinations[0].alternates == ()
    for destination in (
        a_scheduler(max_attempts=3).select(a_table(*hosts), a_spec(), list("abcd"), now=NOW).destinations
    ):
        assert len(destination.alternates) == 2
        assert destination.selected.host not in {each.host for each in destination.alternates}


def test_host_subset_size_chooses_at_random_among_the_best() -> None:
    scheduler = a_scheduler(host_subset_size=3)
    seen = Counter[str]()
    for _ in range(200):
        table = a_table(*(a_host(f"h{number}", used={"MEMORY_MB": 100 * number}) for number in range(6)))
        seen[scheduler.select(table, a_spec(), ["i"], now=NOW).destinations[0].selected.host] += 1
    assert set(seen) == {"h0", "h1", "h2"}


@pytest.mark.parametrize(("shuffle", "expected"), [(False, {"h0"}), (True, {"h0", "h1", "h2"})])
def test_equal_hosts_are_shuffled_when_asked(shuffle: bool, expected: set[str]) -> None:
    scheduler = a_scheduler(shuffle_best_same_weighed_hosts=shuffle)
    seen = set()
    for _ in range(100):
        hosts = [a_host(f"h{number}") for number in range(3)]
        table = a_table(*hosts, a_host("small", used={"MEMORY_MB": 100}))
        seen.add(scheduler.select(table, a_spec(), ["i"], now=NOW).destinations[0].selected.host)
    assert seen == expected


def test_who_holds_resources_stays() -> None:
    table = a_table(a_host("h1"), a_host("h2", used={"MEMORY_MB": 8192}), a_host("h3", used={"MEMORY_MB": 4096}))
    before = free_of(table)
    decision = a_scheduler().select(table, a_spec(), ["a"], now=NOW, held={"a": "uuid-h2"})
    assert decision.destinations[0].selected.host == "h2"
    assert [each.host for each in decision.destinations[0].alternates] == ["h1", "h3"]
    assert free_of(table) == before
    decision = a_scheduler().select(table, a_spec(), ["a", "b"], now=NOW, held={"a": "uuid-h2"})
    assert [each.selected.host for each in decision.destinations] == ["h2", "h1"]
    full = a_table(a_host("h2", used={"MEMORY_MB": 8192}))
    assert a_scheduler().select(full, a_spec(), ["a"], now=NOW, held={"a": "uuid-h2"}).destinations[0].alternates == ()


class Odd(HostWeigher):
    """A weigher that misbehaves in the way it is told."""

    name = "Odd"

    def __init__(self, answer: Any) -> None:
        super().__init__(1.0)
        self.answer = answer

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return np.asarray(self.answer)


@pytest.mark.parametrize("answer", [RuntimeError("no"), [1.0], [1.0, float("nan")], "text"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_faulty_weigher_has_no_say(answer: Any, count: int, caplog: pytest.LogCaptureFixture) -> None:
    weighers = [*load_weighers(with_plugins=False), Odd(answer)]
    scheduler = FilterScheduler(load_filters(OPTIONS), weighers, random=random.Random(1))
    table = a_table(a_host("h1", used={"MEMORY_MB": 5000}), a_host("h2"))
    uuids = ["a", "b"][:count]
    assert scheduler.select(table, a_spec(), uuids, now=NOW).destinations[0].selected.host == "h2"
    assert "Odd" in caplog.text


def test_an_image_is_checked_on_one_host_that_may_be_full() -> None:
    full = {"VCPU": 1, "MEMORY_MB": 1, "DISK_GB": 1}
    table = a_table(a_host("h1", capacity=full, used=full), a_host("h2"))
    before = free_of(table)
    image = ImageMeta(id="i", properties={"hw_architecture": "x86_64"})
    explanation = a_scheduler().check_image(table, a_spec(image=image), "uuid-h1", now=NOW)
    assert [step.name for step in explanation.filters] == ["ImagePropertiesFilter"]
    assert free_of(table) == before
    foreign = ImageMeta(id="i", properties={"hw_architecture": "s390x"})
    for spec, node in ((a_spec(image=foreign), "uuid-h1"), (a_spec(image=image), "uuid-gone")):
        with pytest.raises(NoValidHost, match="No valid host"):
            a_scheduler().check_image(table, spec, node, now=NOW)
