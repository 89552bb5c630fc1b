"""Instance actions at every microversion at which they change."""

import pytest

from micronova.db import instance_actions as actions
from micronova.objects.clock import micros
from tests.functional.api.resources import Cloud, cloud  # noqa: F401
from tests.functional.api.seed import add_deleted_server, add_host, add_server
from tests.schemas.tempest import check, versions_of

MINE = (21, 51, 58, 62, 66, 84)


async def _seed(cloud: Cloud, server: str, count: int = 1) -> None:
    for number in range(count):
        now = micros(cloud.clock.now()) + number * 1_000_000
        request = f"req-{number}"
        await cloud.database.write(actions.start, server, request, "create", "ada", "red", now)
        await cloud.database.write(actions.event_start, server, request, 1, "conductor_build", now, "ctl")
        await cloud.database.write(
            actions.event_finish, server, request, 2, "compute_build", now + 5, "Error", "h1", "no disk", "Traceback…"
        )
        await cloud.database.write(actions.finish, server, request, now + 9)


@pytest.mark.parametrize("minor", versions_of("servers", *MINE))
async def test_every_answer_is_what_tempest_accepts(cloud: Cloud, minor: int) -> None:
    server = await add_server(cloud)
    await _seed(cloud, server)
    path = f"/servers/{server}/os-instance-actions"
    for caller in (cloud.admin, cloud.reader):
        answer = await caller.get(path, minor)
        check("servers", "list_instance_actions", minor, answer.status, answer.json())
        [action] = answer.json()["instanceActions"]
        assert (action["action"], action["message"]) == ("create", "Error")
        assert ("updated_at" in action) == (minor >= 58)
        answer = await caller.get(f"{path}/req-0", minor)
        check("servers", "show_instance_action", minor, answer.status, answer.json())
        shown = answer.json()["instanceAction"]
        admin = caller.token.startswith("root")
        assert ("events" in shown) == (admin or minor >= 51)
        if "events" in shown:
            event = shown["events"][0]
            assert event["event"] == "compute_build" and event["result"] == "Error"
            assert ("traceback" in event) == admin
            assert ("hostId" in event) == (minor >= 62)
            assert ("host" in event) == (admin and minor >= 62)
            assert ("details" in event) == (admin and minor >= 84)
    assert (await cloud.reader.get(f"{path}/req-9", minor)).status == 404


async def test_deleted_servers_since_2_21(cloud: Cloud) -> None:
    server = await add_deleted_server(cloud)
    await _seed(cloud, server)
    path = f"/servers/{server}/os-instance-actions"
    assert (await cloud.reader.get(path, 20)).status == 404
    assert (await cloud.reader.get(path, 21)).status == 200
    assert (await cloud.reader.get(f"{path}/req-0", 21)).status == 200
    assert (await cloud.stranger.get(path, 21)).status == 404


async def test_strangers_find_nothing(cloud: Cloud) -> None:
    server = await add_server(cloud)
    await _seed(cloud, server)
    path = f"/servers/{server}/os-instance-actions"
    assert (await cloud.stranger.get(path)).status == 404
    assert (await cloud.stranger.get(f"{path}/req-0")).status == 404
    assert (await cloud.nobody.get(path)).status == 401


async def test_pages_and_times_since_2_58(cloud: Cloud) -> None:
    server = await add_server(cloud)
    await _seed(cloud, server, 5)
    path = f"/servers/{server}/os-instance-actions"

    async def ids(query: str, minor: int = 66) -> list[str]:
        answer = await cloud.reader.get(f"{path}?{query}", minor)
        assert answer.status == 200, answer.body
        return [each["request_id"] for each in answer.json()["instanceActions"]]

    assert await ids("") == ["req-4", "req-3", "req-2", "req-1", "req-0"]
    assert await ids("limit=2") == ["req-4", "req-3"]
    assert await ids("limit=2&marker=req-3") == ["req-2", "req-1"]
    assert len(await ids("limit=2", 57)) == 5
    answer = await cloud.reader.get(f"{path}?limit=2", 58)
    assert answer.json()["links"][0]["href"].endswith(f"/servers/{server}/os-instance-actions?limit=2&marker=req-3")
    updated = {
        each["request_id"]: each["updated_at"] for each in (await cloud.reader.get(path, 66)).json()["instanceActions"]
    }
    assert await ids(f"changes-since={updated['req-3']}") == ["req-4", "req-3"]
    assert await ids(f"changes-since={updated['req-1']}&changes-before={updated['req-2']}") == ["req-2", "req-1"]
    for query, minor in (
        ("marker=nothing", 58),
        ("limit=-1", 58),
        ("changes-since=yesterday", 58),
        ("changes-before=2020-01-01T00:00:00Z", 65),
        ("changes-since=2020-01-02T00:00:00Z&changes-before=2020-01-01T00:00:00Z", 66),
        ("odd=1", 58),
    ):
        assert (await cloud.reader.get(f"{path}?{query}", minor)).status == 400


async def test_the_last_value_counts_before_2_53_and_2_58(cloud: Cloud) -> None:
    await add_host(cloud, "h1")
    server = await add_server(cloud)
    twice = "limit=0&limit=9"
    assert (await cloud.admin.get(f"/os-hypervisors?{twice}", 52)).status == 200
    assert (await cloud.reader.get(f"/servers/{server}/os-instance-actions?{twice}", 57)).status == 200
