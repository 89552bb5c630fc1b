"""Claims of requests for thousands of servers stay below the number of parameters that drivers take."""

from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa

from micronova.db import claims as claim_rows
from micronova.db import host_states, tables
from micronova.db.claims import Claim
from micronova.db.engine import Database
from tests.plans import recorded
from tests.unit.db.databases import KINDS, compute_database
from tests.unit.scheduler.rows import SMALL

COUNT = 5_000  # servers, each on a node of its own: 15,000 inventories, three parameters each


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        await opened.write(_fill)
        yield opened


def _fill(conn: sa.Connection) -> None:
    conn.execute(
        tables.inventories.insert(),
        [
            {"node_uuid": f"node-{n}", "resource_class": name, "total": 100, "capacity": 100_000, "changed_at": 1}
            for n in range(COUNT)
            for name in SMALL
        ],
    )


def _used(conn: sa.Connection) -> int:
    return int(conn.execute(sa.select(sa.func.sum(tables.inventories.c.used))).scalar_one())


async def test_five_thousand_at_once(database: Database) -> None:
    claims = [
        Claim(consumer_uuid=f"server-{n}", node_uuid=f"node-{n}", host=f"host-{n}", resources=SMALL)
        for n in range(COUNT)
    ]
    assert (await database.write(claim_rows.claim, claims, now=2)).claimed
    each = sum(SMALL.values())
    assert await database.read(_used) == COUNT * each
    # The whole batch is put back if one of them finds no room.
    large = [
        Claim(consumer_uuid=f"other-{n}", node_uuid=f"node-{n}", host=f"host-{n}", resources=SMALL)
        for n in range(COUNT - 1)
    ]
    last = Claim(
        consumer_uuid="last", node_uuid=f"node-{COUNT - 1}", host="h", resources={**SMALL, "DISK_GB": 1_000_000}
    )
    refused = await database.write(claim_rows.claim, [*large, last], now=3)
    assert [failure.node_uuid for failure in refused.failures] == [last.node_uuid]
    assert await database.read(_used) == COUNT * each


async def test_the_text_of_statements_does_not_depend_on_the_number_of_servers(database: Database) -> None:
    # Each text is compiled, prepared on each connection, and kept by both sides.
    texts: set[str] = set()

    def claim(conn: sa.Connection, batch: list[Claim]) -> None:
        with recorded(conn) as statements:
            assert claim_rows.claim(conn, batch, now=2).claimed
        texts.update(text for text, _ in statements)

    def batch_of(count: int) -> list[Claim]:
        return [
            Claim(consumer_uuid=f"{count}-{n}", node_uuid=f"node-{n}", host=f"host-{n}", resources=SMALL)
            for n in range(count)
        ]

    await database.write(claim, batch_of(1))
    first = set(texts)
    for count in range(2, 40):
        await database.write(claim, batch_of(count))
    assert texts == first


async def test_forty_thousand_nodes_are_read_again(database: Database) -> None:
    names = [f"node-{n}" for n in range(40_000)]
    assert await database.read(host_states.load_hosts, names, default_zone="nova") == []
