"""Guests of servers that are deleted: which of them are found, and what becomes of them."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest
import sqlalchemy as sa

from micronova.conductor import running_deleted
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.running_deleted import find_running_deleted
from micronova.db import services
from micronova.db.engine import Database
from micronova.db.tables import deleted_instances, departures
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.errors import Unavailable
from micronova.objects.orders import Guest
from micronova.objects.service_names import COMPUTE
from micronova.rpc.errors import CallTimeout
from tests.clocks import ManualClock
from tests.unit.db.databases import compute_database
from tests.unit.db.test_retention import _instance
from tests.unit.scheduler.rows import add_instances

DELETED = {"old": 100.0, "recent": 10.0, "newer guest": 100.0, "leaving": 100.0, "off": 100.0}
"""Servers, with the seconds since they were deleted."""


@pytest.fixture
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database("sqlite", request) as opened:
        yield opened


class Hosts:
    """One host with guests, one that does not answer, and one that is down."""

    def __init__(self) -> None:
        self.stopped: set[str] = set()

    async def stop_guest(self, context: Context, host: str, uuid: str, epoch: int) -> None:
        assert (host, epoch) == ("full", 3)
        self.stopped.add(uuid)

    async def list_guests(self, context: Context, host: str) -> tuple[Guest, ...]:
        assert host != "down", "a host that is down is not asked"
        if host == "silent":
            raise Unavailable("no answer")
        names = (*DELETED, "living", "unknown")
        return tuple(
            Guest(uuid=name, node=host, epoch=5 if "newer" in name else 3, power_state=4 if name == "off" else 1)
            for name in names
        )


async def _found(database: Database, *, timeout: float, action: str) -> set[str]:
    """Run the job; return the servers whose guests hosts are told to remove or to switch off."""
    clock = ManualClock()
    now = micros(clock.now())

    def prepare(conn: sa.Connection) -> None:
        services.heartbeat(conn, COMPUTE, ["full", "silent"], now)
        services.heartbeat(conn, COMPUTE, ["down"], now - micros(3600.0))
        add_instances(conn, "living")
        rows = [
            _instance(name, deleted_at=now - micros(seconds), epoch=4, host="full") for name, seconds in DELETED.items()
        ]
        conn.execute(deleted_instances.insert(), rows)
        conn.execute(departures.insert(), {"host": "full", "instance_uuid": "leaving", "epoch": 9, "created_at": now})

    await database.write(prepare)
    engine = SimpleNamespace(database=database, clock=clock, now=lambda: now)
    hosts = Hosts()
    needs = SimpleNamespace(engine=engine, compute=hosts, service_down_time=60.0)
    await find_running_deleted(cast(ConductorDependencies, needs), timeout, action)
    rows = await database.read(lambda conn: conn.execute(departures.select()).all())
    assert {(row.instance_uuid, row.epoch) for row in rows} >= {("leaving", 9)}
    assert all(row.host == "full" and row.epoch in (3, 9) for row in rows)
    return hosts.stopped | {row.instance_uuid for row in rows} - {"leaving"}


async def test_they_are_removed(database: Database) -> None:
    """Not the guest of a server that lives or is unknown, nor one that is newer than the record of the deletion."""
    assert await _found(database, timeout=0.0, action="reap") == {"old", "recent", "off"}


async def test_not_before_the_timeout(database: Database) -> None:
    assert await _found(database, timeout=60.0, action="reap") == {"old", "off"}


async def test_those_that_run_are_switched_off(database: Database) -> None:
    assert await _found(database, timeout=0.0, action="shutdown") == {"old", "recent"}


async def test_they_are_only_logged(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    assert await _found(database, timeout=0.0, action="log") == set()
    told = [record.getMessage() for record in caplog.records if "which is deleted" in record.getMessage()]
    assert len(told) == 3 and "host full has a guest of server old" in told[1]
    assert any("host silent does not say" in record.getMessage() for record in caplog.records)


async def test_what_one_host_says_protects_no_guest_of_another(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    now = micros(clock.now())
    known_before: dict[str, set[str]] = {}

    async def told() -> set[str]:
        rows = await database.read(lambda conn: conn.execute(departures.select()).all())
        return {row.instance_uuid for row in rows}

    class Stolen:
        async def list_guests(self, context: Context, host: str) -> tuple[Guest, ...]:
            known_before[host] = await told()
            epoch = -(2**70) if host == "b" else 3  # no database takes it
            return (Guest(uuid=f"of {host}", node=host, epoch=epoch, power_state=1),)

    def prepare(conn: sa.Connection) -> None:
        services.heartbeat(conn, COMPUTE, ["a", "b", "c"], now)
        conn.execute(deleted_instances.insert(), [_instance(f"of {host}", deleted_at=1, epoch=4) for host in "abc"])

    await database.write(prepare)
    monkeypatch.setattr(running_deleted, "HOSTS_PER_STEP", 1)
    engine = SimpleNamespace(database=database, clock=clock, now=lambda: now)
    needs = SimpleNamespace(engine=engine, compute=Stolen(), service_down_time=60.0)
    await find_running_deleted(cast(ConductorDependencies, needs), 0.0, "reap")
    assert await told() == {"of a", "of c"}
    assert known_before["c"] == {"of a"}, "the answers of all hosts are not kept in memory together"


async def test_a_host_that_does_not_switch_its_guests_off_protects_no_guest_of_another(database: Database) -> None:
    """It hangs, or was stolen. It is asked once, and again in the next run."""
    clock = ManualClock()
    now = micros(clock.now())
    asked: list[str] = []

    class Hanging:
        async def stop_guest(self, context: Context, host: str, uuid: str, epoch: int) -> None:
            asked.append(host)
            if host == "b":
                raise CallTimeout("no answer in time")

        async def list_guests(self, context: Context, host: str) -> tuple[Guest, ...]:
            return tuple(Guest(uuid=f"{n} of {host}", node=host, epoch=3, power_state=1) for n in range(2))

    def prepare(conn: sa.Connection) -> None:
        services.heartbeat(conn, COMPUTE, ["a", "b", "c"], now)
        rows = [_instance(f"{n} of {host}", deleted_at=1, epoch=4) for host in "abc" for n in range(2)]
        conn.execute(deleted_instances.insert(), rows)

    await database.write(prepare)
    engine = SimpleNamespace(database=database, clock=clock, now=lambda: now)
    needs = SimpleNamespace(engine=engine, compute=Hanging(), service_down_time=60.0)
    await find_running_deleted(cast(ConductorDependencies, needs), 0.0, "shutdown")
    assert sorted(asked) == ["a", "a", "b", "c", "c"]
