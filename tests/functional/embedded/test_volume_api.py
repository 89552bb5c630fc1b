"""The volume API as clients use it, on both databases."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.embedded.volume.world import ADMIN, ALICE, BOB, NEWEST, READER, World, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made


async def test_versions_need_no_token(cloud: World) -> None:
    for path, status in (("//", 300), ("", 200), ("/", 200)):
        answer = await cloud.call("GET", path, token=None, minor=None)
        assert answer.status == status, path
        [version] = answer.json()["versions"]
        assert (version["id"], version["version"], version["min_version"]) == ("v3.0", "3.71", "3.0")
        assert version["links"][1] == {"rel": "self", "href": "http://cloud/volume/v3/"}


async def test_microversions_are_negotiated(cloud: World) -> None:
    answer = await cloud.call("GET", "/volumes", minor=12)
    assert answer.headers["openstack-api-version"] == "volume 3.12"
    assert (await cloud.call("GET", "/volumes", minor=None)).headers["openstack-api-version"] == "volume 3.0"
    assert (await cloud.call("GET", "/volumes", minor=NEWEST + 1)).status == 406
    assert (await cloud.call("GET", "/volumes/summary", minor=11)).status == 404
    assert (await cloud.call("GET", "/volumes/summary", minor=12)).status == 200


async def test_the_project_in_the_path_must_be_the_callers(cloud: World) -> None:
    """Clients write it before 3.67, and may leave it out at any version here."""
    assert (await cloud.call("GET", "/p1/volumes")).status == 200
    assert (await cloud.call("GET", "/p2/volumes")).status == 400
    volume = await cloud.create()
    shown = (await cloud.do("GET", f"/p1/volumes/{volume['id']}"))["volume"]
    assert shown["links"] == [
        {"rel": "self", "href": f"http://cloud/volume/v3/p1/volumes/{volume['id']}"},
        {"rel": "bookmark", "href": f"http://cloud/volume/p1/volumes/{volume['id']}"},
    ]


async def test_a_blank_volume(cloud: World) -> None:
    answer = await cloud.call("POST", "/volumes", {"volume": {"name": " n ", "size": 2, "metadata": {"a": "b"}}})
    assert answer.status == 202
    made = answer.json()["volume"]
    assert made["status"] == "creating"
    shown = await cloud.until(f"/volumes/{made['id']}", "available")
    mine = (await cloud.do("GET", f"/volumes/{made['id']}"))["volume"]
    assert mine == {
        "id": made["id"], "status": "available", "size": 2, "availability_zone": "nova", "name": "n",
        "created_at": shown["created_at"], "updated_at": shown["updated_at"], "description": None,
        "volume_type": "__DEFAULT__", "volume_type_id": shown["volume_type_id"], "snapshot_id": None,
        "source_volid": None, "metadata": {"a": "b"}, "links": shown["links"], "user_id": "alice", "bootable": "false",
        "encrypted": False, "replication_status": None, "consistencygroup_id": None, "multiattach": False,
        "attachments": [], "os-vol-tenant-attr:tenant_id": "p1", "group_id": None, "shared_targets": False,
        "service_uuid": None, "consumes_quota": True,
    }  # fmt: skip
    assert shown["os-vol-host-attr:host"] == "here@files#files"
    file = cloud.directory / "volumes" / made["id"]
    assert file.stat().st_size == 2 << 30
    assert file.stat().st_blocks == 0
    assert (await cloud.call("DELETE", f"/volumes/{made['id']}")).status == 202
    await cloud.until(f"/volumes/{made['id']}", "")
    assert cloud.files() == []


@pytest.mark.parametrize(("minor", "added"), [
    (12, set()), (13, {"group_id"}), (21, {"provider_id"}), (48, {"shared_targets", "service_uuid"}),
    (61, {"cluster_name"}), (63, {"volume_type_id"}), (65, {"consumes_quota"}),
])  # fmt: skip
async def test_fields_begin_at_their_microversions(cloud: World, minor: int, added: set[str]) -> None:
    volume = await cloud.create()
    path = f"/volumes/{volume['id']}"
    before = (await cloud.do("GET", path, token=ADMIN, minor=minor - 1))["volume"]
    now = (await cloud.do("GET", path, token=ADMIN, minor=minor))["volume"]
    assert now.keys() - before.keys() == added


async def test_copies_of_volumes_and_snapshots(cloud: World) -> None:
    source = await cloud.create(name="source")
    file = cloud.directory / "volumes" / source["id"]
    with file.open("r+b") as stream:
        stream.seek(900 << 20)
        stream.write(b"here")
    snapshot = await cloud.snapshot(source["id"])
    with file.open("r+b") as stream:
        stream.seek(900 << 20)
        stream.write(b"gone")
    old = await cloud.create(snapshot_id=snapshot["id"], size=2)
    new = await cloud.create(source_volid=source["id"])
    assert (old["size"], old["snapshot_id"], new["size"], new["source_volid"]) == (2, snapshot["id"], 1, source["id"])
    for volume, content in ((old, b"here"), (new, b"gone")):
        with (cloud.directory / "volumes" / volume["id"]).open("rb") as stream:
            stream.seek(900 << 20)
            assert stream.read(4) == content
            stream.seek(0, 2)
            assert stream.tell() == volume["size"] << 30
        assert (cloud.directory / "volumes" / volume["id"]).stat().st_blocks < 1000
    for field, id, size in (("snapshot_id", snapshot["id"], 0), ("source_volid", old["id"], 1)):
        body = {"volume": {field: id, "size": size or 1}}
        answer = await cloud.call("POST", "/volumes", body)
        assert answer.status == (400 if field == "source_volid" else 202), answer


async def test_a_volume_of_an_image(cloud: World) -> None:
    image = cloud.images.add(b"disk" * 1000, name="os", hw_disk_bus="virtio", min_disk=1)
    volume = await cloud.create(imageRef=image)
    assert volume["bootable"] == "true"
    metadata = volume["volume_image_metadata"]
    assert (metadata["image_id"], metadata["image_name"], metadata["hw_disk_bus"]) == (image, "os", "virtio")
    with (cloud.directory / "volumes" / volume["id"]).open("rb") as stream:
        assert stream.read(4004) == b"disk" * 1000 + bytes(4)
    assert (await cloud.create(imageRef="os"))["bootable"] == "true"  # by its name
    copy = await cloud.create(source_volid=volume["id"])
    assert (copy["bootable"], copy["volume_image_metadata"]) == ("true", metadata)
    for status, fields in (
        (400, {"imageRef": image, "size": None}),
        (400, {"imageRef": cloud.images.add(b"", min_disk=2)}),
        (400, {"imageRef": cloud.images.add(b"", virtual_size=2 << 30)}),
        (400, {"imageRef": cloud.images.add(b"", status="queued")}),
        (400, {"imageRef": cloud.images.add(b"", owner=BOB)}),
        (409, {"imageRef": cloud.images.add(b"", name="os") and "os"}),
        (400, {"imageRef": image, "source_volid": volume["id"]}),
    ):
        answer = await cloud.call("POST", "/volumes", {"volume": {"size": 1, **fields}})
        assert answer.status == status, (fields, answer)


async def test_lists(cloud: World) -> None:
    for number, size in enumerate((3, 1, 2)):
        await cloud.create(name=f"v{number}", size=size, metadata={"n": str(number)})
    await cloud.create(token=BOB, name="bob's")
    assert await cloud.names() == ["v2", "v1", "v0"]
    assert await cloud.names("sort=size:asc") == ["v1", "v2", "v0"]
    assert await cloud.names("sort_key=name&sort_dir=asc") == ["v0", "v1", "v2"]
    assert await cloud.names("name=v1") == ["v1"]
    assert await cloud.names("status=available,error&size=2") == ["v2"]
    assert await cloud.names("metadata={'n':'0'}") == ["v0"]
    assert await cloud.names("bootable=true") == []
    assert await cloud.names("name~=v", minor=34) == ["v2", "v1", "v0"]
    assert await cloud.names("created_at=lt:2000-01-01T00:00:00Z") == []
    assert await cloud.names("all_tenants=1") == ["v2", "v1", "v0"]
    assert len(await cloud.names("all_tenants=1", token=ADMIN)) == 4
    assert await cloud.names("all_tenants=1&project_id=p2", token=ADMIN) == ["bob's"]
    assert await cloud.names("zork=1", minor=30) == ["v2", "v1", "v0"]  # unknown filters count from 3.31 on
    for query in ("zork=1", "sort=zork", "limit=-1", "limit=x", "offset=-1", "size=x", "created_at=x", "metadata=x"):
        assert (await cloud.call("GET", f"/volumes?{query}")).status == 400, query
    assert (await cloud.call("GET", "/volumes?marker=nothing")).status == 404
    counted = await cloud.do("GET", "/volumes/detail?with_count=true&limit=1")
    assert (counted["count"], len(counted["volumes"])) == (3, 1)


async def test_pages(cloud: World) -> None:
    for number in range(5):
        await cloud.create(name=f"v{number}")
    found, path = [], "/volumes?limit=2&sort=name:asc"
    while path:
        page = await cloud.do("GET", path)
        found += [each["name"] for each in page["volumes"]]
        [link] = page.get("volumes_links", [{"href": ""}])
        path = link["href"].partition("/volume/v3")[2]
    assert found == [f"v{number}" for number in range(5)]
    assert await cloud.names("offset=3&sort=name:asc") == ["v3", "v4"]
    assert await cloud.names("limit=0") == []


async def test_the_summary(cloud: World) -> None:
    await cloud.create(size=2, metadata={"a": "1"})
    await cloud.create(size=3, metadata={"a": "2"})
    await cloud.create(token=BOB, size=9)
    shown = (await cloud.do("GET", "/volumes/summary"))["volume-summary"]
    assert shown == {"total_count": 2, "total_size": 5, "metadata": {"a": ["1", "2"]}}
    assert "metadata" not in (await cloud.do("GET", "/volumes/summary", minor=35))["volume-summary"]


async def test_updates(cloud: World) -> None:
    path = f"/volumes/{(await cloud.create(name='old', metadata={'a': '1'}))['id']}"
    shown = await cloud.do("PUT", path, {"volume": {"name": "new", "description": "d", "metadata": {"b": "2"}}})
    assert [shown["volume"][name] for name in ("name", "description", "metadata")] == ["new", "d", {"b": "2"}]
    assert (await cloud.call("PUT", path, {"volume": {}})).status == 400
    assert (await cloud.call("PUT", path, {"volume": {}}, minor=52)).status == 200
    assert (await cloud.call("PUT", path, {"volume": {"size": 2}})).status == 400
    assert (await cloud.call("PUT", path, {"volume": {"name": "x"}}, token=READER)).status == 403


async def test_snapshots(cloud: World) -> None:
    volume = await cloud.create(size=2)
    snapshot = await cloud.snapshot(volume["id"], name="s", metadata={"k": "v"})
    assert snapshot["size"] == 2 and snapshot["volume_id"] == volume["id"]
    assert snapshot["os-extended-snapshot-attributes:progress"] == "100%"
    assert snapshot["user_id"] == "alice" and snapshot["consumes_quota"] is True
    path = f"/snapshots/{snapshot['id']}"
    assert (await cloud.do("PUT", path, {"snapshot": {"name": "t"}}))["snapshot"]["name"] == "t"
    for query, number in (("", 1), ("?name=t", 1), ("?name=s", 0), (f"?volume_id={volume['id']}", 1),
                          ("?metadata={'k':'v'}", 1), ("?metadata={'k':'w'}", 0), ("?status=error", 0)):  # fmt: skip
        assert len((await cloud.do("GET", f"/snapshots/detail{query}"))["snapshots"]) == number, query
    assert (await cloud.do("GET", "/snapshots", token=BOB))["snapshots"] == []
    assert (await cloud.call("GET", path, token=BOB)).status == 404
    assert (await cloud.call("DELETE", f"/volumes/{volume['id']}")).status == 400
    assert (await cloud.call("DELETE", path, token=READER)).status == 403
    told = {"os-update_snapshot_status": {"status": "creating", "progress": "80%"}}
    assert (await cloud.call("POST", f"{path}/action", told)).status == 400  # it is not being made
    await cloud.call("POST", f"{path}/action", {"os-reset_status": {"status": "creating"}}, token=ADMIN)
    assert (await cloud.call("POST", f"{path}/action", told)).status == 202
    shown = (await cloud.do("GET", path))["snapshot"]
    assert shown["os-extended-snapshot-attributes:progress"] == "80%"
    reset = {"os-reset_status": {"status": "error"}}
    assert (await cloud.call("POST", f"{path}/action", reset)).status == 403
    assert (await cloud.call("POST", f"{path}/action", reset, token=ADMIN)).status == 202
    assert (await cloud.call("POST", "/volumes", {"volume": {"snapshot_id": snapshot["id"]}})).status == 400
    assert (await cloud.call("DELETE", path)).status == 202
    await cloud.until(path, "")
    assert cloud.files("snapshots") == []


async def test_a_cascade_deletes_the_snapshots_before(cloud: World) -> None:
    volume = await cloud.create()
    for _ in range(3):
        await cloud.snapshot(volume["id"])
    assert (await cloud.call("DELETE", f"/volumes/{volume['id']}?cascade=true")).status == 202
    await cloud.until(f"/volumes/{volume['id']}", "")
    assert cloud.files() == cloud.files("snapshots") == []


async def test_another_project_sees_nothing(cloud: World) -> None:
    volume = await cloud.create()
    path = f"/volumes/{volume['id']}"
    for method, body in (("GET", None), ("PUT", {"volume": {"name": "x"}}), ("DELETE", None)):
        assert (await cloud.call(method, path, body, token=BOB)).status == 404, method
    for body in ({"source_volid": volume["id"]}, {"snapshot_id": (await cloud.snapshot(volume["id"]))["id"]}):
        assert (await cloud.call("POST", "/volumes", {"volume": body}, token=BOB)).status == 404
    body = {"snapshot": {"volume_id": volume["id"]}}
    assert (await cloud.call("POST", "/snapshots", body, token=BOB)).status == 404
    assert (await cloud.call("GET", path, token=ADMIN)).status == 200
    assert await cloud.names(f"marker={volume['id']}", token=ALICE) == []
    assert (await cloud.call("GET", f"/volumes?marker={volume['id']}", token=BOB)).status == 404
