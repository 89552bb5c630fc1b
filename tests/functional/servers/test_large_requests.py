"""What a request for many servers stores, and in which parts."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from micronova.cli.timeline import find_timeline
from micronova.conductor.operations import build
from micronova.db.tables import operations
from tests.functional.cloud import CloudOptions, one_process


async def test_the_filters_of_a_decision_are_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its servers are dispatched in several transactions, none of which may lock many operations."""
    monkeypatch.setattr(build, "DISPATCHED_TOGETHER", 7)
    async with one_process(tmp_path, CloudOptions(hosts=4)) as cloud:
        user = cloud.caller()
        assert cloud.process.database is not None
        before = Counter(cloud.process.database.statistics.by_function)
        ids = await user.boot_many(60)
        written = Counter(cloud.process.database.statistics.by_function) - before
        assert written["Build._dispatch_part"] >= 60 / 7
        rows = await cloud.read(sa.select(operations))
        told = [await cloud.process.database.read(find_timeline, id) for id in ids]
        for id, timeline in zip(ids, told, strict=True):
            decision = timeline["operations"][0]["explanation"]
            assert decision["filters"]
            assert [winner["host"] for winner in decision["winners"]] == [await user.host_of(id)]
    with_filters = [row for row in rows if row.explanation.get("filters")]
    sizes = [len(msgspec.json.encode(row.explanation)) for row in rows]
    assert len(with_filters) < 10  # one for each decision; a request is decided in a few parts
    assert sorted(sizes)[len(sizes) // 2] < 600


async def test_the_filters_that_left_no_host_are_stored_once(tmp_path: Path) -> None:
    """A request without a valid host stored its filters with each server."""
    async with one_process(tmp_path, CloudOptions(hosts=4)) as cloud:
        user = cloud.caller()
        wanted = {"name": "large", "ram": 1 << 26, "vcpus": 1, "disk": 1}
        flavor = (await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"]
        asked = user.body(min_count=20, max_count=20, return_reservation_id=True, flavorRef=flavor)
        reservation = (await user.post("/servers", asked))["reservation_id"]
        listed = await user.admin.get(f"/servers/detail?reservation_id={reservation}")
        ids = [server["id"] for server in listed["servers"]]
        for id in ids:
            await user.wait_for(id, "ERROR")
        rows = await cloud.read(sa.select(operations))
        assert cloud.process.database is not None
        told = [await cloud.process.database.read(find_timeline, id) for id in ids]
    decisions = [timeline["operations"][0]["explanation"] for timeline in told]
    assert len(decisions) == 20 and all(each == {**each, "hosts": 4} and each["filters"] for each in decisions)
    assert len([row for row in rows if row.explanation.get("filters")]) == 1
