"""Many at once, on PostgreSQL and RabbitMQ: four conductors and four schedulers race for the last hosts and quotas."""

import collections
from collections.abc import Iterator
from typing import Any

import pytest

from micronova.http.client import Answer, HTTPTransport
from tests.cluster import Cluster
from tests.functional.races import REQUESTS_AT_ONCE, Client, fill, race_for_quota

HOSTS, ROOM_PER_HOST = 6, 50
REQUESTS = 500


@pytest.fixture(scope="module")
def cluster(
    module_database_url: str, module_amqp_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cloud with room for exactly 300 of the smallest servers."""
    made = Cluster(
        tmp_path_factory.mktemp("races"), module_database_url, module_amqp_url, api={"workers": 2},
        default={"cpu_allocation_ratio": 1.0, "service_down_time": 30.0, "report_interval": 2.0},
        conductor={"lease": 20.0}, fake={"hosts": HOSTS // 2, "vcpus": ROOM_PER_HOST},
    )  # fmt: skip
    made.add("api", "api")
    for number in range(1, 5):
        for role in ("conductor", "scheduler"):
            made.add(f"{role}{number}", role, MICRONOVA__DEFAULT__HOST=f"{role}{number}")
    for letter in "ab":
        made.add(f"compute-{letter}", "compute", MICRONOVA__FAKE__HOST_PATTERN=f"{letter}-{{}}")
    try:
        made.start()
        made.wait_ready(hosts=HOSTS)
        yield made
    finally:
        made.stop()


class Web:
    """Requests over the network."""

    def __init__(self, port: int) -> None:
        self.transport = HTTPTransport(f"http://127.0.0.1:{port}", timeout=120, connections=REQUESTS_AT_ONCE)

    async def request(self, method: str, path: str, headers: dict[str, str], body: bytes | None) -> Answer:
        return await self.transport.request(method, path, headers, body)


@pytest.mark.timeout(300)
async def test_500_requests_into_room_for_300(cluster: Cluster) -> None:
    web = Web(cluster.port)
    try:
        servers = await fill(Client(web.request, "crowd"), REQUESTS, patience=200)
    finally:
        await web.transport.close()
    _check(servers)
    assert cluster.audit() == []
    nodes = cluster.request("GET", "/os-hypervisors/detail", version="2.87")[1]["hypervisors"]
    assert [node["vcpus_used"] for node in nodes] == [ROOM_PER_HOST] * HOSTS
    assert sum(node["running_vms"] for node in nodes) == HOSTS * ROOM_PER_HOST


def _check(servers: list[dict[str, Any]]) -> None:
    ends = collections.Counter(server["status"] for server in servers)
    assert ends == {"ACTIVE": 300, "ERROR": 200}
    for server in servers:
        if server["status"] == "ERROR":
            assert "No valid host was found" in server["fault"]["message"]
    hosts = collections.Counter(s["OS-EXT-SRV-ATTR:host"] for s in servers if s["status"] == "ACTIVE")
    assert set(hosts.values()) == {ROOM_PER_HOST} and len(hosts) == HOSTS


@pytest.mark.timeout(120)
async def test_50_requests_into_a_quota_of_10(cluster: Cluster) -> None:
    web = Web(cluster.port)
    try:
        await race_for_quota(Client(web.request, "poor"), 50, 10)
    finally:
        await web.transport.close()
