"""The decision: forced and requested hosts, groups, alternates, chance, and what is said when there is no host."""

import asyncio
import itertools
import random
import re
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from micronova.objects import device_fitting, fitting
from micronova.objects.bounded_search import StepMeter
from micronova.objects.errors import NoValidHost
from micronova.objects.fitting import fit
from micronova.objects.image import ImageMeta
from micronova.objects.pci_devices import parse_aliases
from micronova.objects.scheduling import GroupSpec, HostState, RequestSpec
from micronova.objects.topology import (
    NOTHING_USED,
    HostCell,
    NodeTopology,
    PciDevice,
    TopologyRequest,
    TopologyUse,
    encode,
)
from micronova.scheduler.filter_scheduler import FilterScheduler
from micronova.scheduler.filters.base import FilterOptions
from micronova.scheduler.filters.registry import load_filters
from micronova.scheduler.host_table import HostTable
from micronova.scheduler.host_view import HostView
from micronova.scheduler.no_valid_host import NOT_ENOUGH
from micronova.scheduler.prefilters import Prefilters
from micronova.scheduler.topologies import LONGEST_AT_ONCE, MOST_STEPS_AT_ONCE, MOST_STEPS_OF_A_REQUEST
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
    assert [step.name for step in decision.explanation.filters][:3] == [
        "RetryFilter",
        "AvailabilityZoneFilter",
        "Capacity(VCPU)",
    ]
    assert free_of(table)["uuid-h2"]["MEMORY_MB"] == 8192 - 1024


def test_a_negative_multiplier_stacks() -> None:
    table = a_table(a_host("h1", used={"MEMORY_MB": 4096}), a_host("h2"))
    multipliers = {"RAMWeigher": -1.0, "CPUWeigher": 0.0, "DiskWeigher": 0.0, "IoOpsWeigher": 0.0}
    assert place(table, a_spec(), 4, multipliers=multipliers) == ["h1"] * 4


def test_processors_are_respected_though_no_default_filter_looks_at_them() -> None:
    table = a_table(a_host("h1", capacity={"VCPU": 2, "MEMORY_MB": 8192, "DISK_GB": 100}))
    with pytest.raises(NoValidHost) as caught:
        place(table, a_spec(flavor=a_flavor(vcpus=3)))
    assert caught.value.message == f"{NOT_ENOUGH}: no host has 3 free vCPUs; 1 host has too little room."
    refused = {"name": "Capacity(VCPU)", "removed": 1, "remaining": 0, "hosts": ("h1",)}
    assert caught.value.details["reasons"][-1] == refused


def test_no_server_is_larger_than_its_host() -> None:
    """One host is full, one is too small: of one server it gets at most what it has, whatever the ratio."""
    full = a_host("h1", used={"VCPU": 30}, max_unit={"VCPU": 8})
    table = a_table(full, a_host("h2", max_unit={"VCPU": 4}))
    assert place(table, a_spec(flavor=a_flavor(vcpus=4)), 7) == ["h2"] * 7
    for chosen in ({}, {"force_host": "h2"}):
        table = a_table(full, a_host("h2", max_unit={"VCPU": 4}))
        with pytest.raises(NoValidHost) as caught:
            place(table, a_spec(flavor=a_flavor(vcpus=5), **chosen))
        assert "is large enough for 5 vCPUs" in caught.value.message and "too small" in caught.value.message
        assert caught.value.details["reasons"][-1]["name"] == "MaxUnit(VCPU)"
        assert caught.value.details["reasons"][-1]["hosts"] == ("h2",)
    table.update([a_host("h3", max_unit={"VCPU": 8})])
    assert place(table, a_spec(flavor=a_flavor(vcpus=5)), 6) == ["h3"] * 6


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


def test_a_forced_host_need_not_be_up_but_must_have_room() -> None:
    table = a_table(a_host("h1"), a_host("down", last_seen=0.0))
    spec = a_spec(force_host="down")
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


@pytest.mark.parametrize(
    ("changes", "wrong", "words"),
    [
        ({"availability_zone": "west"}, {}, "is in another availability zone: "
         "the server needs one that is in the availability zone west"),
        ({"ignore_hosts": ("h1",)}, {}, "is excluded: the server needs one that was not tried before"),
        ({}, {"enabled": False}, "is disabled: the server needs one that is enabled"),
        ({}, {"forced_down": True}, "is down: the server needs one that is up"),
        ({"server_group": GroupSpec(id="g", policy="anti-affinity", hosts={"h1": 1})}, {},
         "has members of the group: the server needs one that is without a member of the anti-affinity group"),
        ({"server_group": GroupSpec(id="g", policy="affinity", hosts={"h2": 1})}, {},
         "has no member of the group: the server needs one that has the other members of the affinity group"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("named", ["force_host", "force_node", "requested_host"])
def test_what_holds_for_forced_hosts_too(
    changes: dict[str, Any], wrong: dict[str, Any], words: str, named: str
) -> None:
    table = a_table(a_host("h1", **wrong), a_host("h2"))
    with pytest.raises(NoValidHost) as caught:
        place(table, a_spec(**{named: "h1"}, **changes))
    assert f"{NOT_ENOUGH}: the only possible host {words}" in caught.value.message


def test_a_move_by_force_goes_to_a_disabled_host() -> None:
    assert place(a_table(a_host("h1", enabled=False)), a_spec(force_host="h1", ignore_status=True)) == ["h1"]


NOVA_DEFAULT = (
    "ComputeFilter",
    "ComputeCapabilitiesFilter",
    "ImagePropertiesFilter",
    "ServerGroupAntiAffinityFilter",
    "ServerGroupAffinityFilter",
)


@pytest.mark.parametrize("names", [NOVA_DEFAULT, ("AllHostsFilter",), ("RamFilter", "AvailabilityZoneFilter")])
def test_some_rules_hold_whichever_filters_are_enabled(names: tuple[str, ...]) -> None:
    """The zone, excluded hosts, the server group, and that the host is enabled."""
    scheduler = FilterScheduler(load_filters(OPTIONS, names), [], random=random.Random(1))
    table = a_table(
        a_host("h1"), a_host("h2", zone="west"), a_host("h3", zone="west", enabled=False), a_host("h4", zone="west")
    )

    def chosen(**changes: Any) -> set[str]:
        decision = scheduler.preview(table, a_spec(**changes), ["i"], now=NOW)
        [destination] = decision.destinations
        return {destination.selected.host, *(each.host for each in destination.alternates)}

    assert chosen() == {"h1", "h2", "h4"}
    assert chosen(availability_zone="west") == {"h2", "h4"}
    assert chosen(ignore_hosts=("h1", "h2")) == {"h4"}
    apart = GroupSpec(id="g", policy="anti-affinity", hosts={"h1": 1, "h2": 1})
    assert chosen(server_group=apart) == {"h4"}
    assert chosen(server_group=msgspec.structs.replace(apart, policy="affinity")) == {"h1", "h2"}


def test_a_fault_with_many_reasons_still_says_for_how_many_servers_there_is_room() -> None:
    """It was cut at its end after 255 characters."""
    many = {
        "used": {"MEMORY_MB": 8000},
        "enabled": False,
        "last_seen": 0.0,
        "traits": ("CUSTOM_OLD",),
        "max_unit": {"VCPU": 1},
        "supported": (("s390x", "kvm", "hvm"),),
    }
    zone = "a-zone-of-which-somebody-has-chosen-a-very-long-name" * 2
    hosts = [a_host(f"h{n}{each}", zone=zone, **{each: many[each]}) for n in range(150) for each in many]
    table = a_table(*hosts, *(a_host(f"m{n}", zone=zone) for n in range(2)))
    group = GroupSpec(id="g", policy="anti-affinity", hosts={"m0": 1})
    flavor = a_flavor(vcpus=2, extra_specs={"trait:CUSTOM_OLD": "forbidden"})
    image = ImageMeta(id="i", properties={"hw_architecture": "x86_64"})
    spec = a_spec(availability_zone=zone, ignore_hosts=("m9",), server_group=group, flavor=flavor, image=image)
    with pytest.raises(NoValidHost) as caught:
        place(table, spec, 30)
    message = caught.value.message
    assert len(message) <= 255
    assert message.endswith(" There is room for 1 of 30 servers.")
    assert "; 150 hosts " in message and " are refused for other reasons." in message
    counts = [int(each) for each in re.findall(r"\d+ (?=host|are|is|have|has|cannot)", message)]
    assert sum(counts) == len(hosts) + 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"availability_zone": "east", "flavor": a_flavor(ram=65536)},
         "no host in the availability zone east has 64 GiB of free memory and is enabled; "
         "2 hosts have too little room, 1 is disabled."),
        ({"availability_zone": "west", "ignore_hosts": ("h4", "h5")},
         "no other host is in the availability zone west."),
        ({"availability_zone": "north"}, "no host is in the availability zone north."),
        ({"ignore_hosts": ("h1", "h2", "h3", "h4", "h5")}, "there is no other host."),
        ({"ignore_hosts": ("h5",), "flavor": a_flavor(ram=1500)},
         "no other host has 1500 MiB of free memory, is enabled and is up; "
         "2 hosts have too little room, 1 is disabled, 1 is down."),
    ],
)  # fmt: skip
def test_users_read_how_many_hosts_were_refused(changes: dict[str, Any], words: str) -> None:
    table = a_table(
        a_host("h1", zone="east", used={"MEMORY_MB": 8000}),
        a_host("h2", zone="east", used={"MEMORY_MB": 8000}),
        a_host("h3", zone="east", enabled=False, capacity={"VCPU": 8, "MEMORY_MB": 1 << 20, "DISK_GB": 100}),
        a_host("h4", zone="west", last_seen=0.0),
        a_host("h5", zone="west"),
    )
    with pytest.raises(NoValidHost) as caught:
        place(table, a_spec(**changes))
    assert caught.value.message == f"{NOT_ENOUGH}: {words}"


def test_users_read_which_traits_no_host_has() -> None:
    extra = {"trait:CUSTOM_GPU": "required", "trait:CUSTOM_OLD": "forbidden"}
    told = "no host has the required traits and none that is forbidden"
    for more, listed in (
        ({}, " (CUSTOM_GPU, not CUSTOM_OLD)"),
        ({"trait:CUSTOM_" + "A" * 80: "required"}, ""),  # no room for so long a name
    ):
        table = a_table(a_host("h1", traits=("CUSTOM_OLD", "CUSTOM_GPU")), a_host("h2"))
        with pytest.raises(NoValidHost) as caught:
            place(table, a_spec(flavor=a_flavor(extra_specs={**extra, **more})))
        assert caught.value.message == f"{NOT_ENOUGH}: {told}{listed}; 2 hosts have other traits."


def test_nothing_is_said_of_filters_after_the_one_that_leaves_no_host() -> None:
    small = {"VCPU": 1, "MEMORY_MB": 512, "DISK_GB": 1}
    table = a_table(a_host("h1", capacity=small, max_unit=small))
    with pytest.raises(NoValidHost) as caught:
        place(table, a_spec(flavor=a_flavor(vcpus=8)))
    assert [step["removed"] for step in caught.value.details["reasons"]][-1] == 1


def test_a_host_that_was_forced_down_is_not_called_disabled() -> None:
    """An operator who reads "disabled" finds an enabled service. Of two steps that ask for the same, one is told."""
    table = a_table(
        a_host("h1", forced_down=True), a_host("h2", last_seen=0.0), a_host("h3", forced_down=True, enabled=False)
    )
    with pytest.raises(NoValidHost) as caught:
        place(table, a_spec())
    assert caught.value.message == f"{NOT_ENOUGH}: no host is enabled and is up; 2 hosts are down, 1 is disabled."


def test_the_sentence_of_a_request_for_several_counts_what_was_placed() -> None:
    table = a_table(
        a_host("h1", used={"MEMORY_MB": 6000}), a_host("h2", used={"MEMORY_MB": 8000}), a_host("h3", enabled=False)
    )
    with pytest.raises(NoValidHost) as caught:
        place(table, a_spec(), 30)
    told = "no host has 1 GiB of free memory and is enabled; 2 hosts have too little room, 1 is disabled."
    assert caught.value.message == f"{NOT_ENOUGH}: {told} There is room for 2 of 30 servers."


def test_the_sentence_fits_into_a_fault() -> None:
    """If there are too many requirements, those that users read are the counts."""
    table = a_table(
        a_host("h1", used={"MEMORY_MB": 8000}),
        a_host("h2", used={"DISK_GB": 99}),
        a_host("h3", enabled=False),
        a_host("h4", last_seen=0.0),
        a_host("h5"),
    )
    apart = GroupSpec(id="g", policy="anti-affinity", max_server_per_host=1, hosts={"h5": 1})
    with pytest.raises(NoValidHost) as caught:
        place(table, a_spec(server_group=apart, availability_zone="nova", flavor=a_flavor(ram=1500)))
    told = "2 hosts have too little room, 1 is disabled, 1 is down, 1 has members of the group."
    assert len(caught.value.message) <= 255 and caught.value.message.endswith(told)
    assert "no host in the availability zone nova meets all requirements of the request;" in caught.value.message


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
    assert caught.value.details["reasons"][-1]["name"] == "ComputeStatus"


def group(policy: str, most: int = 1, **hosts: int) -> RequestSpec:
    return a_spec(server_group=GroupSpec(id="g", policy=policy, max_server_per_host=most, hosts=hosts))


@pytest.mark.parametrize("named", ["requested_host", "force_host"])
def test_the_nodes_of_a_named_host_are_filled_after_another_host_was_removed(named: str) -> None:
    """The rows of the host are then in another order: the last row of the table has taken the place of the removed."""
    nodes = [a_host(f"n{n}", host="h", capacity={"VCPU": 32, "MEMORY_MB": 2048, "DISK_GB": 100}) for n in range(3)]
    table = a_table(a_host("gone"), *nodes)
    table.remove(["uuid-gone"])
    spec = a_spec(**{named: "h"})
    decision = a_scheduler().select(table, spec, [f"i{n}" for n in range(6)], now=NOW)
    assert Counter(each.selected.node for each in decision.destinations) == {"n0": 2, "n1": 2, "n2": 2}
    with pytest.raises(NoValidHost):
        a_scheduler().select(table, spec, ["i6"], now=NOW)


def test_a_server_is_not_its_own_alternate_after_another_host_was_removed() -> None:
    table = a_table(a_host("gone"), *(a_host(f"n{n}", host="h") for n in range(3)))
    table.remove(["uuid-gone"])
    decision = a_scheduler().select(table, a_spec(requested_host="h"), ["i"], now=NOW)
    assert decision.destinations[0].alternates == ()


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


def test_a_preview_counts_nothing_of_who_holds_resources_of_a_node_that_is_gone() -> None:
    table = a_table(a_host("h1"), a_host("h2"))
    before = free_of(table)
    held = {"a": "uuid-gone", "b": "uuid-h2"}
    decision = a_scheduler().preview(table, a_spec(), ["a", "b"], now=NOW, held=held)
    assert decision.destinations[1].selected.host == "h2"
    assert free_of(table) == before


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


def test_a_rebuild_asks_only_what_the_new_image_asks_for() -> None:
    """As in Nova: the server is there, though its host is smaller now, disabled, or has lost a trait of the flavor."""
    small = {"VCPU": 1, "MEMORY_MB": 512, "DISK_GB": 1}
    gpu = ImageMeta(id="i", properties={"trait:CUSTOM_GPU": "required"})
    flavor = a_flavor(vcpus=8, extra_specs={"trait:CUSTOM_SSD": "required"})
    kept = (("kept", {"trait:CUSTOM_NEW": "required", "filter_tenant_id": "others"}),)
    of_host: dict[str, Any] = {"capacity": small, "used": small, "max_unit": small, "enabled": False}
    table = a_table(
        a_host("h1", aggregates=kept, **of_host), a_host("h2", aggregates=kept, traits=("CUSTOM_GPU",), **of_host)
    )
    on = Prefilters(tenants=True, tenants_need_aggregates=True, isolated_aggregates=True, image_types=True)
    scheduler = FilterScheduler(load_filters(OPTIONS), [], random=random.Random(1), prefilters=on)
    plain = ImageMeta(id="i", disk_format="raw")
    scheduler.check_image(table, a_spec(flavor=flavor, image=plain), "uuid-h1", now=NOW)
    scheduler.check_image(table, a_spec(flavor=flavor, image=gpu), "uuid-h2", now=NOW)
    with pytest.raises(NoValidHost, match="the only possible host has other traits"):
        scheduler.check_image(table, a_spec(flavor=flavor, image=gpu), "uuid-h1", now=NOW)


# --- requests that take long to compare with each kind of host


def test_nothing_is_looked_for_before_a_decision_that_needs_no_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is found by its name in all rows of the table: once for the decision, and not once per filter."""
    searches: list[str | None] = []
    find_rows = HostTable.find_rows

    def counted(table: HostTable, host: str | None, node: str | None) -> npt.NDArray[np.intp]:
        searches.append(node)
        return find_rows(table, host, node)

    monkeypatch.setattr(HostTable, "find_rows", counted)
    table = a_table(a_host("h1"), a_host("h2"))
    asyncio.run(a_scheduler().prepare(table, a_spec(requested_node="h2")))
    assert searches == []
    a_scheduler().select(table, a_spec(requested_node="h2"), ["i"], now=NOW)
    assert searches == ["h2"]


ADAPTERS = parse_aliases(
    [
        {"name": "pf", "vendor_id": "8086", "product_id": "0001", "device_type": "type-PF"},
        {"name": "vf", "vendor_id": "8086", "product_id": "0002", "device_type": "type-VF"},
    ]
)
SLOW = a_spec(
    flavor=a_flavor(ram=8192, vcpus=8, disk=1, extra_specs={"pci_passthrough:alias": "pf:1,vf:1"}),
    image=ImageMeta(id="i", properties={"hw_numa_nodes": "8", "hw_pci_numa_affinity_policy": "required"}),
)
"""A virtual function, and a physical one that is not its own: each host has one family, so that no way is found."""


def _adapter(number: int) -> tuple[PciDevice, ...]:
    address = f"0000:0{number}:00."
    known: dict[str, Any] = {"vendor_id": "8086", "numa_node": number - 1}
    return (
        PciDevice(address=f"{address}0", product_id="0001", dev_type="type-PF", **known),
        *(
            PciDevice(address=f"{address}{n}", product_id="0002", dev_type="type-VF", parent=f"{address}0", **known)
            for n in range(1, 8)
        ),
    )


def _slow_host(number: int, adapters: int = 1) -> HostState:
    cells = tuple(
        HostCell(id=cell, memory_mb=65536 + number, shared=tuple(range(cell * 8, cell * 8 + 8))) for cell in range(16)
    )
    devices = tuple(device for each in range(adapters) for device in _adapter(each + 1))
    amounts = {"VCPU": 512, "MEMORY_MB": 1 << 20, "DISK_GB": 10_000}
    return a_host(
        f"h{number}",
        total=amounts,
        capacity=amounts,
        used=dict.fromkeys(amounts, 0),
        topology=encode(NodeTopology(cells=cells, devices=devices)),
        held=encode(NOTHING_USED),
    )


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of each kind of host that was compared with a request."""
    steps: list[int] = []

    def counted(topology: NodeTopology, use: TopologyUse, request: TopologyRequest, meter: StepMeter) -> Any:
        before = meter.steps
        try:
            return fit(topology, use, request, meter)
        finally:
            steps.append(meter.steps - before)

    monkeypatch.setattr("micronova.scheduler.filters.topology.fit", counted)
    return steps


def _slow_scheduler() -> FilterScheduler:
    filters = load_filters(FilterOptions(service_down_time=60.0, pci_aliases=ADAPTERS))
    return FilterScheduler(filters, [], random=random.Random(7), aliases=ADAPTERS)


def test_a_decision_compares_kinds_of_hosts_for_a_bounded_time(compared: list[int]) -> None:
    """Each kind took 0.1 s, however many there were."""
    table = a_table(*map(_slow_host, range(5)))
    of_one_kind = fitting.MOST_STEPS + device_fitting.MOST_STEPS
    for decisions in range(1, 4):
        with pytest.raises(NoValidHost, match="were not compared"):
            _slow_scheduler().select(table, SLOW, ["i"], now=NOW)
        assert sum(compared) <= decisions * (MOST_STEPS_AT_ONCE + of_one_kind)
    assert len(compared) == 3  # what one decision has found, the next does not look for


def test_the_fault_says_how_many_hosts_were_not_compared(compared: list[int]) -> None:
    """A long sentence lost it, and counted them as hosts without room."""
    table = a_table(*map(_slow_host, range(5)))
    spec = msgspec.structs.replace(SLOW, availability_zone="nova", ignore_hosts=("elsewhere",))
    with pytest.raises(NoValidHost) as caught:
        _slow_scheduler().select(table, spec, ["i"], now=NOW)
    assert caught.value.message.startswith(
        f"{NOT_ENOUGH}: no other host in the availability zone nova is known to meet all requirements of the request; "
        "4 hosts were not compared, 1 has no such"
    )
    assert caught.value.details["uncompared"] == 4


async def test_what_takes_long_is_found_before_the_decision_and_others_run_meanwhile(compared: list[int]) -> None:
    """The request has steps for some kinds; the next one with the same flavor goes on with the others."""
    hosts = 12
    table = a_table(*map(_slow_host, range(hosts)), _slow_host(hosts, adapters=2))
    turns: list[int] = []

    async def another_task() -> None:
        while True:
            turns.append(len(compared))
            await asyncio.sleep(0)

    other = asyncio.create_task(another_task())
    scheduler = _slow_scheduler()
    await scheduler.prepare(table, SLOW)
    first = len(compared)
    assert first < hosts and sum(compared) < 1.2 * MOST_STEPS_OF_A_REQUEST
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 2
    with pytest.raises(NoValidHost, match="were not compared"):
        scheduler.select(table, SLOW, ["i"], now=NOW)
    while len(compared) <= hosts:
        await scheduler.prepare(table, SLOW)
    other.cancel()
    decision = scheduler.select(table, SLOW, ["i"], now=NOW)
    assert decision.destinations[0].selected.host == f"h{hosts}"


async def test_others_run_after_a_short_time_however_few_steps_a_kind_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read what a host with many devices has takes milliseconds; 500 kinds were one stretch."""
    time = 0.0
    compared, turns = [], []

    def compare(topology: NodeTopology, *rest: Any) -> Any:
        nonlocal time
        time += LONGEST_AT_ONCE / 4
        compared.append(topology)
        return fit(topology, *rest)

    async def another_task() -> None:
        while True:
            turns.append(len(compared))
            await asyncio.sleep(0)

    monkeypatch.setattr("micronova.scheduler.filters.topology.fit", compare)
    table = HostTable(lambda: time)
    table.update(_slow_host(number, adapters=2) for number in range(40))
    other = asyncio.create_task(another_task())
    await _slow_scheduler().prepare(table, SLOW)
    other.cancel()
    assert len(compared) == 40
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 5


async def test_only_hosts_in_the_zone_with_such_devices_are_compared(compared: list[int]) -> None:
    """The time of a request went to hosts that cannot take it."""
    elsewhere = [msgspec.structs.replace(_slow_host(number), zone="elsewhere") for number in range(6)]
    without = [_slow_host(number, adapters=0) for number in range(6, 12)]
    table = a_table(*elsewhere, *without, _slow_host(12, adapters=2))
    scheduler, spec = _slow_scheduler(), msgspec.structs.replace(SLOW, availability_zone="nova")
    await scheduler.prepare(table, spec)
    decision = scheduler.select(table, spec, ["i"], now=NOW)
    assert [each.selected.host for each in decision.destinations] == ["h12"]
    assert len(compared) == 1


async def test_hosts_that_are_gone_are_not_compared(compared: list[int]) -> None:
    """The table changes while a request is compared with hosts."""
    table = a_table(*map(_slow_host, range(6)))
    asked = asyncio.create_task(_slow_scheduler().prepare(table, SLOW))
    await asyncio.sleep(0)
    table.remove([f"uuid-h{number}" for number in range(6)])
    await asked
    assert 0 < len(compared) < 6
