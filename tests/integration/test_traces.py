"""One trace across separate processes, as a collector receives it."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.collector import collecting

IMAGE = "11111111-1111-4111-8111-111111111111"
ROLES = ("api", "conductor", "scheduler", "compute")


@pytest.mark.timeout(180)
def test_a_boot_is_one_trace_across_processes(tmp_path: Path, database_url: str, amqp_url: str) -> None:
    with collecting() as collector:
        cluster = Cluster(tmp_path, database_url, amqp_url, telemetry={"otlp_endpoint": collector.url})
        for role in ROLES:
            cluster.add(role, role, MICRONOVA__DEFAULT__HOST=f"on-{role}")
        try:
            cluster.start()
            cluster.wait_ready(hosts=1)
            body = {"server": {"name": "traced", "imageRef": IMAGE, "flavorRef": "1", "networks": "none"}}
            status, answer = cluster.request("POST", "/servers", body)
            assert status == 202
            _wait_active(cluster, answer["server"]["id"])
        finally:
            cluster.stop()  # which sends the remaining spans
        spans = collector.spans()
    [trace] = {span["traceId"] for span in spans if span["name"] == "compute POST /servers"}
    own: dict[str, dict[str, Any]] = {span["name"]: span for span in spans if span["traceId"] == trace}
    assert {(span["scope"], span["host"]) for span in own.values()} == {
        (f"micronova.{role}", f"on-{role}") for role in ROLES
    }
    ids = {span["spanId"]: name for name, span in own.items()}
    way = ["spawn"]
    while own[way[-1]]["parentSpanId"]:
        way.append(ids[own[way[-1]]["parentSpanId"]])
    assert way == [
        "spawn",
        "build",
        "compute.execute_order",
        "dispatch",
        "operation build",
        "conductor.run_operations",
        "compute POST /servers",
    ]


def _wait_active(cluster: Cluster, id: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        _, answer = cluster.request("GET", f"/servers/{id}")
        if answer["server"]["status"] == "ACTIVE":
            return
        assert time.monotonic() < deadline and answer["server"]["status"] == "BUILD", answer
        time.sleep(0.05)  # separate processes: there is no event to wait for
