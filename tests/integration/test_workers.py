"""Workers of a process with several roles: each has all of them, and rows of its own."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster

READY = "api, conductor, scheduler: ready"


@pytest.fixture
def region(tmp_path: Path, database_url: str, amqp_url: str) -> Iterator[Cluster]:
    made = Cluster(tmp_path, database_url, amqp_url, conductor={"workers": 2}, fake={"hosts": 1})
    made.add("control", "api conductor scheduler", None, MICRONOVA__DEFAULT__HOST="node")
    made.add("compute", "compute")
    made.start()
    yield made
    made.stop()


def _rows(region: Cluster) -> list[str]:
    _, body = region.request("GET", "/os-services")
    return sorted(f"{row['binary']} {row['host']} {row['state']}" for row in body["services"])


def _workers(region: Cluster) -> list[int]:
    pid = region.processes["control"].pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _until_ready(region: Cluster, count: int) -> None:
    region.wait_until(lambda: region.log("control").count(READY) == count)


def test_workers_that_start_together_on_an_empty_database(tmp_path: Path, database_url: str, amqp_url: str) -> None:
    roles = "identity image network volume api conductor scheduler"
    keys = {"ticket_key": "5a" * 32}
    made = Cluster(tmp_path, database_url, amqp_url, api={"workers": 3}, glance=keys, neutron=keys)
    made.add("control", roles)
    made.start()
    try:
        made.wait_until(lambda: made.log("control").count(": ready") == 3)
    finally:
        made.stop()


def test_each_worker_has_rows_of_its_own_which_it_keeps(region: Cluster) -> None:
    region.wait_ready(1)
    _until_ready(region, 2)
    rows = [f"nova-{role} {name} up" for role in ("conductor", "scheduler") for name in ("node", "node-2")]
    assert [row for row in _rows(region) if "compute" not in row] == rows
    leases = sorted(file.name for file in (region.directory / "control").glob("*.lock") if "conductor" in file.name)
    assert leases == ["conductor-2.lock", "conductor.lock"]
    killed, stays = _workers(region)
    os.kill(killed, signal.SIGKILL)
    _until_ready(region, 3)
    assert [row for row in _rows(region) if "compute" not in row] == rows
    assert stays in _workers(region) and len(_workers(region)) == 2
    assert "set default.host" not in region.log("control")
