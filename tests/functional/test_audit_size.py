"""The audit of many hosts: its transactions do not depend on their number, and it tells how far it is."""

from pathlib import Path

import pytest

from micronova.cli.audit import run_audit
from tests.functional.cloud import CloudOptions, one_process

HOSTS = 1_001
# Heartbeats and sweeps are no part of the count.
SETTINGS = {
    "default": {"report_interval": 300.0, "service_down_time": 3600.0},
    "conductor": {"lease": 600.0, "sweep_interval": 300.0},
}


@pytest.mark.thorough
async def test_the_audit_reads_the_database_a_few_times(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    async with one_process(tmp_path, CloudOptions(hosts=HOSTS, settings=SETTINGS)) as cloud:
        database = cloud.process.database
        assert database is not None
        before = database.statistics.reads + database.statistics.writes
        assert await run_audit(cloud.process, progress=lambda done, hosts: told.append((done, hosts))) == []
        assert database.statistics.reads + database.statistics.writes - before < 10
    assert told == [(500, HOSTS), (1_000, HOSTS), (HOSTS, HOSTS)]
