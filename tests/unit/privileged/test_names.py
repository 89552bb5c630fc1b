"""Names and numbers that follow from ids."""

from hypothesis import given
from hypothesis import strategies as st

from micronova.privileged.names import numbers_of


@given(st.sets(st.uuids().map(str), max_size=60), st.uuids().map(str), st.integers(61, 65535))
def test_numbers_are_distinct_and_stay(names: set[str], another: str, most: int) -> None:
    before = numbers_of(names, most)
    assert len(set(before.values())) == len(names)
    assert all(1 <= number <= most for number in before.values())
    after = numbers_of(names | {another}, most)
    if after[another] not in before.values():
        assert {name: after[name] for name in names} == before
