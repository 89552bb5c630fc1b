"""Reading the interfaces of servers anew: some at each run, and in the end all."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest
import sqlalchemy as sa

from micronova.conductor import heal_network_info
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.db import periodic_jobs, services
from micronova.db.engine import Database
from micronova.db.tables import instances
from micronova.objects.clock import micros
from micronova.objects.errors import Unavailable
from micronova.objects.network import VIF
from tests.clocks import ManualClock
from tests.unit.db.databases import compute_database
from tests.unit.db.test_retention import _instance


@pytest.fixture
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database("sqlite", request) as opened:
        yield opened


class Network:
    """The network service: each server has one port."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.security_groups = self
        self.away_for = ""  # the servers for which it does not answer
        self.dies_at = ""  # the conductor dies when it asks for this server

    async def network_info(self, uuid: str) -> tuple[VIF, ...]:
        self.asked.append(uuid)
        if uuid == self.dies_at:
            raise asyncio.CancelledError
        if uuid in self.away_for:
            raise Unavailable("The network service does not answer.")
        return (VIF(port_id=f"port of {uuid}", network_id="n", network_label="n", mac_address="m"),)

    async def names_of(self, uuid: str) -> list[str]:
        return ["default"]


class World:
    """Several conductors; each run is done by another one."""

    def __init__(self, database: Database) -> None:
        self.database, self.network, clock = database, Network(), ManualClock()
        engine = SimpleNamespace(database=database, now=lambda: micros(clock.now()))
        needs = SimpleNamespace(engine=engine, network_client=self.network, service_down_time=60.0)
        self._needs = cast(ConductorDependencies, needs)
        self._runs = 0

    async def run(self) -> list[str]:
        """Run the job once; return the servers that it asked about."""
        self.network.asked.clear()
        self._runs += 1
        assert await self.database.write(
            periodic_jobs.claim, heal_network_info.NAME, f"conductor {self._runs}", self._runs, 1
        )
        await heal_network_info.heal_network_info(self._needs)
        return list(self.network.asked)

    async def healed(self) -> set[str]:
        rows = await self.database.read(lambda conn: conn.execute(sa.select(instances)).all())
        return {row.uuid for row in rows if row.network_info and row.security_groups == ["default"]}


async def test_all_servers_in_turn(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heal_network_info, "LEAST", 2)
    rows = [_instance(name, host="h", task_state=None) for name in "abcde"]
    rows += [_instance("busy", host="h", task_state="rebooting"), _instance("nowhere", host=None, task_state=None)]
    await database.write(lambda conn: conn.execute(instances.insert(), rows))
    world = World(database)
    world.network.away_for = "b"
    assert [await world.run() for _ in range(4)] == [["a", "b"], ["c", "d"], ["e"], ["a", "b"]]
    assert await world.healed() == set("acde")
    world.network.away_for = ""
    assert [await world.run() for _ in range(3)] == [["c", "d"], ["e"], ["a", "b"]]
    assert await world.healed() == set("abcde")


async def test_servers_that_show_what_the_network_service_has_are_not_locked(database: Database) -> None:
    rows = [_instance(name, host="h", task_state=None) for name in "abc"]
    await database.write(lambda conn: conn.execute(instances.insert(), rows))
    world = World(database)
    await world.run()
    assert await world.healed() == set("abc")
    before = database.statistics.by_function["record"]
    assert await world.run() == list("abc")
    assert database.statistics.by_function["record"] == before


async def test_a_long_run_goes_on_where_its_conductor_died(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heal_network_info, "LEAST", 2)
    monkeypatch.setattr(services, "count_up", lambda *_: 5)
    rows = [_instance(name, host="h", task_state=None) for name in "abcdefgh"]
    await database.write(lambda conn: conn.execute(instances.insert(), rows))
    world = World(database)
    world.network.dies_at = "d"
    with pytest.raises(asyncio.CancelledError):
        await world.run()
    world.network.dies_at = ""
    assert await world.run() == list("cdefg")
    assert await world.run() == list("h")


async def test_a_run_ends_while_the_network_service_does_not_answer(database: Database) -> None:
    """Each request to it may last as long as its timeout."""
    rows = [_instance(name, host="h", task_state=None) for name in "abcdefgh"]
    await database.write(lambda conn: conn.execute(instances.insert(), rows))
    world = World(database)
    world.network.away_for = "abcdefgh"
    assert [await world.run() for _ in range(3)] == [list("abc"), list("def"), list("gh")]
    world.network.away_for = "bc"
    assert await world.run() == list("abcdefgh"), "single servers do not stop it"
    assert await world.healed() == set("adefgh")
