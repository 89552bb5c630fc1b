"""What steers where servers go, with the filters that are off by default: aggregates, hints and extra specs."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.conf.control import FilterSchedulerSettings
from micronova.db import tables
from tests.functional.cloud import Caller, Cloud, CloudOptions, OneProcess, only_in_one_process

MORE = (
    "AggregateInstanceExtraSpecsFilter",
    "AggregateMultiTenancyIsolation",
    "AggregateTypeAffinityFilter",
    "AggregateNumInstancesFilter",
    "JsonFilter",
    "SimpleCIDRAffinityFilter",
)
CLOUD = CloudOptions(
    hosts=3,
    settings={
        "filter_scheduler": {"enabled_filters": [*FilterSchedulerSettings().enabled_filters, *MORE]},
        "default": {"compute_monitors": ["cpu.virt_driver"]},
        "compute": {"resource_interval": 0.2},
        "scheduler": {"enable_isolated_aggregate_filtering": True},
        "fake": {"traits": ["CUSTOM_HOST_LICENSED"]},
        "metrics": {"weight_setting": ["cpu.percent=-0.001"], "required": False},
    },
)
pytestmark = only_in_one_process("the processes that tests share have the default filters")
SERVER = "00000000-0000-4000-8000-000000000001"


@asynccontextmanager
async def _aggregates(user: Caller, metadata: dict[str, dict[str, str]]) -> AsyncIterator[None]:
    """Have an aggregate for each of these hosts."""
    paths = {}
    for host, values in metadata.items():
        made = await user.admin.post("/os-aggregates", {"aggregate": {"name": f"{user.project}-{host}"}}, 200)
        paths[host] = f"/os-aggregates/{made['aggregate']['id']}"
        await user.admin.post(f"{paths[host]}/action", {"set_metadata": {"metadata": values}}, 200)
        await user.admin.post(f"{paths[host]}/action", {"add_host": {"host": host}}, 200)
    yield
    for host, path in paths.items():
        await user.admin.post(f"{path}/action", {"remove_host": {"host": host}}, 200)


async def _flavor(user: Caller, ram: int = 64, /, **extra_specs: str) -> str:
    wanted = {"name": user.project, "ram": ram, "vcpus": 1, "disk": 1}
    id = str((await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"])
    await user.admin.post(f"/flavors/{id}/os-extra_specs", {"extra_specs": extra_specs}, 200)
    return id


async def _host_of(user: Caller, hints: dict[str, Any] | None = None, **fields: Any) -> str | None:
    """Boot a server; give its host, None if there is none for it."""
    body = {**user.body(**fields), "os:scheduler_hints": hints or {}}
    id = (await user.post("/servers", body))["server"]["id"]
    shown = await user.wait_for(id, "ACTIVE", "ERROR")
    host = (await user.admin.get(f"/servers/{id}"))["server"]["OS-EXT-SRV-ATTR:host"]
    return host if shown["status"] == "ACTIVE" else None


async def test_aggregates_decide(cloud: Cloud, user: Caller) -> None:
    first, second, third = cloud.hosts
    metadata = {
        first: {"ssd": "true, nvme"},
        second: {"filter_tenant_id": "somebody-else"},
        third: {"instance_type": f"other, {user.project}", "max_instances_per_host": "1"},
    }
    async with _aggregates(user, metadata):
        fast = await _flavor(user, **{"aggregate_instance_extra_specs:ssd": "<or> nvme <or> optane"})
        assert [await _host_of(user, flavorRef=fast) for _ in range(2)] == [first] * 2
        assert {await _host_of(user) for _ in range(3)} == {first}  # the third one does not take this flavor


async def test_aggregates_are_kept_for_servers_with_their_traits(cloud: Cloud, user: Caller) -> None:
    first, second, third = cloud.hosts
    kept = {"trait:CUSTOM_HOST_LICENSED": "required"}
    async with _aggregates(user, {first: kept, second: kept, third: {"filter_tenant_id": "somebody-else"}}):
        licensed = await _flavor(user, **kept)
        assert await _host_of(user, flavorRef=licensed) in (first, second)
        refused = await user.wait_for(await user.create(), "ERROR")
        assert "free of aggregates that are kept for other traits" in refused["fault"]["message"]


async def test_a_host_takes_what_the_scheduler_has_claimed_of_it(cloud: Cloud, user: Caller) -> None:
    """Extra specs let a server claim less than its flavor has; its host counts the same."""
    await user.admin.put(f"/os-quota-sets/{user.project}", {"quota_set": {"ram": -1}})
    flavor = await _flavor(user, 300_000, **{"resources:MEMORY_MB": "1"})  # hosts have 262,144 MiB
    for flavor_ref in (flavor, flavor, "1"):
        for host in cloud.hosts:
            assert await _host_of(user.admin, flavorRef=flavor_ref, availability_zone=f"nova:{host}") == host


async def test_what_monitors_measure_reaches_the_scheduler(cloud: OneProcess) -> None:
    database = cloud.process.database
    assert database is not None

    async def measured() -> dict[str, dict[str, float]] | None:
        rows = await database.read(lambda conn: conn.execute(sa.select(tables.compute_nodes)).mappings().all())
        found = {row["host"]: row["metrics"] for row in rows if row["metrics"]}
        return found if len(found) == len(cloud.hosts) else None

    found = await cloud.until(measured, "metrics of all hosts")
    assert {tuple(each) for each in found.values()} == {("cpu.percent",)}


async def test_hints_decide(cloud: Cloud, user: Caller) -> None:
    query = ["and", ["in", "$host", cloud.hosts[1], "nowhere"], [">=", "$free_ram_mb", 1]]
    assert await _host_of(user, {"query": json.dumps(query)}) == cloud.hosts[1]
    assert await _host_of(user, {"query": '["<", "$free_ram_mb", 1]'}) is None
    assert await _host_of(user, {"build_near_host_ip": "127.0.0.9"}) in cloud.hosts
    assert await _host_of(user, {"build_near_host_ip": "192.0.2.1", "cidr": "/30"}) is None


@pytest.mark.parametrize(
    ("hints", "told"),
    [
        ({"query": "junk"}, "it is no JSON"),
        ({"query": "[" * 5000}, "it is no JSON"),
        ({"query": "{}"}, "a query is a list"),
        ({"query": '["~", "$free_ram_mb", 1]'}, '"~" is no operator'),
        ({"query": '["<", "$free_ram", 1]'}, "$free_ram is no variable"),
        ({"query": '["<", "$free_ram_mb", "many"]'}, "numbers with numbers"),
        ({"query": '["<", "$free_ram_mb"]'}, "two operands or more"),
        ({"query": '["and"]'}, "and needs a query"),
        ({"query": ['["<", "$free_ram_mb", 1]', "2"]}, "one text in JSON"),
        ({"query": json.dumps(["or", *[["=", "$host", "a"]] * 30])}, "more than 64 operators and operands"),
        ({"query": json.dumps(["in", "$host", *["a"] * 63])}, "more than 64 operators and operands"),
        ({"build_near_host_ip": "127.0.0.1", "cidr": "24"}, "such as /24"),
        ({"build_near_host_ip": "127.0.0.1", "cidr": "/99"}, "such as /24"),
        ({"cidr": "/24"}, "build_near_host_ip"),
        ({"same_host": [SERVER]}, f"{SERVER}, which could not be found"),
        ({"different_host": SERVER}, f"{SERVER}, which could not be found"),
        ({"group": SERVER}, f"{SERVER} could not be found"),
    ],
)
async def test_bad_hints(user: Caller, hints: dict[str, Any], told: str) -> None:
    assert told in await user.refused(400, "POST", "/servers", {**user.body(), "os:scheduler_hints": hints})


async def test_servers_of_others_are_not_found(cloud: Cloud, user: Caller) -> None:
    own = (await user.post("/servers", user.body()))["server"]["id"]
    await user.wait_for(own, "ACTIVE")
    stranger = cloud.caller()
    for hint in ("same_host", "different_host"):
        body = {**stranger.body(), "os:scheduler_hints": {hint: [own]}}
        assert f"{own}, which could not be found" in await stranger.refused(400, "POST", "/servers", body)
    assert await _host_of(user, {"same_host": [own]}) is not None


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("capabilities:free_ram_mb", ">= many", ">= compares with a number, and many is none"),
        ("aggregate_instance_extra_specs:ssd", "s==", "nothing follows s=="),
    ],
)
async def test_malformed_extra_specs(user: Caller, name: str, value: str, told: str) -> None:
    body = user.body(flavorRef=await _flavor(user, **{name: value}))
    message = await user.refused(400, "POST", "/servers", body)
    assert name in message and told in message
