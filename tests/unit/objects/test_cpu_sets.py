"""Sets of CPUs."""

import pytest

from micronova.objects.cpu_sets import format_cpus, parse_cpus


def test_sets_of_cpus() -> None:
    assert parse_cpus("0-3,^2,8") == (0, 1, 3, 8)
    assert parse_cpus("") == ()
    assert format_cpus((0, 1, 3)) == "0,1,3"
    for wrong in ("a", "1-b", "-3"):
        with pytest.raises(ValueError, match="not a set of CPUs"):
            parse_cpus(wrong)


def test_a_huge_range_takes_no_memory() -> None:
    """Image properties, which users write, have sets of CPUs."""
    with pytest.raises(ValueError, match="names a CPU above"):
        parse_cpus("0-99999999999999")
