"""Aggregates at every microversion at which they change."""

import pytest

from tests.functional.api.resources import Cloud, cloud  # noqa: F401
from tests.functional.api.seed import add_host, add_server
from tests.schemas.tempest import check, versions_of


async def _made(cloud: Cloud, name: str, **more: object) -> int:
    answer = await cloud.admin.post("/os-aggregates", {"aggregate": {"name": name, **more}})
    assert answer.status == 200, answer.body
    return int(answer.json()["aggregate"]["id"])


@pytest.mark.parametrize("minor", versions_of("aggregates", 102))
async def test_every_answer_is_what_tempest_accepts(cloud: Cloud, minor: int) -> None:
    await add_host(cloud, "h1")
    admin = cloud.admin
    answer = await admin.post("/os-aggregates", {"aggregate": {"name": "a", "availability_zone": "z"}}, minor)
    check("aggregates", "create_aggregate", minor, answer.status, answer.json())
    path = f"/os-aggregates/{answer.json()['aggregate']['id']}"
    answer = await admin.post(f"{path}/action", {"add_host": {"host": "h1"}}, minor)
    check("aggregates", "aggregate_add_remove_host", minor, answer.status, answer.json())
    assert answer.json()["aggregate"]["hosts"] == ["h1"]
    answer = await admin.post(f"{path}/action", {"set_metadata": {"metadata": {"ssd": "true"}}}, minor)
    check("aggregates", "aggregate_set_metadata", minor, answer.status, answer.json())
    assert answer.json()["aggregate"]["metadata"] == {"availability_zone": "z", "ssd": "true"}
    answer = await admin.get("/os-aggregates", minor)
    check("aggregates", "list_aggregates", minor, answer.status, answer.json())
    answer = await admin.get(path, minor)
    check("aggregates", "get_aggregate", minor, answer.status, answer.json())
    answer = await admin.put(path, {"aggregate": {"name": "b"}}, minor)
    check("aggregates", "update_aggregate", minor, answer.status, answer.json())
    assert answer.json()["aggregate"]["name"] == "b"
    assert (await admin.delete(path, minor)).status == 400  # it has a host
    answer = await admin.post(f"{path}/action", {"remove_host": {"host": "h1"}}, minor)
    check("aggregates", "aggregate_add_remove_host", minor, answer.status, answer.json())
    answer = await admin.delete(path, minor)
    check("aggregates", "delete_aggregate", minor, answer.status, answer.json())
    assert (await admin.get(path, minor)).status == 404


async def test_what_does_not_go_together(cloud: Cloud) -> None:
    await add_host(cloud, "h1")
    east, west = await _made(cloud, "e", availability_zone="east"), await _made(cloud, "w", availability_zone="west")
    plain = await _made(cloud, "plain")

    async def act(number: int, **body: object) -> int:
        return (await cloud.admin.post(f"/os-aggregates/{number}/action", body)).status

    assert (await cloud.admin.post("/os-aggregates", {"aggregate": {"name": "e"}})).status == 409
    assert (await cloud.admin.put(f"/os-aggregates/{west}", {"aggregate": {"name": "e"}})).status == 409
    assert await act(east, add_host={"host": "h1"}) == 200
    assert await act(east, add_host={"host": "h1"}) == 409
    assert await act(west, add_host={"host": "h1"}) == 409  # a host is in one zone
    assert await act(plain, add_host={"host": "h1"}) == 200
    assert await act(plain, set_metadata={"metadata": {"availability_zone": "west"}}) == 400
    assert await act(plain, set_metadata={"metadata": {"availability_zone": ""}}) == 400
    assert await act(plain, set_metadata={"metadata": {"availability_zone": "east"}}) == 200
    assert await act(east, remove_host={"host": "h9"}) == 404
    assert await act(east, add_host={"host": "h9"}) == 404
    assert await act(99, add_host={"host": "h1"}) == 404
    assert (await cloud.admin.put("/os-aggregates/99", {"aggregate": {"name": "x"}})).status == 404
    assert (await cloud.admin.delete("/os-aggregates/99")).status == 404


async def test_the_zone_of_servers_does_not_change_under_them(cloud: Cloud) -> None:
    node = await add_host(cloud, "h1")
    number = await _made(cloud, "a", availability_zone="east")
    plain = await _made(cloud, "plain")
    await add_server(cloud, host="h1", node_uuid=node)

    async def act(target: int, **body: object) -> int:
        return (await cloud.admin.post(f"/os-aggregates/{target}/action", body)).status

    assert await act(number, add_host={"host": "h1"}) == 409
    assert await act(plain, add_host={"host": "h1"}) == 200
    answer = await cloud.admin.put(f"/os-aggregates/{plain}", {"aggregate": {"availability_zone": "west"}})
    assert answer.status == 400
    assert await act(plain, remove_host={"host": "h1"}) == 200


async def test_null_takes_metadata_away(cloud: Cloud) -> None:
    number = await _made(cloud, "a")
    path = f"/os-aggregates/{number}/action"
    await cloud.admin.post(path, {"set_metadata": {"metadata": {"a": "1", "b": "2"}}})
    answer = await cloud.admin.post(path, {"set_metadata": {"metadata": {"a": None}}})
    assert answer.json()["aggregate"]["metadata"] == {"b": "2"}


async def test_only_for_administrators(cloud: Cloud) -> None:
    assert (await cloud.member.get("/os-aggregates")).status == 403
    assert (await cloud.member.post("/os-aggregates", {"aggregate": {"name": "a"}})).status == 403


async def test_without_an_image_service_no_images_are_cached(cloud: Cloud) -> None:
    number = await _made(cloud, "a")
    body = {"cache": [{"id": "0b2a6c0e-8f36-4c0f-9d5e-1f2a3b4c5d6e"}]}
    assert (await cloud.admin.post(f"/os-aggregates/{number}/images", body, 80)).status == 404
    assert (await cloud.admin.post(f"/os-aggregates/{number}/images", body, 81)).status == 501
    assert (await cloud.admin.post("/os-aggregates/99/images", body, 81)).status == 404
