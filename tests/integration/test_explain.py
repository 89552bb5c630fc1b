"""`micronova explain` in a region: the command asks a scheduler of another process, over the broker."""

import json
import time
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.command import micronova, ok, refused

IMAGE = "11111111-1111-4111-8111-111111111111"


@pytest.mark.timeout(240)
def test_a_scheduler_of_another_process_answers(tmp_path: Path, database_url: str, amqp_url: str) -> None:
    cluster = Cluster(tmp_path, database_url, amqp_url, fake={"hosts": 3})
    for role in ("api", "conductor", "scheduler", "compute"):
        cluster.add(role, role)
    place = ("--config", cluster.config, "--dir", tmp_path / "operator")
    wanted = ("explain", "--dry-run", "--flavor", "m1.tiny", "--image", IMAGE, *place)
    try:
        cluster.start()
        cluster.wait_ready(hosts=3)
        [selection] = json.loads(ok(*wanted, "--json"))["selections"]
        server = {"name": "web", "imageRef": IMAGE, "flavorRef": "1", "networks": "none"}
        status, _ = cluster.request("POST", "/servers", {"server": server})
        assert status == 202
        _wait_active(cluster)
        assert f"chosen: {selection['host']}," in ok("explain", "web", *place)
        drawn = tmp_path / "dry-run.svg"
        done = micronova(*wanted, "--count", "1000", "--heat-map", drawn)
        assert done.returncode == 1 and "There is room for " in done.stdout, done
        assert f"{drawn} shows 3 hosts" in done.stdout
        assert all(f"fake-{number} (nova)" in drawn.read_text() for number in (1, 2, 3))
        ok("explain", "--heat-map", drawn, *place)
        assert "no-such" in refused(*wanted, "--host", "no-such")
        assert cluster.audit() == []
        cluster.remove("scheduler")
        assert "scheduler" in refused(*wanted)
    finally:
        cluster.stop()


def _wait_active(cluster: Cluster) -> None:
    deadline = time.monotonic() + 30
    while True:
        _, answer = cluster.request("GET", "/servers/detail")
        if [server["status"] for server in answer["servers"]] == ["ACTIVE"]:
            return
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)  # separate processes: there is no event to wait for
