"""The NUMA topology of servers."""

from typing import Any

import pytest

from tests.functional.cloud import Caller, Cloud


@pytest.mark.parametrize(
    ("specs", "nodes", "page"),
    [
        ({}, [], None),
        (
            {"hw:numa_nodes": "2"},
            [
                {"vcpu_set": [0, 1], "siblings": [], "memory_mb": 128},
                {"vcpu_set": [2, 3], "siblings": [], "memory_mb": 128},
            ],
            None,
        ),
        (
            {"hw:cpu_policy": "dedicated", "hw:cpu_threads": "2", "hw:mem_page_size": "2048"},
            [{"vcpu_set": [0, 1, 2, 3], "siblings": [[0, 1], [2, 3]], "memory_mb": 256}],
            2048,
        ),
        (
            {"hw:mem_page_size": "large"},  # which size that is, the host decides
            [{"vcpu_set": [0, 1, 2, 3], "siblings": [], "memory_mb": 256}],
            None,
        ),
    ],
)
async def test_what_flavor_and_image_ask_for(
    cloud: Cloud, user: Caller, specs: dict[str, str], nodes: list[Any], page: int | None
) -> None:
    flavor = {"name": f"f-{user.project}", "ram": 256, "vcpus": 4, "disk": 1}
    id = (await user.admin.post("/flavors", {"flavor": flavor}, 200))["flavor"]["id"]
    await user.admin.post(f"/flavors/{id}/os-extra_specs", {"extra_specs": specs}, 200)
    server = await user.create(flavorRef=id)
    for caller in (user, user.admin):
        assert await caller.get(f"/servers/{server}/topology") == {"nodes": nodes, "pagesize_kb": page}
    await cloud.caller().refused(404, "GET", f"/servers/{server}/topology")
    await user.at(78).get(f"/servers/{server}/topology?zork=1")
    await user.refused(400, "GET", f"/servers/{server}/topology?zork=1")
    await user.at(77).refused(404, "GET", f"/servers/{server}/topology")
