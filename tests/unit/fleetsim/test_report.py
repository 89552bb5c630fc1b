"""The report: what samples say over time, and what the plots show of it."""

from array import array
from xml.etree import ElementTree

import pytest

from micronova.fleetsim.fleet import DEFAULT_FLEET
from micronova.fleetsim.measures import Interval, Sample
from micronova.fleetsim.policies import parse_policy
from micronova.fleetsim.report import merged, plots, report
from micronova.fleetsim.simulation import Experiment, Outcome
from micronova.fleetsim.trace import Request
from micronova.objects.flavor import Flavor
from micronova.objects.scheduling import RequestSpec

SPEC = RequestSpec(project_id="p", user_id="u", flavor=Flavor(id="f", name="big", vcpus=1, ram=1024, disk=0))


def a_sample(number: int, refused: dict[str, int]) -> Sample:
    since = Interval(requested=10, decisions=2, decision_seconds=0.004, refused=refused)
    used = {"VCPU": number / 100, "MEMORY_MB": number / 200}
    return Sample(3600.0 * number, since, used, unusable=0.1, largest_fits=100 - number, servers=number, occupied=1)


def an_outcome(samples: list[Sample], policy: str = "spread") -> Outcome:
    refused: dict[str, int] = {}
    for each in samples:
        for name, servers in each.since.refused.items():
            refused[name] = refused.get(name, 0) + servers
    return Outcome(
        parse_policy(policy),
        hosts=5,
        largest_flavor="big",
        samples=samples,
        placed_servers=60,
        refused_servers=refused,
        decision_seconds=array("d", [0.001] * 98 + [0.1, 0.2]),
    )


EXPERIMENT = Experiment(DEFAULT_FLEET, 5, [Request(360_000.0, None, 1, SPEC)])


def test_figures() -> None:
    outcome = an_outcome([a_sample(number, {"memory": 2} if number > 90 else {}) for number in range(1, 101)])
    [found] = report(EXPERIMENT, [outcome])["policies"]
    assert (found["placed_servers"], found["refused_servers"], found["servers"]) == (60, 20, 80)
    assert found["used"]["VCPU"] == pytest.approx({"mean": 0.505, "least": 0.01, "most": 1.0, "end": 1.0})
    assert found["largest_flavor_fits"] == {"mean": 49.5, "least": 0, "most": 99, "end": 0}
    assert found["hosts_without_servers"]["mean"] == 4
    assert found["decision_ms_p50"] == pytest.approx(1.0) and found["decision_ms_p99"] == pytest.approx(200.0)
    assert found["decisions_per_second"] == pytest.approx(100 / 0.398)
    assert len(found["samples"]) == 100


def test_merged_samples_lose_nothing() -> None:
    samples = [a_sample(number, {"memory": number}) for number in range(1, 101)]
    found = merged(samples)
    assert len(found) <= 48 and found[-1].time == samples[-1].time
    assert sum(each.since.refused["memory"] for each in found) == sum(range(1, 101))
    assert sum(each.since.requested for each in found) == 1000
    assert samples[0].since.requested == 10


def test_policies_share_the_axis_of_refusals_and_rare_categories_are_together() -> None:
    many = an_outcome([a_sample(1, {f"filter {number}": 100 - number for number in range(12)})])
    few = an_outcome([a_sample(1, {"filter 0": 1})], "pack")
    drawn = plots(EXPERIMENT, [many, few])
    assert set(drawn) == {"utilisation.svg", "fragmentation.svg", "refusals.svg", "decisions.svg"}
    root = ElementTree.fromstring(drawn["refusals.svg"])
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "other" in words and "filter 6" in words and "filter 7" not in words
    assert words.count("1,500") == 2
    assert {"Policy spread", "Policy pack", "servers per hour"} <= set(words)
