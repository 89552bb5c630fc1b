"""Several servers in one request: names, order, all or nothing, and quotas."""

import asyncio
from typing import Any

import pytest

from tests.functional.cloud import Caller, Cloud


async def _limit(user: Caller, **limits: int) -> None:
    await user.admin.put(f"/os-quota-sets/{user.project}", {"quota_set": limits})


async def _of(user: Caller, reservation: str) -> list[dict[str, Any]]:
    listed = await user.admin.get(f"/servers/detail?reservation_id={reservation}")
    return sorted(listed["servers"], key=lambda server: server["OS-EXT-SRV-ATTR:launch_index"])


async def test_names_indexes_and_the_reservation(user: Caller) -> None:
    answer = await user.post("/servers", user.body(name="web", min_count=3, return_reservation_id=True))
    assert set(answer) == {"reservation_id"} and answer["reservation_id"].startswith("r-")
    servers = await _of(user, answer["reservation_id"])
    assert [server["name"] for server in servers] == ["web-1", "web-2", "web-3"]
    assert [server["OS-EXT-SRV-ATTR:hostname"] for server in servers] == ["web-1", "web-2", "web-3"]
    assert [server["OS-EXT-SRV-ATTR:launch_index"] for server in servers] == [0, 1, 2]
    assert {server["OS-EXT-SRV-ATTR:reservation_id"] for server in servers} == {answer["reservation_id"]}
    await asyncio.gather(*(user.wait_for(server["id"], "ACTIVE") for server in servers))


async def test_the_answer_shows_the_first_of_them(user: Caller) -> None:
    answer = await user.post("/servers", user.body(name="web", max_count=2))
    first = await user.wait_for(answer["server"]["id"], "ACTIVE")
    assert first["name"] == "web-1"


@pytest.mark.parametrize("minor", [90, 93, 94, 104])
async def test_several_servers_cannot_have_one_host_name(user: Caller, minor: int) -> None:
    message = await user.at(minor).refused(400, "POST", "/servers", user.body(hostname="node", max_count=2))
    assert "hostname" in message


async def test_many_at_once_are_spread_and_clean(cloud: Cloud, user: Caller) -> None:
    ids = await user.boot_many(20)
    hosts = [await user.host_of(id) for id in ids]
    assert {hosts.count(host) for host in cloud.hosts} == {20 // len(cloud.hosts)}
    await cloud.assert_clean()


@pytest.mark.parametrize(
    ("limits", "fits"),
    [({"instances": 3}, 3), ({"cores": 4}, 4), ({"ram": 1024}, 2), ({"instances": 4, "cores": 3, "ram": 2048}, 3)],
)
async def test_quotas_reduce_to_what_fits_down_to_the_least(user: Caller, limits: dict[str, int], fits: int) -> None:
    await _limit(user, **limits)
    answer = await user.post("/servers", user.body(min_count=2, max_count=10, return_reservation_id=True))
    servers = await _of(user, answer["reservation_id"])
    assert len(servers) == fits
    used = (await user.get("/limits"))["limits"]["absolute"]
    assert (used["totalInstancesUsed"], used["totalCoresUsed"], used["totalRAMUsed"]) == (fits, fits, 512 * fits)


async def test_less_room_than_the_least_is_refused_whole(cloud: Cloud, user: Caller) -> None:
    await _limit(user, instances=3)
    await user.create()
    message = await user.refused(403, "POST", "/servers", user.body(min_count=3, max_count=5))
    assert "Quota exceeded for instances: Requested 3, but already used 1 of 3 instances" in message
    assert len((await user.get("/servers"))["servers"]) == 1
    await cloud.assert_clean()


async def test_a_delete_makes_room_again(user: Caller) -> None:
    await _limit(user, instances=1)
    server = await user.boot()
    await user.refused(403, "POST", "/servers", user.body())
    await user.delete(f"/servers/{server['id']}")
    await user.gone(server["id"])
    await user.boot()


async def test_a_server_in_error_still_counts_until_it_is_deleted(cloud: Cloud, user: Caller) -> None:
    await _limit(user, instances=1)
    async with cloud.faults({"operation": "spawn", "kind": "abort", "name": user.project}):
        id = await user.create(name=user.project)
        await user.wait_for(id, "ERROR")
    await user.refused(403, "POST", "/servers", user.body())
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await user.boot()


@pytest.mark.parametrize(
    ("limits", "fields", "words"),
    [
        ({"metadata_items": 1}, {"metadata": {"a": "1", "b": "2"}}, "metadata items"),
        ({"injected_files": 0}, {"personality": [{"path": "/a", "contents": ""}]}, "injected files"),
        ({"injected_file_content_bytes": 2}, {"personality": [{"path": "/a", "contents": "YWJj"}]}, "more than 2"),
        ({"injected_file_path_bytes": 2}, {"personality": [{"path": "/ab", "contents": ""}]}, "more than 2"),
    ],
)
async def test_items_have_limits(user: Caller, limits: dict[str, int], fields: dict[str, Any], words: str) -> None:
    old = user.at(36)
    await _limit(old, **limits)
    assert words in await old.refused(403, "POST", "/servers", old.body(**fields))


async def test_all_are_placed_or_none(cloud: Cloud, user: Caller) -> None:
    """Each host has resources for three of these; one more than the sum is too many."""
    wanted = {"name": user.project, "ram": 64, "vcpus": 64 * 4 // 3, "disk": 1}
    flavor = (await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"]
    capacity = 3 * len(cloud.hosts)
    answer = await user.post(
        "/servers",
        user.body(flavorRef=flavor, min_count=capacity + 1, max_count=capacity + 1, return_reservation_id=True),
    )
    servers = await _of(user, answer["reservation_id"])
    assert len(servers) == capacity + 1
    for server in servers:
        shown = await user.wait_for(server["id"], "ERROR")
        assert "not enough hosts" in shown["fault"]["message"]
    await cloud.assert_clean()
    await asyncio.gather(*(user.delete(f"/servers/{server['id']}") for server in servers))
    await asyncio.gather(*(user.gone(server["id"]) for server in servers))
    await cloud.assert_clean()


async def test_one_of_several_that_is_deleted_meanwhile_is_skipped(cloud: Cloud, user: Caller) -> None:
    async with cloud.faults({"operation": "spawn", "kind": "delay", "delay": 0.3, "name": user.project}):
        answer = await user.post(
            "/servers", user.body(name=user.project, min_count=3, max_count=3, return_reservation_id=True)
        )
        first, second, third = await _of(user, answer["reservation_id"])
        await user.delete(f"/servers/{second['id']}")
        await user.gone(second["id"])
        await user.wait_for(first["id"], "ACTIVE")
        await user.wait_for(third["id"], "ACTIVE")
    await cloud.assert_clean()
