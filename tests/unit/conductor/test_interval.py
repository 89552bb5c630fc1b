"""The interval of heartbeats: it grows with the fleet, and stays short enough for every lease."""

import pytest

from micronova.conductor.heartbeat_interval import BEATS_PER_SECOND, interval_of, longest_interval, too_often


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [(0, 5.0), (1, 5.0), (5 * BEATS_PER_SECOND, 5.0), (10 * BEATS_PER_SECOND, 10.0), (1_000 * BEATS_PER_SECOND, 20.0)],
)
def test_the_interval_grows_with_the_fleet_up_to_a_limit(hosts: int, expected: float) -> None:
    assert interval_of(hosts, report_interval=5.0, longest=20.0) == expected


def test_the_set_interval_is_kept_where_the_limit_is_shorter() -> None:
    assert interval_of(100_000, report_interval=5.0, longest=2.0) == 5.0


@pytest.mark.parametrize(
    ("hosts", "report_interval", "service_down_time", "advice"),
    [
        (3_000, 5.0, 20.0, None),
        (10_000, 5.0, 20.0, "60 or more"),
        (10_000, 5.0, 60.0, None),
        (10_000, 20.0, 60.0, None),
        (10_001, 5.0, 60.0, "61 or more"),
    ],
)
def test_an_operator_learns_which_settings_a_large_fleet_needs(
    hosts: int, report_interval: float, service_down_time: float, advice: str | None
) -> None:
    longest = longest_interval(service_down_time, lease=3600.0)
    found = too_often(hosts, report_interval=report_interval, longest=longest)
    assert found is None if advice is None else found is not None and found.endswith(advice)
