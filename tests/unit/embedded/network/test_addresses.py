"""The search for a free address, compared with a plain Python search."""

import ipaddress
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from micronova.embedded.network import addresses
from micronova.embedded.network.cidrs import number_of
from micronova.embedded.network.tables import addresses as table
from micronova.embedded.network.tables import metadata

BASE = int(ipaddress.ip_address("10.0.0.0"))


@pytest.fixture(scope="module")
def conn() -> Iterator[sa.Connection]:
    engine = sa.create_engine("sqlite://")
    metadata.create_all(engine)  # foreign keys are not checked here: rows need no ports
    with engine.connect() as made:
        yield made
    engine.dispose()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    st.sets(st.integers(2, 60)), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=4),
    st.one_of(st.none(), st.integers(0, 70)), st.integers(1, 5),
)  # fmt: skip
def test_free_addresses_are_found(
    conn: sa.Connection, taken: set[int], raw: list[tuple[int, int]], hint: int | None, count: int
) -> None:
    addresses._SCAN = 4  # so that a small test reads several pages
    pools, end = [], 1
    for gap, size in raw:
        start = end + 1 + gap
        end = start + size
        pools.append((BASE + start, BASE + end))
    subnet = addresses.AllocationSubnet(
        "s", "n", ipaddress.ip_network("10.0.0.0/24"), tuple(pools), "10.0.0.9", False, ()
    )
    conn.execute(table.delete())
    for offset in taken:
        address = ipaddress.ip_address(BASE + offset)
        row = {"subnet_id": "s", "number": number_of(address), "address": str(address), "port_id": "p", "position": 0}
        conn.execute(table.insert(), row)
    free = [n for a, b in pools for n in range(a, b + 1) if n - BASE not in taken and n - BASE != 9]
    for a, b in pools:
        assert addresses._free(conn, subnet, a, b, count) == [n for n in free if a <= n <= b][:count]
    got = []
    first: int | None = None if hint is None else BASE + hint
    while (taken_now := addresses._allocate_any(conn, subnet, "00000000", 0, first)) is not None:
        got.append(int(taken_now))
    assert sorted(got) == free
