"""Backups of volumes, on both databases."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.embedded.volume.world import ADMIN, BOB, READER, World, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made


def write(cloud: World, volume: dict[str, Any], data: bytes) -> None:
    with (cloud.directory / "volumes" / volume["id"]).open("r+b") as stream:
        stream.write(data)


def read(cloud: World, volume_id: str, size: int) -> bytes:
    with (cloud.directory / "volumes" / volume_id).open("rb") as stream:
        return stream.read(size)


async def back_up(cloud: World, volume: dict[str, Any], **fields: Any) -> dict[str, Any]:
    made = (await cloud.do("POST", "/backups", {"backup": {"volume_id": volume["id"], **fields}}))["backup"]
    return await cloud.until(f"/backups/{made['id']}", "available")


async def test_a_backup_outlives_its_volume(cloud: World) -> None:
    volume = await cloud.create(size=2, name="data", metadata={"m": "n"})
    write(cloud, volume, b"old")
    backup = await back_up(cloud, volume, name="b", metadata={"k": "v"})
    assert (backup["size"], backup["volume_id"], backup["is_incremental"]) == (2, volume["id"], False)
    assert (backup["metadata"], backup["user_id"], backup["container"]) == ({"k": "v"}, "alice", "backups")
    assert backup["os-backup-project-attr:project_id"] == "p1"
    assert (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]["status"] == "available"
    await cloud.do("DELETE", f"/volumes/{volume['id']}")
    await cloud.until(f"/volumes/{volume['id']}", "")
    path = f"/backups/{backup['id']}"
    restored = (await cloud.do("POST", f"{path}/restore", {"restore": {"name": "again"}}))["restore"]
    assert (restored["backup_id"], restored["volume_name"]) == (backup["id"], "again")
    shown = await cloud.until(f"/volumes/{restored['volume_id']}", "available")
    assert (shown["size"], shown["metadata"]) == (2, {"m": "n"})
    assert read(cloud, restored["volume_id"], 4) == b"old\0"
    made = await cloud.create(backup_id=backup["id"], size=3)
    assert made["size"] == 3 and read(cloud, made["id"], 3) == b"old"
    usage = (await cloud.do("GET", "/os-quota-sets/p1?usage=1"))["quota_set"]
    assert (usage["backups"]["in_use"], usage["backup_gigabytes"]["in_use"], usage["volumes"]["in_use"]) == (1, 2, 2)
    await cloud.do("DELETE", path)
    await cloud.until(path, "")
    assert cloud.files("backups") == []
    usage = (await cloud.do("GET", "/os-quota-sets/p1?usage=1"))["quota_set"]
    assert usage["backups"]["in_use"] == usage["backup_gigabytes"]["in_use"] == 0


async def test_a_volume_is_restored_in_place(cloud: World) -> None:
    volume = await cloud.create(size=2)
    write(cloud, volume, b"old")
    backup = await back_up(cloud, volume)
    write(cloud, volume, b"new")
    small = await cloud.create(size=1)
    body = {"restore": {"volume_id": small["id"]}}
    assert (await cloud.call("POST", f"/backups/{backup['id']}/restore", body)).status == 400
    await cloud.do("POST", f"/backups/{backup['id']}/restore", {"restore": {"volume_id": volume["id"]}})
    await cloud.until(f"/volumes/{volume['id']}", "available")
    assert read(cloud, volume["id"], 3) == b"old"
    await cloud.until(f"/backups/{backup['id']}", "available")


async def test_a_backup_of_a_snapshot(cloud: World) -> None:
    volume = await cloud.create()
    write(cloud, volume, b"old")
    snapshot = await cloud.snapshot(volume["id"])
    write(cloud, volume, b"new")
    backup = await back_up(cloud, volume, snapshot_id=snapshot["id"])
    assert backup["snapshot_id"] == snapshot["id"]
    made = await cloud.create(backup_id=backup["id"], size=1)
    assert read(cloud, made["id"], 3) == b"old"
    assert (await cloud.do("GET", f"/snapshots/{snapshot['id']}"))["snapshot"]["status"] == "available"


async def test_lists_updates_and_who_may_what(cloud: World) -> None:
    volume = await cloud.create()
    backup = await back_up(cloud, volume, name="b")
    path = f"/backups/{backup['id']}"
    await cloud.do("PUT", path, {"backup": {"name": "c", "metadata": {"a": "b"}}})
    changed = (await cloud.do("GET", path))["backup"]
    assert (changed["name"], changed["metadata"]) == ("c", {"a": "b"})
    assert (await cloud.call("PUT", path, {"backup": {}})).status == 400
    assert (await cloud.call("PUT", path, {"backup": {"name": "x"}}, minor=8)).status == 404
    for query, number in (("", 1), ("?name=c", 1), ("?name=b", 0), (f"?volume_id={volume['id']}", 1), ("?status=x", 0)):
        assert len((await cloud.do("GET", f"/backups/detail{query}"))["backups"]) == number, query
    assert (await cloud.do("GET", "/backups", token=BOB))["backups"] == []
    for method, where, body in (
        ("GET", path, None), ("DELETE", path, None), ("POST", f"{path}/restore", {"restore": {}}),
    ):  # fmt: skip
        assert (await cloud.call(method, where, body, token=BOB)).status == 404
        if method != "GET":
            assert (await cloud.call(method, where, body, token=READER)).status == 403
    for wrong in ({"incremental": True}, {"container": "x"}, {"snapshot_id": backup["id"]}, {"zork": 1}):
        refused = {"backup": {"volume_id": volume["id"], **wrong}}
        assert (await cloud.call("POST", "/backups", refused)).status in (400, 404), wrong
    reset = {"os-reset_status": {"status": "error"}}
    assert (await cloud.call("POST", f"{path}/action", reset)).status == 403
    assert (await cloud.call("POST", f"{path}/action", reset, token=ADMIN)).status == 202
    assert (await cloud.call("POST", f"{path}/restore", {"restore": {}})).status == 400
    assert (await cloud.call("POST", f"{path}/action", {"os-force_delete": {}}, token=ADMIN)).status == 202
    await cloud.until(path, "")


async def test_the_quota_of_backups(cloud: World) -> None:
    await cloud.do("PUT", "/os-quota-sets/p1", {"quota_set": {"backup_gigabytes": 1}}, token=ADMIN)
    volume = await cloud.create(size=2)
    answer = await cloud.call("POST", "/backups", {"backup": {"volume_id": volume["id"]}})
    assert answer.status == 413
    assert (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]["status"] == "available"
