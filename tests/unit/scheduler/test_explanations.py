"""What is kept of a decision, and that a decision which is only tried leaves no trace."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from micronova.objects.errors import NoValidHost
from micronova.objects.explanation import (
    LONGEST_ERROR,
    MOST_NAMED,
    Explanation,
    FilterStep,
    Winner,
    explanation_of,
    sentences,
)
from micronova.objects.fleet import NOT_CONSIDERED, NOT_REFUSED, Use
from micronova.objects.scheduling import RequestSpec
from micronova.scheduler import fleet
from micronova.scheduler.filter_scheduler import FilterScheduler, RemovedBy
from micronova.scheduler.filters.base import HostFilter
from micronova.scheduler.host_columns import Bools
from micronova.scheduler.host_table import HostTable
from micronova.scheduler.host_view import HostView
from tests.unit.scheduler.factory import NOW, OPTIONS, a_flavor, a_host, a_scheduler, a_spec, a_table, held_of


def whole(table: HostTable) -> list[Any]:
    """Give everything that the table knows."""
    return [table.state(row) for row in range(len(table))]


def test_a_filter_names_some_of_the_hosts_that_it_removed() -> None:
    table = a_table(*(a_host(f"h{number}", enabled=number < 2) for number in range(50)))
    decision = a_scheduler().select(table, a_spec(), ["i"], now=NOW)
    [step] = [step for step in decision.explanation.filters if step.removed]
    assert (step.name, step.entered, step.removed, step.remaining) == ("ComputeStatus", 50, 48, 2)
    assert step.hosts == tuple(f"h{number}" for number in range(2, 2 + MOST_NAMED))


def test_the_error_of_a_filter_is_cut() -> None:
    class Chatty(HostFilter):
        name = "Chatty"

        def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
            raise RuntimeError("x" * 1_000_000)

    scheduler = FilterScheduler([Chatty(OPTIONS)], a_scheduler().weighers, random=a_scheduler()._random)
    with pytest.raises(NoValidHost) as refused:
        scheduler.select(a_table(a_host("h1")), a_spec(), ["i"], now=NOW)
    explanation = explanation_of(refused.value)
    assert explanation is not None
    assert len(explanation.filters[-1].error) == LONGEST_ERROR


def test_what_one_server_keeps_of_a_large_fleet_is_small() -> None:
    """However many hosts there are, and however long their names are."""
    states = [a_host(f"{'h' * 200}{number}", enabled=False, used={"DISK_GB": number % 101}) for number in range(2000)]
    with pytest.raises(NoValidHost) as caught:
        a_scheduler().select(a_table(*states), a_spec(flavor=a_flavor(disk=50)), ["i"], now=NOW)
    assert len(msgspec.json.encode(caught.value.details["reasons"])) < 8000


def test_each_server_of_a_request_keeps_its_own_weights() -> None:
    """Two on one host: the second finds it fuller."""
    table = a_table(a_host("h1"), a_host("h2", used={"MEMORY_MB": 2500, "DISK_GB": 25, "VCPU": 9}))
    decision = a_scheduler({"IoOpsWeigher": 0.0}).select(table, a_spec(), ["a", "b", "c"], now=NOW)
    first, second, third = (decision.explanation.of_one(uuid, "h1", "h1", "") for uuid in ("a", "b", "c"))
    for own, winner in zip((first, second, third), decision.explanation.winners, strict=True):
        assert own.winners == (msgspec.structs.replace(winner, instance_uuid=""),)
    assert decision.explanation.of_one("b", "h1", "h1", "operation").filters == ()


class CountedWinners(tuple[Winner, ...]):
    """Winners that count how often somebody looks through them."""

    looks = 0

    def __iter__(self) -> Iterator[Winner]:
        type(self).looks += 1
        return super().__iter__()


def test_the_winners_of_a_request_are_looked_through_once() -> None:
    """For each server all of them were: a million for a request of 1,000."""
    winners = CountedWinners(Winner(host="h", node="h", weight=n, instance_uuid=f"i{n}") for n in range(100))
    told = Explanation(hosts=1, winners=winners)
    assert [told.of_one(f"i{n}", "h", "h", "").winners[0].weight for n in range(100)] == list(range(100))
    assert CountedWinners.looks == 1


def test_a_scheduler_of_an_older_version_names_no_servers() -> None:
    told = Explanation(hosts=2, winners=(Winner(host="h1", node="h1", weight=1.5), Winner(host="h2", node="h2")))
    assert told.of_one("a", "h1", "h1", "").winners == (Winner(host="h1", node="h1", weight=1.5),)


@pytest.mark.parametrize("count", [1, 5, 100])
@pytest.mark.parametrize("extra_specs", [{}, {"hw:numa_nodes": "1"}])
def test_a_decision_that_is_only_tried_leaves_the_table_as_it_was(count: int, extra_specs: dict[str, str]) -> None:
    table = a_table(a_host("h1"), a_host("h2", used={"MEMORY_MB": 4096}))
    before, held = whole(table), held_of(table)
    spec = a_spec(flavor=a_flavor(extra_specs=extra_specs))
    try:
        tried = a_scheduler().preview(table, spec, [f"i{number}" for number in range(count)], now=NOW)
        assert len(tried.destinations) == count
    except NoValidHost:
        pass
    assert (whole(table), held_of(table)) == (before, held)


def test_every_host_has_the_filter_that_removed_it() -> None:
    table = a_table(
        a_host("h1"),
        a_host("h2", enabled=False),
        a_host("h3", last_seen=0.0, zone="east"),
        a_host("h10", used={"MEMORY_MB": 8000}, num_instances=7),
    )
    removed_by = RemovedBy()
    decision = a_scheduler().preview(table, a_spec(), ["i"], now=NOW, removed_by=removed_by)
    names = [step.name for step in decision.explanation.filters]
    chosen = [each.selected for each in decision.destinations]
    found = fleet.fleet_of(table, NOW, 60.0, removed_by, names, chosen)
    assert found.zones == ("east", "nova")
    assert [each.host for each in found.hosts] == ["h3", "h1", "h2", "h10"], "by zone, then by number"
    told = {each.host: (each.state, found.filters[each.refused_by], each.chosen) for each in found.hosts[:1]}
    assert told == {"h3": ("down", "ComputeFilter", 0)}
    by_host = {each.host: each for each in found.hosts}
    assert (by_host["h1"].refused_by, by_host["h1"].chosen, by_host["h1"].state) == (NOT_REFUSED, 1, "up")
    assert by_host["h2"].state == "disabled"
    assert found.filters[by_host["h10"].refused_by] == "RamFilter"
    assert (by_host["h10"].memory_mb, by_host["h10"].servers) == (Use(8000, 8192), 7)


def test_hosts_that_the_request_does_not_name_are_not_considered() -> None:
    table, removed_by = a_table(a_host("h1"), a_host("h2")), RemovedBy()
    a_scheduler().preview(table, a_spec(requested_host="h2"), ["i"], now=NOW, removed_by=removed_by)
    found = fleet.fleet_of(table, NOW, 60.0, removed_by)
    assert [each.refused_by for each in found.hosts] == [NOT_CONSIDERED, NOT_REFUSED]


def test_after_some_servers_of_a_request_are_counted_the_last_removed_by_are_told() -> None:
    table, removed_by = a_table(a_host("h1", used={"MEMORY_MB": 6000})), RemovedBy()
    with pytest.raises(NoValidHost) as caught:
        a_scheduler().preview(table, a_spec(), ["a", "b", "c"], now=NOW, removed_by=removed_by)
    assert caught.value.details["placed"] == 2
    assert caught.value.details["reasons"][removed_by.steps[0]]["name"] == "RamFilter"


def test_a_decision_in_words() -> None:
    steps = (
        FilterStep(name="RetryFilter", removed=0, remaining=12),
        FilterStep(name="RamFilter", removed=11, remaining=1, hosts=tuple(f"h{number}" for number in range(10))),
        FilterStep(name="Odd", removed=0, remaining=1, error="RuntimeError: no"),
    )
    winner = Winner(host="h11", node="h11", weight=1.5, weighers={"RAMWeigher": 1.0, "CPUWeigher": 0.5})
    told = sentences(Explanation(hosts=12, filters=steps, winners=(winner,), took=1234))
    assert told == [
        "The scheduler was asked about 12 hosts and decided in 1.2 ms.",
        "RamFilter: 12 entered, 1 left; it removed h0, h1, h2, h3, h4, h5, h6, h7, h8, h9 and 1 more.",
        "Odd failed and let no host pass: RuntimeError: no.",
        "These removed none: RetryFilter.",
        "Chosen: h11, weight 1.50 (RAMWeigher +1.00, CPUWeigher +0.50).",
    ]
    assert sentences(Explanation(hosts=0, waits=True))[-1] == "No host was left. The scheduler is asked again."
