"""Synthetic traces: their shape, and that a seed decides everything."""

from collections import Counter

import pytest

from micronova.conf.default import DefaultSettings
from micronova.fleetsim.fleet import DEFAULT_FLEET, make_hosts
from micronova.fleetsim.generator import DAY, generate
from micronova.objects.errors import Invalid


def test_a_seed_decides_everything() -> None:
    once, again, other = (generate(DEFAULT_FLEET, 20, 300, load=0.5, seed=seed) for seed in (7, 7, 8))
    assert once == again
    assert once != other


def test_the_shape_is_that_of_published_traces() -> None:
    requests = generate(DEFAULT_FLEET, 200, 4000, load=1.0, days=10, seed=1)
    count = len(requests)
    assert 0.75 < sum(each.spec.flavor.vcpus <= 2 for each in requests) / count < 0.85
    assert 0.85 < sum((each.lifetime or 0) < DAY for each in requests) / count < 0.95
    time = Counter[bool]()
    for each in requests:
        time[(each.lifetime or 0) >= DAY] += (each.lifetime or 0) * each.count  # type: ignore[assignment]
    assert time[True] > 4 * time[False]
    assert 0.35 < sum(each.count == 1 for each in requests) / count < 0.45
    assert 0.75 < sum(each.count <= 5 for each in requests) / count < 0.88
    hours = Counter(int(each.at % DAY // 3600) for each in requests)
    by_day, by_night = sum(hours[hour] for hour in range(11, 17)), sum(hours[hour] for hour in (23, 0, 1, 2, 3, 4))
    assert by_day > 1.8 * by_night
    assert any(each.spec.server_group for each in requests) and any(each.spec.availability_zone for each in requests)
    assert requests[-1].at == pytest.approx(10 * DAY, rel=0.05)


@pytest.mark.parametrize("load", [0.3, 1.2])
def test_the_demand_has_its_peak_at_the_load(load: float) -> None:
    requests = generate(DEFAULT_FLEET, 30, 900, load=load, seed=3)
    memory = sum(state.capacity["MEMORY_MB"] for state in make_hosts(DEFAULT_FLEET, 30, DefaultSettings()))
    changes = [(each.at, each.count * each.spec.flavor.ram) for each in requests]
    changes += [(each.at + (each.lifetime or 0), -each.count * each.spec.flavor.ram) for each in requests]
    running = peak = 0
    for at, change in sorted(changes):
        if at <= requests[-1].at:
            running += change
            peak = max(peak, running)
    assert peak / memory == pytest.approx(load, rel=0.05)


def test_too_few_requests_for_the_load_are_refused() -> None:
    with pytest.raises(Invalid, match=r"need at most .* times these hosts, not 1: ask for more requests"):
        generate(DEFAULT_FLEET, 1000, 10, load=1.0, seed=1)
    assert len(generate(DEFAULT_FLEET, 1000, 10, load=1.0, days=1, seed=1)) == 10
    with pytest.raises(Invalid, match=r"Single requests need .* ask for a higher --load or for more hosts"):
        generate(DEFAULT_FLEET, 1, 1000, load=0.1, seed=1)
