"""Server groups at every microversion at which they change."""

import asyncio
from typing import Any

import pytest

from micronova.db import quotas
from tests.functional.api.resources import Cloud, cloud  # noqa: F401
from tests.functional.api.seed import add_server
from tests.schemas.tempest import check, versions_of


def _body(minor: int, name: str = "g", policy: str = "affinity", **more: object) -> dict[str, object]:
    kind = {"policy": policy} if minor >= 64 else {"policies": [policy]}
    return {"server_group": {"name": name, **kind, **more}}


@pytest.mark.parametrize("minor", versions_of("server_groups", 15, 75))
async def test_every_answer_is_what_tempest_accepts(cloud: Cloud, minor: int) -> None:
    answer = await cloud.member.post("/os-server-groups", _body(minor), minor)
    check("server_groups", "create_show_server_group", minor, answer.status, answer.json())
    group = answer.json()["server_group"]["id"]
    server = await add_server(cloud, server_group_id=group)
    answer = await cloud.reader.get(f"/os-server-groups/{group}", minor)
    check("server_groups", "create_show_server_group", minor, answer.status, answer.json())
    assert answer.json()["server_group"]["members"] == [server]
    answer = await cloud.reader.get("/os-server-groups", minor)
    check("server_groups", "list_server_groups", minor, answer.status, answer.json())
    assert answer.json()["server_groups"][0]["members"] == [server]
    answer = await cloud.member.delete(f"/os-server-groups/{group}", minor)
    check("server_groups", "delete_server_group", minor, answer.status, answer.json())
    assert (await cloud.member.get(f"/os-server-groups/{group}", minor)).status == 404
    assert (await cloud.member.delete(f"/os-server-groups/{group}", minor)).status == 404


async def test_policies_by_version(cloud: Cloud) -> None:
    async def status(minor: int, **more: Any) -> int:
        return (await cloud.member.post("/os-server-groups", _body(minor, **more), minor)).status

    assert await status(14, policy="soft-affinity") == 400
    assert await status(15, policy="soft-affinity") == 200
    assert await status(64, policy="soft-anti-affinity") == 200
    assert await status(64, policy="legacy") == 400
    assert await status(63, rules={}) == 400
    assert await status(64, policy="affinity", rules={"max_server_per_host": 2}) == 400
    assert await status(64, policy="anti-affinity", rules={"max_server_per_host": 0}) == 400
    assert await status(64, policy="anti-affinity", rules={"odd": 1}) == 400
    answer = await cloud.member.post(
        "/os-server-groups", _body(64, policy="anti-affinity", rules={"max_server_per_host": "3"}), 64
    )
    assert answer.json()["server_group"]["rules"] == {"max_server_per_host": 3}
    both = {"server_group": {"name": "g", "policies": ["affinity", "anti-affinity"]}}
    assert (await cloud.member.post("/os-server-groups", both)).status == 400


async def test_groups_of_other_projects(cloud: Cloud) -> None:
    group = (await cloud.member.post("/os-server-groups", _body(64), 64)).json()["server_group"]["id"]
    assert (await cloud.stranger.get(f"/os-server-groups/{group}")).status == 404
    assert (await cloud.stranger.delete(f"/os-server-groups/{group}")).status == 404
    assert (await cloud.stranger.get("/os-server-groups?all_projects=1")).json()["server_groups"] == []
    assert (await cloud.reader.post("/os-server-groups", _body(1))).status == 403
    assert (await cloud.reader.delete(f"/os-server-groups/{group}")).status == 403
    other = cloud.caller("root", "blue", "admin")
    assert (await other.get("/os-server-groups")).json()["server_groups"] == []
    assert len((await other.get("/os-server-groups?all_projects=True")).json()["server_groups"]) == 1
    assert (await other.get(f"/os-server-groups/{group}")).status == 200
    assert (await other.delete(f"/os-server-groups/{group}")).status == 204


async def test_pages(cloud: Cloud) -> None:
    for number in range(4):
        cloud.clock.time += 1
        await cloud.member.post("/os-server-groups", _body(1, name=f"g{number}"))

    async def names(query: str) -> list[str]:
        return [each["name"] for each in (await cloud.member.get(f"/os-server-groups?{query}")).json()["server_groups"]]

    assert await names("limit=2") == ["g0", "g1"]
    assert await names("limit=2&offset=3") == ["g3"]
    assert await names("limit=0") == ["g0", "g1", "g2", "g3"]


async def test_the_quota_holds_under_concurrency_and_is_given_back(cloud: Cloud) -> None:
    answers = await asyncio.gather(
        *(cloud.member.post("/os-server-groups", _body(1, name=f"g{number}")) for number in range(15))
    )
    assert sorted(answer.status for answer in answers) == [200] * 10 + [403] * 5
    made = next(answer for answer in answers if answer.status == 200).json()["server_group"]["id"]
    await cloud.member.delete(f"/os-server-groups/{made}")
    assert (await cloud.database.read(quotas.usage, "red"))["server_groups"] == 9
    assert await cloud.database.read(quotas.drift) == []
