"""What servers have done with volumes: a run that cannot be recorded ends as a whole."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sqlalchemy as sa

from micronova.conductor import volume_usage
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.db import instances, services, volume_usages
from micronova.db.engine import Database
from micronova.db.tables import instances as table
from micronova.objects.block_device import BlockDevice
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.errors import Unavailable
from micronova.objects.service_names import COMPUTE
from micronova.objects.volume import VolumeStatistics
from tests.clocks import ManualClock, settle
from tests.unit.db.databases import compute_database
from tests.unit.scheduler.rows import add_instances

HOSTS = [f"h{number}" for number in range(40)]


@pytest.fixture
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database("sqlite", request) as opened:
        yield opened


async def test_no_worker_outlives_a_run_that_the_database_ends(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would measure beside the next run, and a volume that is attached again would count twice."""
    clock = ManualClock()
    now = micros(clock.now())
    asked: list[str] = []
    last_answers, recorded = asyncio.Event(), asyncio.Event()

    def prepare(conn: sa.Connection) -> None:
        services.heartbeat(conn, COMPUTE, HOSTS, now)
        add_instances(conn, *HOSTS)
        for host in HOSTS:
            conn.execute(table.update().where(table.c.uuid == host).values(host=host))
            volume = f"volume of {host}"
            device = BlockDevice(uuid=host, source_type="volume", destination_type="volume", volume_id=volume)
            instances.add_device(conn, host, device)

    class Hosts:
        async def get_volume_statistics(
            self, context: Context, host: str, uuids: Sequence[str]
        ) -> dict[str, tuple[VolumeStatistics, ...]]:
            asked.append(host)
            if host == HOSTS[0]:
                await settle()  # until the others are asked
            else:
                await last_answers.wait()
            found = VolumeStatistics(volume_id=f"volume of {host}", reads=1, read_bytes=1, writes=1, write_bytes=1)
            return {host: (found,)}

    async def write(fn: Callable[..., Any], *args: Any) -> Any:
        if fn is volume_usages.record:
            recorded.set()
            raise Unavailable("The database does not answer.")
        return await database.write(fn, *args)

    monkeypatch.setattr(volume_usage, "HOSTS_AT_ONCE", 4)
    await database.write(prepare)
    engine = SimpleNamespace(database=SimpleNamespace(read=database.read, write=write), clock=clock, now=lambda: now)
    notifier = SimpleNamespace(enabled=True)
    needs = SimpleNamespace(engine=engine, compute=Hosts(), notifier=notifier, service_down_time=60.0)
    run = asyncio.create_task(volume_usage.tell_volume_usage(cast(ConductorDependencies, needs)))
    await asyncio.wait_for(recorded.wait(), 10)
    before = len(asked)
    assert before == 4
    await settle()
    assert not run.done()
    last_answers.set()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(run, 10)
    await settle()
    assert len(asked) == before, "no other host is asked"
