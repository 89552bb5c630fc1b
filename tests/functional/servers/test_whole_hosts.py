"""A server never gets more than its whole host has, whatever the allocation ratios; other services see the same."""

import uuid
from typing import Any

from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import call

pytestmark = only_in_one_process("its hosts have four CPUs, of which each is given out four times")
RATIOS = {"cpu_allocation_ratio": 4.0, "ram_allocation_ratio": 2.0, "disk_allocation_ratio": 2.0}
CLOUD = CloudOptions(
    hosts=2,
    settings={
        "fake": {"vcpus": 4, "memory_mb": 4096, "local_gb": 40},
        "default": {**RATIOS, "allow_resize_to_same_host": True, "report_interval": 300.0, "service_down_time": 3600.0},
    },
)
PLACEMENT = {"openstack-api-version": "placement 1.39"}


async def _flavor(user: Caller, vcpus: int = 1, ram: int = 64, disk: int = 1) -> str:
    wanted = {"name": uuid.uuid4().hex, "ram": ram, "vcpus": vcpus, "disk": disk}
    return str((await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"])


async def _placement(user: Caller, method: str, path: str, body: Any = None) -> Any:
    return await call(user.admin, method, f"/placement{path}", body, PLACEMENT)


async def _nodes(user: Caller) -> dict[str, str]:
    found = (await user.admin.get("/os-hypervisors"))["hypervisors"]
    return {each["hypervisor_hostname"]: each["id"] for each in found}


async def test_servers_share_a_host_and_none_is_larger_than_it(cloud: Cloud, user: Caller) -> None:
    whole = await _flavor(user, vcpus=4)
    assert len({await user.host_of((await user.boot(flavorRef=whole))["id"]) for _ in range(4)}) == 2  # two on each
    for flavor, told in (
        (await _flavor(user, vcpus=5), "large enough for 5 vCPUs"),
        (await _flavor(user, ram=4097), "large enough for 4097 MiB of memory"),
        (await _flavor(user, disk=41), "large enough for 41 GiB of disk"),
    ):
        refused = await user.wait_for(await user.create(flavorRef=flavor), "ERROR")
        assert f"no host is {told}; 2 hosts are too small." in refused["fault"]["message"]
        forced = await user.admin.create(flavorRef=flavor, availability_zone=f"nova:{cloud.hosts[0]}")
        assert (await user.admin.wait_for(forced, "ERROR"))["fault"]["message"].endswith(
            f"the only possible host is too small: the server needs one that is {told}."
        )


async def test_a_server_does_not_grow_beyond_its_host(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot(flavorRef=await _flavor(user)))["id"]
    await user.act(id, "resize", {"flavorRef": await _flavor(user, vcpus=5)})
    shown = await user.wait_for(id, "ACTIVE", "VERIFY_RESIZE", "ERROR")
    assert (shown["status"], shown["flavor"]["vcpus"]) == ("ACTIVE", 1)
    await user.act(id, "resize", {"flavorRef": await _flavor(user, vcpus=4)})
    await user.wait_for(id, "VERIFY_RESIZE")
    await cloud.assert_clean()


async def test_other_services_see_the_same(cloud: Cloud, user: Caller) -> None:
    nodes = await _nodes(user)
    for node in nodes.values():
        stock = (await _placement(user, "GET", f"/resource_providers/{node}/inventories")).json()["inventories"]
        units = {name: (each["total"], each["max_unit"]) for name, each in stock.items()}
        assert units == {"VCPU": (4, 4), "MEMORY_MB": (4096, 4096), "DISK_GB": (40, 40)}
    fitting = (await _placement(user, "GET", "/allocation_candidates?resources=VCPU:4")).json()
    assert len(fitting["allocation_requests"]) == 2
    too_large = (await _placement(user, "GET", "/allocation_candidates?resources=VCPU:5")).json()
    assert too_large["allocation_requests"] == []
    body = {
        "allocations": {nodes[cloud.hosts[0]]: {"resources": {"VCPU": 5}}}, "consumer_generation": None,
        "project_id": "p", "user_id": "u", "consumer_type": "RESERVATION",
    }  # fmt: skip
    answer = await _placement(user, "PUT", f"/allocations/{uuid.uuid4()}", body)
    assert answer.status == 409 and "from 1 to 4 in steps of 1" in answer.json()["errors"][0]["detail"]


async def test_what_a_smaller_unit_forbids_is_not_built(cloud: Cloud, user: Caller) -> None:
    """Somebody lowers the unit through the Placement API: the scheduler and the claim both look at it.

    It lasts until the next report of the host, which is rare in this cloud.
    """
    node = (await _nodes(user))[cloud.hosts[0]]
    path = f"/resource_providers/{node}/inventories/VCPU"
    stock = (await _placement(user, "GET", path)).json()
    answer = await _placement(user, "PUT", path, {**stock, "max_unit": 2})
    assert answer.status == 200, answer.body
    id = await user.admin.create(flavorRef=await _flavor(user, vcpus=3), availability_zone=f"nova:{cloud.hosts[0]}")
    refused = await user.admin.wait_for(id, "ERROR")
    assert "large enough for 3 vCPUs" in refused["fault"]["message"]
