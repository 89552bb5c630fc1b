"""PostgreSQL's plans of the network service's hot paths: no statement reads a whole table that grows with the cloud."""

import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.db.engine import Database, open_database
from micronova.embedded.network import notifier, router_placement
from micronova.embedded.network.agent_heartbeats import Beat, record_beats
from micronova.embedded.network.agent_liveness import AgentTimes
from micronova.embedded.network.change_feed import Question, read_changes, recent_changes
from micronova.embedded.network.core import Core, NetworkServiceSettings
from micronova.embedded.network.port_rows import read_port_facts, remove_port
from micronova.embedded.network.sharing import EXTERNAL, NETWORK, SECURITY_GROUP, SHARED, own_or_shared
from micronova.embedded.network.state_parts import read_parts
from micronova.embedded.network.tables import agents, metadata, networks, security_groups
from micronova.embedded.network.trunk_ports import check_in_no_trunk, refresh_status, trunk_details_of
from tests.clocks import ManualClock
from tests.network_rows import host_of, id_of, large_cloud, trunk_rows
from tests.plans import fill, rows_read, sequential_scans, too_many

pytestmark = [pytest.mark.postgresql, pytest.mark.asyncio(loop_scope="module")]

PORTS, PROJECTS, HOSTS, ROUTERS = 50_000, 5_000, 5_000, 2_000
MOST_READ = 1_000
"""Rows of a table that a hot path may read."""
SMALL = {"router_placement", "usages", "events", "tags"}
"""Tables with one row, or with none here."""
NOW = 1_800_000_000_000_000
TIMES = AgentTimes(NOW, NOW - 1, grace=1_000_000)
HOSTNAMES = [host_of(number) for number in range(10)]


def core() -> Core:
    clock: Any = ManualClock()
    nobody: Any = None
    return Core(nobody, clock, nobody, NetworkServiceSettings(), nobody, lambda: None)


def ids(kind: str, count: int) -> list[str]:
    return [id_of(kind, number) for number in range(count)]


HOT: dict[str, Callable[[sa.Connection], Any]] = {
    "the ports of a host": lambda conn: read_parts(conn, ["host:host00007"]),
    "networks": lambda conn: read_parts(conn, [f"network:{id}" for id in ids("network", 2)]),
    "rules": lambda conn: read_parts(conn, [f"rules:{id}" for id in ids("group", 2)]),
    "members of a group": lambda conn: read_parts(conn, [f"members:{id_of('group', 7)}"]),
    "members of several groups": lambda conn: read_parts(conn, [f"members:{id}" for id in ids("group", 10)]),
    "a router": lambda conn: read_parts(conn, [f"router:{id_of('router', 7)}"]),
    "what parents show of their trunks": lambda conn: trunk_details_of(conn, ids("port", 10)),
    "the trunks of ports": lambda conn: refresh_status(conn, [*ids("port", 3), id_of("port", 5_007)]),
    "a port in no trunk": lambda conn: check_in_no_trunk(conn, id_of("port", PORTS - 7)),
    "heartbeats": lambda conn: record_beats(
        conn, core(), [Beat(host=host, started=False, configurations={}) for host in HOSTNAMES]
    ),
    "a look": lambda conn: read_changes(conn, Question(PORTS // 10 - 5, NOW - 5_000_000, {})),
    "the first look": lambda conn: recent_changes(conn, NOW),
    "placing the routers": lambda conn: [
        conn.execute(agents.update().where(agents.c.host == host_of(0)).values(heartbeat_at=0)),
        router_placement.is_due(conn, TIMES),
    ],
    "a port's facts": lambda conn: read_port_facts(
        conn, ids("network", 1), projects=["p7"], group_ids=ids("group", 1), hosts=["host00007"]
    ),
    "networks that a project may use": lambda conn: conn.execute(
        sa.select(networks).where(own_or_shared(NETWORK, "p7", (SHARED, EXTERNAL))).order_by(networks.c.created_at)
    ).all(),
    "security groups that a project may use": lambda conn: conn.execute(
        sa.select(security_groups).where(own_or_shared(SECURITY_GROUP, "p7")).order_by(security_groups.c.created_at)
    ).all(),
    "deleting a port": lambda conn: remove_port(conn, id_of("port", PORTS - 7), NOW),
    "events that are due": lambda conn: notifier.claim_due(conn, NOW, 1_000_000),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    schema = f"t{uuid.uuid4().hex}"
    opened = open_database(request.getfixturevalue("postgres").url, schema=schema)
    await opened.write(lambda conn: conn.execute(sa.schema.CreateSchema(schema)))
    try:
        await opened.write(metadata.create_all)
        await opened.write(fill, metadata, (*large_cloud(PORTS, PROJECTS, HOSTS, ROUTERS), *trunk_rows(5_000)))
        yield opened
    finally:
        await opened.write(lambda conn: conn.execute(sa.schema.DropSchema(schema, cascade=True)))
        await opened.close()


class RolledBack(Exception):
    """Ends a transaction whose statements were only to be planned."""


@pytest.mark.parametrize("name", HOT)
async def test_an_index_serves(database: Database, name: str) -> None:
    scans: list[str] = []

    def run(conn: sa.Connection) -> None:
        scans.extend(sequential_scans(conn, HOT[name], SMALL))
        raise RolledBack

    with pytest.raises(RolledBack):
        await database.write(run)
    assert scans == []


@pytest.mark.parametrize("name", HOT)
async def test_few_rows_are_read(database: Database, name: str) -> None:
    read: dict[str, int] = {}

    def run(conn: sa.Connection) -> None:
        read.update(rows_read(conn, HOT[name]))
        raise RolledBack

    with pytest.raises(RolledBack):
        await database.write(run)
    print("READ", name, read)
    assert too_many(read, MOST_READ, SMALL) == {}
