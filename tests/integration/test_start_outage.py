"""A role whose database goes away while it starts, after it has answered once, waits for it and starts."""

import asyncio
import contextlib
from pathlib import Path

import asyncpg
import pytest

from micronova.db import schema
from tests.cluster import Cluster
from tests.services.postgres import Postgres
from tests.services.process import free_port

pytestmark = pytest.mark.timeout(300)
_WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


async def test_a_role_waits_for_a_database_that_goes_away_while_it_starts(services_dir: Path, tmp_path: Path) -> None:
    postgres = Postgres.start(services_dir / "goes-away", durable=True)
    cluster = Cluster(tmp_path, postgres.create_database("region"), "amqp://u:p@127.0.0.1:1/")
    cluster.add_service("identity", "identity", free_port())
    with contextlib.ExitStack() as stack:
        stack.callback(postgres.stop)
        stack.callback(cluster.stop)
        migrates = await asyncpg.connect(postgres.url.replace("/postgres", "/region"))
        await migrates.execute(f"SELECT pg_advisory_lock({schema._LOCK})")  # as another role that migrates has it
        cluster.start("identity")
        async with asyncio.timeout(120):
            while await migrates.fetchval(_WAITING) != 1:
                await asyncio.sleep(0.1)  # another process tells us nothing: we have to ask
        postgres.stop()
        with contextlib.suppress(Exception):
            await migrates.close(timeout=1)
        async with asyncio.timeout(120):
            while "this process waits until it can start" not in cluster.log("identity"):
                assert cluster.processes["identity"].poll() is None, cluster.log("identity")
                await asyncio.sleep(0.1)
        postgres.restart()
        await asyncio.to_thread(cluster.wait_listening, "identity")
