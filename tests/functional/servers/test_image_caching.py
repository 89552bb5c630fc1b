"""Images that the hosts of an aggregate fetch before servers need them: POST /os-aggregates/{id}/images."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from micronova.compute import image_caching
from micronova.db import periodic_jobs
from micronova.notifications.resources import Announcement
from micronova.objects.context import Context
from micronova.objects.image import ImageMeta
from tests.functional.cloud import Caller, Cloud, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import image
from tests.schemas.notifications import check

pytestmark = only_in_one_process("watches the notifier of the cloud's process")
CLOUD = CloudOptions(hosts=3, roles=("image",), settings={"image_cache": {"precache_concurrency": 2}})
NO_MORE = "aggregate.cache_images.end"


@pytest.fixture
def announced(cloud: OneProcess, monkeypatch: pytest.MonkeyPatch) -> list[Announcement]:
    """The notifications about other things than servers that the cloud sends during the test."""
    sent: list[Announcement] = []

    def announce(context: Context, make: Callable[[], Announcement]) -> None:
        sent.append(make())

    monkeypatch.setattr(cloud.process.notifier, "announce", announce)
    return sent


async def aggregate(user: Caller, *hosts: str) -> str:
    """Create an aggregate; return the path of its images."""
    wanted = {"aggregate": {"name": uuid.uuid4().hex}}
    number = (await user.admin.post("/os-aggregates", wanted, 200))["aggregate"]["id"]
    for host in hosts:
        await user.admin.post(f"/os-aggregates/{number}/action", {"add_host": {"host": host}}, 200)
    return f"/os-aggregates/{number}/images"


async def ended(cloud: Cloud, announced: list[Announcement]) -> list[dict[str, Any]]:
    """Wait until a request has ended; return what was told of each host."""

    async def probe() -> bool | None:
        return True if announced and announced[-1].event == NO_MORE else None

    await cloud.until(probe, "the end of the request")
    about = [each for each in announced if each.event.startswith("aggregate.cache_images.")]
    for each in about:
        check(each.payload)
        assert not each.old_event  # Nova has no unversioned notifications about this
    names = [each.event.rpartition(".")[2] for each in about]
    assert names == ["start", *["progress"] * (len(names) - 2), "end"]
    return [each.payload["nova_object.data"] for each in about[1:-1]]


async def cached(cloud: Cloud, host: str, id: str) -> bool:
    """Return whether a host has an image; afterwards it does."""
    return await cloud.compute.cache_image(Context(), host, ImageMeta(id=id), None) == "existing"


async def test_hosts_of_the_aggregate_get_the_images(
    cloud: OneProcess, user: Caller, announced: list[Announcement]
) -> None:
    ids = [await image(user), await image(user)]
    path = await aggregate(user, "fake-1", "fake-2")
    announced.clear()
    answer = await user.admin.at(81).request("POST", path, {"cache": [{"id": id} for id in ids]})
    assert (answer.status, answer.body) == (202, b"")
    told = await ended(cloud, announced)
    assert sorted(each["host"] for each in told) == ["fake-1", "fake-2"]
    assert [(each["index"], each["total"]) for each in told] == [(1, 2), (2, 2)]
    assert all(each["images_cached"] == ids and each["images_failed"] == [] for each in told)
    assert [await cached(cloud, host, ids[0]) for host in cloud.hosts] == [True, True, False]


async def test_what_a_guest_was_made_of_is_cached(
    cloud: OneProcess, user: Caller, announced: list[Announcement]
) -> None:
    id = await image(user)
    server = await user.boot(imageRef=id)
    assert await cached(cloud, await user.host_of(server["id"]), id)


async def test_hosts_that_are_down_or_fail(cloud: OneProcess, user: Caller, announced: list[Announcement]) -> None:
    good, bad = await image(user), await image(user, name="unlucky")
    path = await aggregate(user, "fake-1", "fake-2", "fake-3")
    found = (await user.admin.get("/os-services?binary=nova-compute&host=fake-2"))["services"][0]["id"]
    await user.admin.put(f"/os-services/{found}", {"forced_down": True})
    announced.clear()
    try:
        rules = [
            {"operation": "cache_image", "kind": "fail", "name": "unlucky", "host": "fake-1"},
            {"operation": "cache_image", "kind": "not_supported", "name": "unlucky", "host": "fake-3"},
        ]
        async with cloud.faults(*rules):
            await user.admin.post(path, {"cache": [{"id": bad}, {"id": good}]})
            told = {each["host"]: each for each in await ended(cloud, announced)}
    finally:
        await user.admin.put(f"/os-services/{found}", {"forced_down": False})
    for host in ("fake-1", "fake-3"):
        assert (told[host]["images_cached"], told[host]["images_failed"]) == ([good], [bad])
    assert (told["fake-2"]["images_cached"], told["fake-2"]["images_failed"]) == ([], [bad, good])
    assert {each["total"] for each in told.values()} == {3}

    async def recorded() -> str | None:
        assert cloud.process.database is not None
        rows = {row.name: row for row in await cloud.process.database.read(periodic_jobs.list_)}
        return rows["cache_images"].error if rows["cache_images"].ended_at else None

    assert "2 skipped" in await cloud.until(recorded, "the record of the request")


async def test_a_download_that_takes_longer_than_a_call(
    cloud: OneProcess, user: Caller, announced: list[Announcement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_caching, "LONGEST_WAIT", 0.01)
    id, path = await image(user, name="slow"), await aggregate(user, "fake-1")
    announced.clear()
    async with cloud.faults({"operation": "cache_image", "kind": "delay", "name": "slow", "delay": 0.1}):
        await user.admin.post(path, {"cache": [{"id": id}]})
        [told] = await ended(cloud, announced)
    assert told["images_cached"] == [id]


async def test_an_aggregate_without_hosts(cloud: OneProcess, user: Caller, announced: list[Announcement]) -> None:
    path = await aggregate(user)
    announced.clear()
    await user.admin.post(path, {"cache": [{"id": await image(user)}]})
    assert await ended(cloud, announced) == []


async def test_requests_that_are_refused(cloud: OneProcess, user: Caller) -> None:
    id, path = await image(user), await aggregate(user, "fake-1")
    body, unknown = {"cache": [{"id": id}]}, str(uuid.uuid4())
    await user.refused(403, "POST", path, body)
    await user.admin.at(80).refused(404, "POST", path, body)
    await user.admin.refused(404, "POST", "/os-aggregates/999999/images", body)
    await user.admin.refused(400, "POST", "/os-aggregates/zork/images", body)
    assert "Duplicate" in await user.admin.refused(400, "POST", path, {"cache": [{"id": id}, {"id": id}]})
    assert unknown in await user.admin.refused(400, "POST", path, {"cache": [{"id": id}, {"id": unknown}]})
    empty = await image(user, upload=False)
    assert "queued" in await user.admin.refused(400, "POST", path, {"cache": [{"id": empty}]})
    bad: tuple[list[dict[str, Any]], ...] = ([], [{}], [{"id": "x"}], [{"id": id, "zork": 1}])
    for wrong in bad:
        await user.admin.refused(400, "POST", path, {"cache": wrong})
    await user.admin.refused(400, "POST", path, {})
