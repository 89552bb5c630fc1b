"""What servers hold for single ports, and what is left when allocations change by the Placement API."""

from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa

from micronova.db import (
    allocation_audit,
    claims,
    placement_names,
    port_claims,
    provider_allocations,
    provider_inventories,
    providers,
    tables,
    topologies,
)
from micronova.db.engine import Database
from micronova.db.port_claims import Unheld
from micronova.db.provider_allocations import AllocationRequest
from micronova.db.provider_inventories import InventoryFields
from micronova.objects.errors import Conflict
from micronova.objects.port_resources import BoundPort, PortGroup, PortResources, ServedPort, all_answered
from micronova.placement import port_groups
from tests.plans import recorded
from tests.unit.db.databases import KINDS, compute_database
from tests.unit.scheduler.rows import SMALL, a_claim, add_host, add_instances

EGRESS, INGRESS = "NET_BW_EGR_KILOBIT_PER_SEC", "NET_BW_IGR_KILOBIT_PER_SEC"
CARDS = ("card-1", "card-2")
NODE = "node-a"


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        await opened.write(_fill)
        yield opened


def _fill(conn: sa.Connection) -> None:
    """Add a host with two cards: 20 of each direction, of which one server gets 10 of a card, and a server on it."""
    add_host(conn, "a", 1)
    providers.ensure_nodes(conn, {NODE: ("a", "a")}, 1)
    stock: InventoryFields = {
        "total": 10, "reserved": 0, "min_unit": 1, "max_unit": 10, "step_size": 1, "allocation_ratio": 2.0
    }  # fmt: skip
    for card in CARDS:
        providers.create(conn, card, card, NODE, 1)
        for name in (EGRESS, INGRESS):
            provider_inventories.add(conn, card, name, stock, None, 1)
    add_instances(conn, "s")


def _asks(port: str, **amounts: int) -> PortResources:
    names = {"egress": EGRESS, "ingress": INGRESS}
    group = PortGroup(id=f"g-{port}", resources={names[name]: amount for name, amount in amounts.items()})
    return PortResources(port_id=port, groups=(group,))


def _claim(conn: sa.Connection, *ports: PortResources) -> None:
    request = port_groups.request_of(ports) if ports else None
    assert claims.claim(conn, [a_claim("s", "a", resource_request=request, ports=ports)], now=2).claimed


def _add(conn: sa.Connection, port: PortResources) -> ServedPort | None:
    return port_claims.add(conn, "s", NODE, port, now=3)


def _used(conn: sa.Connection, name: str = EGRESS) -> list[int]:
    return [row.used for card in CARDS if (row := provider_inventories.find(conn, card, name)) is not None]


async def test_a_class_that_ports_hold_is_not_renamed(database: Database) -> None:
    """What the port holds was not found again, and not given back."""

    def fill(conn: sa.Connection) -> None:
        placement_names.create_class(conn, "CUSTOM_RATE", 1)
        stock: InventoryFields = {
            "total": 10, "reserved": 0, "min_unit": 1, "max_unit": 10, "step_size": 1, "allocation_ratio": 1.0
        }  # fmt: skip
        provider_inventories.add(conn, CARDS[0], "CUSTOM_RATE", stock, None, 1)

    await database.write(fill)
    rate = PortResources(port_id="p", groups=(PortGroup(id="g", resources={"CUSTOM_RATE": 3}),))
    await database.write(_claim, rate)
    with pytest.raises(Conflict, match="ports of servers"):
        await database.write(placement_names.rename_class, "CUSTOM_RATE", "CUSTOM_SPEED")
    await database.write(port_claims.remove, "s", ["p"], now=4)
    await database.write(placement_names.rename_class, "CUSTOM_RATE", "CUSTOM_SPEED")


async def test_another_port_is_served_where_the_server_may_have_more(database: Database) -> None:
    """Although the card that serves the first has room for both: no server has more of it than 10."""
    await database.write(_claim, _asks("p", egress=6))
    served = await database.write(_add, _asks("q", egress=6))
    assert served is not None
    assert served.allocation == {"g-q": "card-2"}
    assert await database.read(_used) == [6, 6]
    assert await database.write(_add, _asks("r", egress=5)) is None
    assert await database.read(_used) == [6, 6]
    third = await database.write(_add, _asks("r", egress=4))
    assert third is not None
    assert third.allocation == {"g-r": "card-1"}


async def test_a_claim_takes_the_groups_elsewhere_if_the_node_may_give_the_server_no_more(database: Database) -> None:
    """What the server has of the node itself counts, too."""

    def more_memory(conn: sa.Connection) -> None:
        stock: InventoryFields = {
            "total": 4096, "reserved": 0, "min_unit": 1, "max_unit": 4096, "step_size": 1, "allocation_ratio": 1.0
        }  # fmt: skip
        provider_inventories.change(conn, NODE, "MEMORY_MB", {**stock, "allocation_ratio": 2.0}, None, 2)
        providers.create(conn, "pool", "pool", NODE, 2)  # which is asked after the node
        provider_inventories.add(conn, "pool", "MEMORY_MB", stock, None, 2)

    await database.write(more_memory)
    port = PortResources(port_id="p", groups=(PortGroup(id="g", resources={"MEMORY_MB": 3073}),))
    await database.write(_claim, port)
    found = await database.read(provider_inventories.find, "pool", "MEMORY_MB")
    assert found is not None
    assert found.used == 3073


def _replace(conn: sa.Connection, held: dict[str, dict[str, int]]) -> None:
    allocated = {NODE: dict(SMALL), **held}
    provider_allocations.replace(
        conn, [AllocationRequest(consumer="s", allocations=allocated, checks_generation=False)], 4
    )


def _recorded(conn: sa.Connection) -> dict[str, object]:
    return {each.port_id: each.allocation for each in topologies.assignments_of(conn, ["s"])["s"][1].ports}


async def test_a_port_gives_back_what_has_moved_to_another_provider(database: Database) -> None:
    await database.write(_claim, _asks("p", egress=6, ingress=1), _asks("q", egress=3))
    assert await database.read(_recorded) == {"p": {"g-p": "card-1"}, "q": {"g-q": "card-1"}}
    await database.write(_replace, {CARDS[1]: {EGRESS: 9, INGRESS: 1}})
    assert await database.read(_recorded) == {"p": {"g-p": "card-2"}, "q": {"g-q": "card-2"}}
    assert await database.write(port_claims.remove, "s", ["p"], now=5) == ["p"]
    assert (await database.read(_used), await database.read(_used, INGRESS)) == ([0, 3], [0, 0])
    # Neutron changes amounts when a bound port gets another policy.
    await database.write(_replace, {CARDS[1]: {EGRESS: 5}})
    assert await database.write(port_claims.remove, "s", ["q"], now=6) == ["q"]
    assert await database.read(_used) == [0, 0]
    assert await database.read(allocation_audit.audit) == []


async def test_a_claim_of_the_same_amounts_for_other_ports_is_recorded(database: Database) -> None:
    await database.write(_claim, _asks("p", egress=6), _asks("q", egress=3))
    for ports in ((_asks("p", egress=3), _asks("q", egress=6)), (_asks("r", egress=9),), (_asks("s", egress=9),)):
        await database.write(_claim, *ports)
        [(_, known)] = (await database.read(topologies.assignments_of, ["s"])).values()
        assert all_answered(known.ports, ports)
        assert sum(await database.read(_used)) == 9
    lost = tables.topology_claims.delete()
    await database.write(lambda conn: conn.execute(lost).rowcount)
    await database.write(_claim, _asks("s", egress=9))
    assert set(await database.read(_recorded)) == {"s"}
    assert await database.read(allocation_audit.audit) == []


def _bound(port: str, allocation: str | dict[str, str] | None, server: str = "s", **asks: int) -> BoundPort:
    return BoundPort(server=server, port_id=port, allocation=allocation, asks=_asks(port, **asks) if asks else None)


async def test_ports_are_found_for_which_their_server_holds_too_little(database: Database) -> None:
    await database.write(_claim, _asks("p", egress=6, ingress=1), _asks("q", egress=3))
    p = _bound("p", {"g-p": "card-1"}, egress=6, ingress=1)
    q = _bound("q", {"g-q": "card-1"}, egress=3)

    async def found(*ports: BoundPort) -> list[Unheld]:
        return await database.read(port_claims.unheld, ports)

    assert await found(q, p) == []
    assert await found(_bound("p", {"other-id": "card-1"})) == []
    # It asks for more than is recorded, or nothing is; it has another provider, in either form.
    assert await found(q, _bound("p", "card-1", egress=7)) == [Unheld("s", "p", "", EGRESS, 7, 6)]
    assert await found(_bound("r", None, egress=7)) == [Unheld("s", "r", "", EGRESS, 7, 0)]
    assert await found(_bound("p", {"g-p": "card-2"})) == [Unheld("s", "p", "card-2")]
    assert await found(_bound("x", "card-1", "t"), _bound("x", "card-1")) == [
        Unheld("s", "x", "card-1"),
        Unheld("t", "x", "card-1"),
    ]
    # Allocations that were changed in the database, where no record follows.
    a = tables.allocations.c
    less = tables.allocations.update().where(a.resource_class == EGRESS).values(used=8)
    await database.write(lambda conn: conn.execute(less).rowcount)
    assert await found(p, q) == [Unheld("s", port, "card-1", EGRESS, 9, 8) for port in ("p", "q")]
    await database.write(lambda conn: conn.execute(tables.topology_claims.delete()).rowcount)
    assert await found(q) == [Unheld("s", "q", "", EGRESS, 3, 0), Unheld("s", "q", "card-1")]


async def test_ports_of_many_servers_are_compared_in_few_statements(database: Database) -> None:
    many = [_bound("p", "card-1", f"t{number}") for number in range(2 * port_claims.PART + 1)]

    def count(conn: sa.Connection) -> tuple[int, int]:
        with recorded(conn) as statements:
            return len(port_claims.unheld(conn, many)), len(statements)

    assert await database.read(count) == (len(many), 6)
