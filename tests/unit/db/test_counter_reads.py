"""The counters of a region are compared by the database, or in parts: a conductor answers others meanwhile."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from micronova.conductor.findings.counters import drifted_counters, wrong_topology
from micronova.db import allocation_audit, topologies
from micronova.db.engine import Database
from micronova.db.tables import inventories, metadata, node_topologies, topology_claims
from micronova.objects.port_resources import ServedPort
from micronova.objects.topology import NOTHING_USED, Assignment, encode
from tests.plans import Rows, fill
from tests.unit.db.databases import compute_database

pytestmark = pytest.mark.postgresql

NODES = 2_400
MOST_VALUES = 3_000
"""Of the answer to one statement: some columns of 500 nodes, or the ids of all."""
PORTS = encode(Assignment(ports=(ServedPort(port_id="port", groups=()),)))
GROUPS = NODES // 2
FILL: Rows = (
    (
        "instances",
        NODES,
        {
            "uuid": "'i' || n",
            "project_id": "'p'",
            "server_group_id": f"'g' || n % {GROUPS}",
            "flavor": """'{"vcpus": 1, "ram": 1}'""",
            "network_info": """'[{"port_id": "port"}]'""",
        },
    ),
    ("compute_nodes", NODES, {"uuid": "'n' || n", "id": "n", "host": "'h' || n", "hypervisor_hostname": "'h' || n"}),
    ("inventories", NODES, {"node_uuid": "'n' || n", "resource_class": "'VCPU'", "used": "1"}),
    (
        "allocations",
        NODES,
        {"consumer_uuid": "'i' || n", "node_uuid": "'n' || n", "resource_class": "'VCPU'", "used": "1"},
    ),
    ("server_group_hosts", NODES, {"group_uuid": f"'g' || n % {GROUPS}", "host": "'h' || n", "members": "1"}),
    ("topology_claims", NODES, {"consumer_uuid": "'i' || n", "node_uuid": "'n' || n", "assignment": f"'{PORTS}'"}),
    ("node_topologies", NODES, {"node_uuid": "'n' || n", "topology": "'{}'", "held": f"'{topologies.EMPTY}'"}),
    ("quota_usages", 1, {"project_id": "'p'", "resource": "'instances'", "in_use": str(NODES)}),
    ("quota_usages", 1, {"project_id": "'p'", "resource": "'cores'", "in_use": str(NODES)}),
    ("quota_usages", 1, {"project_id": "'p'", "resource": "'ram'", "in_use": str(NODES)}),
)  # fmt: skip


@pytest.fixture
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database("postgresql", request) as opened:
        await opened.write(fill, metadata, FILL)
        yield opened


@contextmanager
def answers(conn: sa.Connection) -> Iterator[list[int]]:
    """Record how many values each statement has answered with."""
    found: list[int] = []

    def note(conn: Any, cursor: Any, *args: Any) -> None:
        found.append(cursor.rowcount * len(cursor.description or ()))

    sa.event.listen(conn, "after_cursor_execute", note)
    yield found
    sa.event.remove(conn, "after_cursor_execute", note)


async def test_no_statement_answers_with_rows_of_the_whole_fleet(database: Database) -> None:
    def compare(conn: sa.Connection) -> tuple[list[Any], int]:
        with answers(conn) as values:
            findings = [*drifted_counters(conn, set())]
            findings += [wrong_topology(each, "") for each in topologies.all_claims(conn) if each.held != each.claimed]
        assert len(values) > 4
        return findings, max(values)

    findings, largest = await database.read(compare)
    assert findings == []
    assert largest <= MOST_VALUES


async def test_what_differs_is_found_on_whatever_page(database: Database) -> None:
    """Among the nodes: one that holds more than it has recorded, one that is not known, and one without inventories."""
    nodes = sorted(f"n{number}" for number in range(NODES))
    last, lacking = nodes[-1], nodes[NODES // 2]

    def spoil(conn: sa.Connection) -> None:
        conn.execute(inventories.update().where(inventories.c.node_uuid == last).values(used=7))
        conn.execute(inventories.delete().where(inventories.c.node_uuid == lacking))
        held = encode(msgspec.structs.replace(NOTHING_USED, devices=("0000:01:00.0",)))
        conn.execute(node_topologies.update().where(node_topologies.c.node_uuid == last).values(held=held))
        conn.execute(topology_claims.insert(), {"consumer_uuid": "z", "node_uuid": "zz", "assignment": PORTS})

    await database.write(spoil)
    drifted = {
        (each.where, each.what, each.recorded, each.actual) for each in await database.read(allocation_audit.audit)
    }
    assert drifted == {(last, "VCPU", 7, 1), (lacking, "VCPU", 0, 1), ("z", "zz", 1, 0)}
    nodes_read = [*await database.read(lambda conn: [*topologies.all_claims(conn)])]
    assert [each.node_uuid for each in nodes_read] == [*nodes, "zz"]
    assert [each.node_uuid for each in nodes_read if each.held != each.claimed] == [last]
