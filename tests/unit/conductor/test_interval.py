"""The interval of heartbeats: it grows with the fleet, and stays short enough for every lease."""

import pytest

from micronova.conductor.heartbeats import BEATS_PER_SECOND, interval_of


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [(0, 5.0), (1, 5.0), (5 * BEATS_PER_SECOND, 5.0), (10 * BEATS_PER_SECOND, 10.0), (1_000 * BEATS_PER_SECOND, 20.0)],
)
def test_the_interval_grows_with_the_fleet_up_to_a_limit(hosts: int, expected: float) -> None:
    assert interval_of(hosts, report_interval=5.0, longest=20.0) == expected


def test_the_set_interval_is_kept_where_the_limit_is_shorter() -> None:
    assert interval_of(100_000, report_interval=5.0, longest=2.0) == 5.0
