"""Four schedulers and four conductors race for dedicated CPUs, PCI devices and virtual GPUs that fit exactly."""

import collections
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.functional.races import REQUESTS_AT_ONCE, Client, fill
from tests.integration.test_races import Web

HOSTS, NODES = 4, 2
DIVIDED, VGPUS = ("0000:84:00.0", "0000:85:00.0", "0000:86:00.0"), 2
GPU = {"vendor_id": "10de", "product_id": "1eb8"}


@pytest.fixture(scope="module")
def cluster(
    module_database_url: str, module_amqp_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Hosts with two NUMA nodes, each with six dedicated CPUs and one GPU, and with three GPUs that are divided."""
    fake = {
        "hosts": HOSTS // 2, "vcpus": 16, "numa_nodes": NODES, "cpu_dedicated_set": "2-7,10-15",
        "pci_devices": [{"address": f"0000:0{node}:00.0", "numa_node": node, **GPU} for node in range(NODES)],
        "mdev_devices": [{"address": address, "types": {"nvidia-35": VGPUS}} for address in DIVIDED],
    }  # fmt: skip
    made = Cluster(
        tmp_path_factory.mktemp("races"), module_database_url, module_amqp_url, api={"workers": 2},
        default={"service_down_time": 30.0, "report_interval": 2.0}, conductor={"lease": 20.0}, fake=fake,
        pci={"alias": [{"name": "gpu", "numa_policy": "required", **GPU}]},
        devices={"enabled_mdev_types": ["nvidia-35"]},
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


def _flavor(cluster: Cluster, vcpus: int, **specs: str) -> str:
    body = {"flavor": {"name": f"pinned-{vcpus}", "ram": 512, "vcpus": vcpus, "disk": 1}}
    id: str = cluster.request("POST", "/flavors", body)[1]["flavor"]["id"]
    extra = {name.replace("__", ":"): value for name, value in specs.items()}
    cluster.request("POST", f"/flavors/{id}/os-extra_specs", {"extra_specs": extra})
    return id


def _held(cluster: Cluster, servers: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return host and number of each dedicated CPU that a server has."""
    held = []
    for server in servers:
        nodes = cluster.request("GET", f"/servers/{server['id']}/topology", version="2.78")[1]["nodes"]
        cpus = [cpu for node in nodes for cpu in node["cpu_pinning"].values()]
        held += [(server["OS-EXT-SRV-ATTR:host"], cpu) for cpu in cpus]
    return held


def _delete_all(cluster: Cluster, servers: list[dict[str, Any]]) -> None:
    for server in servers:
        cluster.request("DELETE", f"/servers/{server['id']}")
    cluster.wait_until(lambda: not cluster.request("GET", "/servers?all_tenants=1")[1]["servers"])


async def _race(cluster: Cluster, flavor: str, requests: int, room: int) -> list[dict[str, Any]]:
    web = Web(cluster.port)
    try:
        servers = await fill(Client(web.request, f"crowd-{room}"), requests, patience=200, flavor=flavor)
    finally:
        await web.transport.close()
    active = [server for server in servers if server["status"] == "ACTIVE"]
    for server in servers:
        if server["status"] == "ERROR":
            assert "No valid host was found" in server["fault"]["message"]
    assert len(active) == room, collections.Counter(server["status"] for server in servers)
    assert cluster.audit() == []
    return servers


@pytest.mark.timeout(400)
async def test_exactly_as_many_servers_as_there_are_cpus_and_devices(cluster: Cluster) -> None:
    """First servers that need all CPUs and the GPU of one node, then servers that need a CPU of each node."""
    whole = _flavor(cluster, 6, hw__cpu_policy="dedicated", pci_passthrough__alias="gpu:1")
    spread = _flavor(cluster, 2, hw__cpu_policy="dedicated", hw__numa_nodes="2")
    for flavor, requests, room in ((whole, 3 * HOSTS * NODES, HOSTS * NODES), (spread, REQUESTS_AT_ONCE, HOSTS * 6)):
        servers = await _race(cluster, flavor, requests, room)
        held = _held(cluster, [server for server in servers if server["status"] == "ACTIVE"])
        assert len(set(held)) == len(held) == HOSTS * NODES * 6
        _delete_all(cluster, servers)


@pytest.mark.timeout(400)
async def test_exactly_as_many_servers_as_there_are_virtual_gpus(cluster: Cluster) -> None:
    """Each host has three GPUs with room for two servers: a claim that loses the race for one takes another one."""
    flavor = _flavor(cluster, 1, resources__VGPU="1", trait__CUSTOM_NVIDIA_35="required")
    room = HOSTS * len(DIVIDED) * VGPUS
    servers = await _race(cluster, flavor, 3 * room, room)
    hosts = collections.Counter(each["OS-EXT-SRV-ATTR:host"] for each in servers if each["status"] == "ACTIVE")
    assert set(hosts.values()) == {len(DIVIDED) * VGPUS}
    _delete_all(cluster, servers)
