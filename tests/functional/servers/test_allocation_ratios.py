"""Allocation ratios that operators change by the Placement API, as Nova's documentation has it."""

import uuid
from typing import Any

from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import call

pytestmark = only_in_one_process("the test changes what its hosts have")
CLOUD = CloudOptions(hosts=2, settings={"fake": {"vcpus": 4, "memory_mb": 1024, "local_gb": 40}})
PLACEMENT = {"openstack-api-version": "placement 1.39"}


async def _flavor(user: Caller, vcpus: int, ram: int) -> str:
    wanted = {"name": uuid.uuid4().hex, "ram": ram, "vcpus": vcpus, "disk": 1}
    return str((await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"])


async def _set(user: Caller, name: str, ratio: float) -> None:
    """Do what `openstack resource provider inventory set --amend --resource NAME:allocation_ratio=RATIO` does."""
    for inventories in await _inventories(user):
        path = f"{inventories}/{name}"
        found = (await call(user.admin, "GET", path, None, PLACEMENT)).json()
        answer = await call(user.admin, "PUT", path, {**found, "allocation_ratio": ratio}, PLACEMENT)
        assert answer.status == 200, answer.body


async def _inventories(user: Caller) -> list[str]:
    nodes = (await user.admin.get("/os-hypervisors"))["hypervisors"]
    return [f"/placement/resource_providers/{node['id']}/inventories" for node in nodes]


async def _shown(user: Caller) -> list[dict[str, float]]:
    found: list[Any] = [
        (await call(user.admin, "GET", path, None, PLACEMENT)).json() for path in await _inventories(user)
    ]
    return [{name: each["allocation_ratio"] for name, each in node["inventories"].items()} for node in found]


async def test_ratios_stay_and_count_for_scheduler_and_host(cloud: Cloud, user: Caller) -> None:
    assert await _shown(user) == [{"VCPU": 4.0, "MEMORY_MB": 1.0, "DISK_GB": 1.0}] * 2
    half = await _flavor(user, 4, 256)
    for _ in range(4):
        await user.boot(flavorRef=half)
    assert "256 MiB of free memory" in await _refused(user, half)
    await _set(user, "MEMORY_MB", 2.0)
    for _ in range(4):  # beyond what the host knows of
        await user.boot(flavorRef=half)
    await _set(user, "MEMORY_MB", 3.0)
    assert "4 free vCPUs" in await _refused(user, half)
    await _set(user, "VCPU", 5.0)
    for _ in range(2):
        await user.boot(flavorRef=half)
    # Each build made the host report what it has.
    assert await _shown(user) == [{"VCPU": 5.0, "MEMORY_MB": 3.0, "DISK_GB": 1.0}] * 2
    await cloud.assert_clean()


async def _refused(user: Caller, flavor: str) -> str:
    shown = await user.wait_for(await user.create(flavorRef=flavor), "ERROR")
    return str(shown["fault"]["message"])
