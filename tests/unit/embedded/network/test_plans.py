"""PostgreSQL's plans of the network service's hot paths: no statement reads a whole table that grows with the cloud."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.embedded.network import router_placement
from micronova.embedded.network.agent_heartbeats import AgentHeartbeat, record_heartbeats
from micronova.embedded.network.agent_liveness import AgentTimes
from micronova.embedded.network.change_feed import Question, read_changes, recent_changes
from micronova.embedded.network.core import Core, NetworkServiceSettings
from micronova.embedded.network.port_events import OUTBOX
from micronova.embedded.network.port_rows import read_port_facts, remove_port
from micronova.embedded.network.qos_use import check_rule_change
from micronova.embedded.network.sharing import (
    ALL,
    EXTERNAL,
    NETWORK,
    SECURITY_GROUP,
    SHARED,
    Use,
    check_still_shared,
    of_own_networks,
    own_or_shared,
    reading_for,
)
from micronova.embedded.network.state_parts import read_parts
from micronova.embedded.network.tables import agents, metadata, networks, ports, rbac_policies, security_groups, subnets
from micronova.embedded.network.trunk_ports import check_free_of_trunks, refresh_status, trunk_details_of
from tests.clocks import ManualClock
from tests.network_rows import host_of, id_of, large_cloud, trunk_rows
from tests.plans import fill, recorded, rolled_back, rows_read, sequential_scans, too_many
from tests.unit.db.databases import own_schema

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
    "a port in no trunk": lambda conn: check_free_of_trunks(conn, id_of("port", PORTS - 7)),
    "heartbeats": lambda conn: record_heartbeats(
        conn, core(), [AgentHeartbeat(host=host, started=False, configurations={}) for host in HOSTNAMES]
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
    "ports of a project": lambda conn: conn.execute(
        sa.select(ports)
        .join(networks, networks.c.id == ports.c.network_id)
        .where(of_own_networks(ports, "p7"))
        .order_by(ports.c.created_at)
    ).all(),
    "subnets that a project may use": lambda conn: conn.execute(
        sa.select(subnets)
        .join(networks, networks.c.id == subnets.c.network_id)
        .where(of_own_networks(subnets, "q7", (SHARED, EXTERNAL)))
        .order_by(subnets.c.created_at)
    ).all(),
    "deleting a port": lambda conn: remove_port(conn, id_of("port", PORTS - 7), NOW),
    "whether bound ports have a QoS policy": lambda conn: check_rule_change(conn, "policy"),
    "events that are due": lambda conn: OUTBOX.claim_due(conn, NOW, 1_000_000),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with own_schema(request, metadata) as opened:
        await opened.write(fill, metadata, (*large_cloud(PORTS, PROJECTS, HOSTS, ROUTERS), *trunk_rows(5_000)))
        yield opened


@pytest.mark.parametrize("name", HOT)
async def test_an_index_serves(database: Database, name: str) -> None:
    assert await rolled_back(database, sequential_scans, HOT[name], SMALL) == []


@pytest.mark.parametrize("name", HOT)
async def test_few_rows_are_read(database: Database, name: str) -> None:
    """A walk through a whole index, whose rows a filter drops, is no sequential scan."""
    assert too_many(await rolled_back(database, rows_read, HOT[name]), MOST_READ, SMALL) == {}


async def test_a_network_that_is_shared_with_many_costs_a_port_no_more(database: Database) -> None:
    """The entries of other projects are not read, and those of a batch of ports once."""
    network = id_of("network", 7)

    def share(conn: sa.Connection) -> None:
        entry = {"project_id": "p7", "object_type": NETWORK, "object_id": network, "action": SHARED}
        targets = [ALL, *(f"other{number}" for number in range(1_000))]
        conn.execute(
            rbac_policies.insert(), [{**entry, "id": f"e{n}", "target": target} for n, target in enumerate(targets)]
        )
        conn.exec_driver_sql("ANALYZE rbac_policies")

    def of_a_request(conn: sa.Connection) -> None:
        share(conn)
        facts = reading_for({"other3", None}, read_port_facts)
        assert rows_read(conn, lambda conn: facts(conn, [network])).get("rbac_policies", 0) <= 4
        checked = [Use(NETWORK, network, "other3")] * 100
        with recorded(conn) as statements:
            read = rows_read(conn, lambda conn: check_still_shared(conn, checked))
        assert read.get("rbac_policies", 0) <= 4
        assert sum("rbac_policies" in statement for statement, _ in statements) == 1

    await rolled_back(database, of_a_request)
