"""The image API as clients use it, on both databases."""

import asyncio
import hashlib
import re
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from micronova.embedded.image import queries
from tests.unit.embedded.image.world import ADMIN, ALICE, BOB, CAROL, PATCH_20, World, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made


async def test_versions_need_no_token(cloud: World) -> None:
    for path, status in (("/", 300), ("/versions", 200), ("/versions/", 200), ("/v2", 300), ("/v2/", 300)):
        answer = await cloud.call("GET", path, token=None)
        assert answer.status == status
        versions = answer.json()["versions"]
        assert [version["id"] for version in versions] == [f"v2.{minor}" for minor in range(17, -1, -1)]
        assert [version["status"] for version in versions].count("CURRENT") == 1
        assert versions[0]["links"] == [{"rel": "self", "href": "http://cloud/image/v2/"}]


async def test_schemas_and_info(cloud: World) -> None:
    for name in ("image", "images", "member", "members", "task", "tasks"):
        answer = await cloud.call("GET", f"/v2/schemas/{name}")
        assert answer.status == 200
        assert answer.json()["name"] == name
    image = (await cloud.call("GET", "/v2/schemas/image")).json()
    assert image["additionalProperties"] == {"type": "string"}
    assert {"id", "name", "os_hidden", "size", "kernel_id", "tags"} <= image["properties"].keys()
    assert (await cloud.call("GET", "/v2/schemas/other")).status == 404
    assert (await cloud.call("GET", "/v2/info/import")).json()["import-methods"]["value"] == ["glance-direct"]
    assert (await cloud.call("GET", "/v2/info/stores")).json() == {"stores": [{"id": "file", "default": "true"}]}
    assert (await cloud.call("GET", "/v2/info/stores/detail")).status == 403
    assert (await cloud.call("GET", "/v2/info/stores/detail", token=ADMIN)).status == 200
    for method, path in (
        ("GET", "/v2/cache"), ("PUT", f"/v2/cache/{uuid.uuid4()}"), ("GET", "/v2/cached_images"),
        ("PUT", f"/v2/queued_images/{uuid.uuid4()}"), ("DELETE", f"/v2/stores/file/{uuid.uuid4()}"),
        ("GET", "/v1/images"),
    ):  # fmt: skip
        assert (await cloud.call(method, path, token=ADMIN)).status == 404, path


@pytest.mark.parametrize(
    ("accept", "is_page"),
    [("*/*", True), ("text/html,application/xml;q=0.9,*/*;q=0.8", True), ("application/json", False), (None, False)],
)
async def test_errors_for_clients_that_do_not_ask_for_json(cloud: World, accept: str | None, is_page: bool) -> None:
    """They get Glance's page: glanceclient asks for anything, and cannot read the message from JSON."""
    headers = {} if accept is None else {"accept": accept}
    for path, status in (("/v2/images/%3Cb%3E", 404), ("/nothing", 404), ("/v2/images?limit=x", 400)):
        answer = await cloud.call("GET", path, headers=headers)
        assert answer.status == status
        if not is_page:
            assert answer.headers["content-type"] == "application/json" and answer.json()["message"]
            continue
        assert answer.headers["content-type"] == "text/html; charset=UTF-8"
        page = answer.body.decode()
        title = {404: "404 Not Found", 400: "400 Bad Request"}[status]
        assert f"<h1>{title}</h1>" in page and "<b>" not in page
        lines = [re.sub("<.+?>", "", line.strip()) for line in page.splitlines()]  # as glanceclient reads it
        found = [line for line in dict.fromkeys(lines) if line]
        assert found[0] == title and len(found) == 2


@pytest.mark.parametrize("order", ["", "&sort=name:asc", "&sort=size:desc,name:asc", "&sort=size:asc"])
async def test_a_page_has_a_limited_size(cloud: World, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """It ends with a link to the next one, which begins after its last image."""
    monkeypatch.setattr(queries, "READ_TOGETHER", 2)
    for number in range(9):
        more = {"note": "é" * 200} if number in (1, 2, 6) else {}
        await cloud.create(name=f"{number}", data=b"x" * number if number % 3 else None, **more)
    whole = [each["id"] for each in (await cloud.call("GET", f"/v2/images?limit=9{order}")).json()["images"]]
    assert len(set(whole)) == 9
    monkeypatch.setattr(queries, "PAGE_BYTES", 400)
    pages: list[list[str]] = []
    url: str | None = f"/v2/images?limit=4{order}"
    while url:
        page = (await cloud.call("GET", url)).json()
        large = [each for each in page["images"] if "note" in each]
        assert len(large) <= 1 and (not large or page["images"][-1] == large[0])
        pages.append([each["id"] for each in page["images"]])
        url = page.get("next")
    assert [id for page in pages for id in page] == whole
    assert all(1 <= len(page) <= 4 for page in pages)


async def test_create_returns_one_flat_object(cloud: World) -> None:
    answer = await cloud.call("POST", "/v2/images", {"name": "n", "tags": ["b", "a", "b"], "os_distro": "debian"})
    assert answer.status == 201
    image = answer.json()
    assert answer.headers["location"] == f"http://cloud/image/v2/images/{image['id']}"
    assert answer.headers["openstack-image-import-methods"] == "glance-direct"
    expected = {
        "name": "n", "os_distro": "debian", "tags": ["a", "b"], "status": "queued", "visibility": "shared",
        "owner": "p1", "protected": False, "os_hidden": False, "min_disk": 0, "min_ram": 0, "size": None,
        "virtual_size": None, "checksum": None, "os_hash_algo": None, "os_hash_value": None, "disk_format": None,
        "container_format": None, "self": f"/v2/images/{image['id']}", "file": f"/v2/images/{image['id']}/file",
        "schema": "/v2/schemas/image", "created_at": "2027-01-15T08:00:00Z", "updated_at": "2027-01-15T08:00:00Z",
        "id": image["id"],
    }  # fmt: skip
    assert image == expected
    assert await cloud.show(image["id"]) == expected


async def test_a_client_may_choose_an_id_that_was_never_used(cloud: World) -> None:
    chosen = str(uuid.uuid4())
    assert (await cloud.create(id=chosen))["id"] == chosen
    body = {"id": chosen}
    assert (await cloud.call("POST", "/v2/images", body)).status == 409
    assert (await cloud.call("DELETE", f"/v2/images/{chosen}")).status == 204
    # Servers and volumes may still refer to it, so nobody may create another image with the same id.
    assert (await cloud.call("POST", "/v2/images", body, token=BOB)).status == 409


async def test_an_empty_id_is_no_image(cloud: World) -> None:
    for method in ("GET", "DELETE"):
        for path in ("/v2/images/", "/v2/images//file", "/v2/metadefs/namespaces/"):
            if (method, path) != ("DELETE", "/v2/images//file"):  # nothing takes it
                assert (await cloud.call(method, path)).status == 404, (method, path)


async def test_upload_download_delete(cloud: World) -> None:
    data = bytes(range(256)) * 10_000
    image = await cloud.create(data=data)
    shown = await cloud.show(image["id"])
    assert shown["status"] == "active"
    assert shown["size"] == len(data)
    assert shown["stores"] == "file" and "stores" not in image
    assert shown["checksum"] == hashlib.md5(data).hexdigest()
    assert shown["os_hash_algo"] == "sha512"
    assert shown["os_hash_value"] == hashlib.sha512(data).hexdigest()
    answer = await cloud.call("GET", f"/v2/images/{image['id']}/file")
    assert answer.status == 200
    assert answer.body == data
    assert answer.headers["content-md5"] == shown["checksum"]
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-length"] == str(len(data))
    assert cloud.files == [image["id"]]
    assert (await cloud.upload(image["id"], b"again")).status == 409
    assert (await cloud.call("GET", f"/v2/images/{image['id']}/tasks")).json() == {"tasks": []}
    assert (await cloud.call("DELETE", f"/v2/images/{image['id']}")).status == 204
    assert (await cloud.call("GET", f"/v2/images/{image['id']}")).status == 404
    assert cloud.files == []


async def test_an_import_is_a_task(cloud: World) -> None:
    image = await cloud.create()
    path = f"/v2/images/{image['id']}"
    octets = {"content-type": "application/octet-stream"}
    assert (await cloud.call("PUT", f"{path}/stage", b"data", headers=octets)).status == 204
    assert "stores" not in await cloud.show(image["id"])
    body = {"method": {"name": "glance-direct"}, "stores": ["file"] * 10_000}
    answer = await cloud.call("POST", f"{path}/import", body)
    assert answer.status == 202
    assert (await cloud.show(image["id"]))["stores"] == "file"
    [task] = (await cloud.call("GET", f"{path}/tasks")).json()["tasks"]
    assert task["request_id"] == answer.headers["x-openstack-request-id"]
    assert task["input"]["import_req"] == {"method": {"name": "glance-direct"}, "stores": ["file"]}, "not all of them"
    assert (task["type"], task["status"], task["image_id"]) == ("api_image_import", "success", image["id"])
    assert (task["owner"], task["user_id"], task["result"]) == ("p1", "alice", {"image_id": image["id"]})
    assert (task["created_at"], task["expires_at"]) == ("2027-01-15T08:00:00Z", "2027-01-17T08:00:00Z")
    assert (await cloud.call("GET", f"/v2/tasks/{task['id']}", token=ADMIN)).json() == task
    for query, shown in (("", 1), ("?type=import", 0), ("?status=success&sort_key=id", 1), ("?limit=0", 0)):
        listed = (await cloud.call("GET", f"/v2/tasks{query}", token=ADMIN)).json()
        assert len(listed["tasks"]) == shown and listed["first"] == f"/v2/tasks{query}"
        assert all("input" not in each for each in listed["tasks"])
    assert (await cloud.call("GET", f"/v2/tasks?marker={task['id']}", token=ADMIN)).json()["tasks"] == []
    for query in ("type=x", "status=x", "marker=x", "sort_key=x", "sort_dir=x", "limit=x", "owner=x"):
        assert (await cloud.call("GET", f"/v2/tasks?{query}", token=ADMIN)).status == 400, query
    assert (await cloud.call("POST", f"{path}/import", body)).status == 409
    assert (await cloud.call("POST", "/v2/tasks", {"type": "import", "input": {}}, token=ADMIN)).status == 400
    for method, url in (("GET", "/v2/tasks"), ("GET", f"/v2/tasks/{task['id']}"), ("POST", "/v2/tasks")):
        new = {"type": "import"} if method == "POST" else None
        assert (await cloud.call(method, url, new)).status == 403, "only for administrators"
    cloud.clock.time += 48 * 3600
    assert (await cloud.call("GET", f"{path}/tasks")).json()["tasks"] == []
    assert (await cloud.call("GET", f"/v2/tasks/{task['id']}", token=ADMIN)).status == 404


async def test_patch(cloud: World) -> None:
    image = await cloud.create(name="old", foo="1")
    cloud.clock.time += 60
    answer = await cloud.patch(
        image["id"],
        {"op": "replace", "path": "/name", "value": "new"},
        {"op": "add", "path": "/a~1b~0c", "value": "2"},
        {"op": "remove", "path": "/foo"},
        {"op": "add", "path": "/tags", "value": ["y", "x", "y"]},
        {"op": "replace", "path": "/min_disk", "value": 3},
        {"op": "add", "path": "/kernel_id", "value": None},
    )
    assert answer.status == 200, answer
    shown = await cloud.show(image["id"])
    assert shown == answer.json()
    assert shown["name"] == "new"
    assert shown["a/b~c"] == "2"
    assert "foo" not in shown
    assert shown["kernel_id"] is None
    assert shown["tags"] == ["x", "y"]
    assert shown["min_disk"] == 3
    assert shown["created_at"] == "2027-01-15T08:00:00Z"
    assert shown["updated_at"] == "2027-01-15T08:01:00Z"
    answer = await cloud.patch(image["id"], {"replace": "/name", "value": "third"}, **PATCH_20)
    assert answer.json()["name"] == "third"
    assert (await cloud.patch(image["id"], {"add": "/name", "value": "x"}, **PATCH_20)).status == 409


async def test_concurrent_changes_are_all_kept(cloud: World) -> None:
    image = await cloud.create()
    answers = await asyncio.gather(
        *(cloud.patch(image["id"], {"op": "add", "path": f"/p{n}", "value": str(n)}) for n in range(12))
    )
    assert {answer.status for answer in answers} == {200}
    shown = await cloud.show(image["id"])
    assert {f"p{n}": str(n) for n in range(12)}.items() <= shown.items()


async def test_one_of_many_concurrent_uploads_succeeds(cloud: World) -> None:
    image = await cloud.create()
    bodies = [bytes([n]) * 100_000 for n in range(6)]
    statuses = await asyncio.gather(*(cloud.upload(image["id"], body) for body in bodies))
    assert sorted(answer.status for answer in statuses) == [204, 409, 409, 409, 409, 409]
    winner = next(body for body, answer in zip(bodies, statuses, strict=True) if answer.status == 204)
    assert (await cloud.call("GET", f"/v2/images/{image['id']}/file")).body == winner
    assert cloud.files == [image["id"]]


async def test_tags(cloud: World) -> None:
    image = await cloud.create()
    path = f"/v2/images/{image['id']}/tags"
    for tag in ("b", "a", "a"):
        assert (await cloud.call("PUT", f"{path}/{tag}")).status == 204
    assert (await cloud.show(image["id"]))["tags"] == ["a", "b"]
    assert (await cloud.call("DELETE", f"{path}/a")).status == 204
    assert (await cloud.call("DELETE", f"{path}/a")).status == 404
    assert (await cloud.show(image["id"]))["tags"] == ["b"]
    assert (await cloud.call("PUT", f"{path}/{'x' * 256}")).status == 400
    for n in range(127):
        assert (await cloud.call("PUT", f"{path}/t{n}")).status == 204
    assert (await cloud.call("PUT", f"{path}/one-too-many")).status == 413


async def test_protection(cloud: World) -> None:
    image = await cloud.create(protected=True)
    assert (await cloud.call("DELETE", f"/v2/images/{image['id']}")).status == 403
    await cloud.patch(image["id"], {"op": "replace", "path": "/protected", "value": False})
    assert (await cloud.call("DELETE", f"/v2/images/{image['id']}")).status == 204


async def test_deactivate_and_reactivate(cloud: World) -> None:
    image = await cloud.create(data=b"data")
    actions, file = f"/v2/images/{image['id']}/actions", f"/v2/images/{image['id']}/file"
    for _ in range(2):
        assert (await cloud.call("POST", f"{actions}/deactivate")).status == 204
    assert (await cloud.show(image["id"]))["status"] == "deactivated"
    assert (await cloud.call("GET", file)).status == 403
    assert (await cloud.call("GET", file, token=ADMIN)).body == b"data"
    assert (await cloud.call("POST", f"{actions}/reactivate")).status == 204
    assert (await cloud.call("GET", file)).body == b"data"
    queued = await cloud.create()
    assert (await cloud.call("POST", f"/v2/images/{queued['id']}/actions/deactivate")).status == 403


async def test_list_filters(cloud: World) -> None:
    await cloud.create(name="a", data=b"1" * 10, tags=["red", "big"], os_distro="debian", min_ram=512)
    cloud.clock.time += 10
    await cloud.create(name="b", data=b"2" * 20, tags=["red"], disk_format="qcow2", visibility="private")
    cloud.clock.time += 10
    await cloud.create(name="ubuntu:22.04, small", protected=True, note="x,y")
    await cloud.create(name="hidden", os_hidden=True)
    newest, b, a = "ubuntu:22.04, small", "b", "a"
    for query, expected in {
        "": [newest, b, a],
        "name=b": [b],
        "name=eq:b": [b],
        "name=ubuntu:22.04, small": [newest],
        'name=in:"ubuntu:22.04, small",a': [newest, a],
        "name=in:a,b,c": [b, a],
        "status=active": [b, a],
        "status=in:active,queued": [newest, b, a],
        "status=killed": [],
        "visibility=private": [b],
        "visibility=shared": [newest, a],
        "visibility=all": [newest, b, a],
        "visibility=public": [],
        "owner=p1": [newest, b, a],
        "owner=p2": [],
        "disk_format=qcow2": [b],
        "disk_format=in:raw,qcow2": [newest, b, a],
        "container_format=bare&size_min=15": [b],
        "size_min=10&size_max=10": [a],
        "size_max=19": [a],
        "tag=red": [b, a],
        "tag=red&tag=big": [a],
        "tag=blue": [],
        "protected=true": [newest],
        "protected=False": [b, a],
        "os_hidden=true": ["hidden"],
        "os_hidden=false": [newest, b, a],
        "os_distro=debian": [a],
        "note=x,y": [newest],
        "note=x": [],
        "min_ram=512": [a],
        f"checksum={hashlib.md5(b'1' * 10).hexdigest()}": [a],
        "created_at=2027-01-15T08:00:10Z": [b],
        "created_at=eq:2027-01-15T08:00:10": [b],
        "created_at=neq:2027-01-15T08:00:10Z": [newest, a],
        "created_at=gt:2027-01-15T08:00:10Z": [newest],
        "created_at=gte:2027-01-15T08:00:10Z": [newest, b],
        "created_at=lt:2027-01-15T08:00:10Z": [a],
        "created_at=lte:2027-01-15T10:00:10%2B02:00": [b, a],
        "updated_at=gte:2027-01-15T08:00:10Z": [newest, b],
        "sort_key=name&sort_dir=asc": [a, b, newest],
        "sort=name:asc": [a, b, newest],
        "sort=disk_format,name:asc": [a, newest, b],
        "sort_key=size&sort_dir=asc": [newest, a, b],
        "sort_key=status&sort_dir=asc&sort_key=name&sort_dir=desc": [b, a, newest],
        "limit=1&sort=name:asc": [a],
        "limit=0": [],
        "id=in:" + ",".join(str(uuid.uuid4()) for _ in range(100)): [],
    }.items():
        assert await cloud.names(query.replace(" ", "%20").replace('"', "%22")) == expected, query


@pytest.mark.parametrize("sort", ["", "sort=name:asc", "sort=size:desc", "sort=disk_format:asc", "sort_key=status"])
async def test_pages_show_every_image_once(cloud: World, sort: str) -> None:
    for n in range(7):
        cloud.clock.time += n % 2  # some have the same time
        form = ("raw", "qcow2", None)[n % 3]
        await cloud.create(name=f"{n % 3}" if n else None, disk_format=form, data=b"x" * n if form else None)
    whole = [image["id"] for image in (await cloud.call("GET", f"/v2/images?{sort}")).json()["images"]]
    assert len(whole) == 7
    url: str | None = f"/v2/images?{sort}&limit=2".replace("?&", "?")
    seen: list[str] = []
    for _ in range(4):
        page = (await cloud.call("GET", url or "")).json()
        assert page["schema"] == "/v2/schemas/images"
        assert page["first"].startswith("/v2/images?") and "marker" not in page["first"]
        seen += [image["id"] for image in page["images"]]
        url = page.get("next")
    assert url is None  # the last page has no link to a next one
    assert seen == whole


async def test_visibility(cloud: World) -> None:
    """Which images a caller finds, by list and by id, for each visibility."""
    images = {
        name: await cloud.create(name=name, visibility=name, token=ALICE, data=b"data")
        for name in ("private", "shared", "community")
    }
    images["public"] = await cloud.create(name="public", visibility="public", owner="p1", data=b"data", token=ADMIN)
    await cloud.call("POST", f"/v2/images/{images['shared']['id']}/members", {"member": "p2"})

    async def found(query: str, token: str) -> set[str]:
        return set(await cloud.names(query, token=token))

    assert await found("", ALICE) == {"private", "shared", "community", "public"}
    assert await found("", BOB) == {"public"}  # not accepted yet
    assert await found("member_status=pending", BOB) == {"public", "shared"}
    assert await found("visibility=shared&member_status=all", BOB) == {"shared"}
    assert await found("visibility=community", BOB) == {"community"}
    assert await found("visibility=all", BOB) == {"public", "community"}
    assert await found("", CAROL) == {"public"}
    assert await found("visibility=private", CAROL) == set()
    assert await found("owner=p1", CAROL) == {"public"}
    assert await found("", ADMIN) == {"private", "shared", "public"}
    assert await found("visibility=all", ADMIN) == {"private", "shared", "community", "public"}
    await cloud.call("PUT", f"/v2/images/{images['shared']['id']}/members/p2", {"status": "accepted"}, token=BOB)
    assert await found("", BOB) == {"public", "shared"}
    for name, image in images.items():
        for token, known in {
            ALICE: True, ADMIN: True, BOB: name != "private", CAROL: name in ("public", "community"),
        }.items():  # fmt: skip
            path = f"/v2/images/{image['id']}"
            assert (await cloud.call("GET", path, token=token)).status == (200 if known else 404)
            assert (await cloud.call("GET", f"{path}/file", token=token)).status == (200 if known else 404)
            assert (await cloud.call("GET", f"/v2/images?marker={image['id']}", token=token)).status == (
                200 if known else 400
            )
            if token in (BOB, CAROL):
                assert (await cloud.call("DELETE", path, token=token)).status == (403 if known else 404)
                renamed = await cloud.patch(
                    image["id"], {"op": "replace", "path": "/name", "value": "mine"}, token=token
                )
                assert renamed.status == (403 if known else 404)


async def test_sharing(cloud: World) -> None:
    image = await cloud.create()
    members = f"/v2/images/{image['id']}/members"
    answer = await cloud.call("POST", members, {"member": "p2"})
    assert answer.status == 200
    assert answer.json() == {
        "image_id": image["id"], "member_id": "p2", "status": "pending", "schema": "/v2/schemas/member",
        "created_at": "2027-01-15T08:00:00Z", "updated_at": "2027-01-15T08:00:00Z",
    }  # fmt: skip
    assert (await cloud.call("POST", members, {"member": "p2"})).status == 409
    assert (await cloud.call("POST", members, {"member": "p3"})).status == 200
    shown = (await cloud.call("GET", members)).json()
    assert [member["member_id"] for member in shown["members"]] == ["p2", "p3"]
    # A member sees itself and no other member.
    shown = (await cloud.call("GET", members, token=BOB)).json()
    assert [member["member_id"] for member in shown["members"]] == ["p2"]
    assert (await cloud.call("GET", f"{members}/p2", token=BOB)).status == 200
    assert (await cloud.call("GET", f"{members}/p3", token=BOB)).status == 404
    assert (await cloud.call("GET", members, token="dora@p4")).status == 404
    # Only the member sets its status, neither another member nor the owner.
    accept = {"status": "accepted"}
    assert (await cloud.call("PUT", f"{members}/p2", accept)).status == 403
    assert (await cloud.call("PUT", f"{members}/p3", accept, token=BOB)).status == 404
    assert (await cloud.call("PUT", f"{members}/p2", accept, token="rudi@p2/reader")).status == 403
    assert (await cloud.call("PUT", f"{members}/p2", accept, token=BOB)).json()["status"] == "accepted"
    assert (await cloud.call("PUT", f"{members}/p2", {"status": "rejected"}, token=BOB)).status == 200
    assert (await cloud.call("PUT", f"{members}/p2", {"status": "maybe"}, token=BOB)).status == 400
    assert (await cloud.call("POST", members, {"member": "p5"}, token=BOB)).status == 403
    assert (await cloud.call("DELETE", f"{members}/p2", token=BOB)).status == 403
    assert (await cloud.call("DELETE", f"{members}/p2")).status == 204
    assert (await cloud.call("DELETE", f"{members}/p2")).status == 404
    assert (await cloud.call("GET", f"/v2/images/{image['id']}", token=BOB)).status == 404
    private = await cloud.create(visibility="private")
    assert (await cloud.call("POST", f"/v2/images/{private['id']}/members", {"member": "p2"})).status == 403
    for n in range(127):
        assert (await cloud.call("POST", members, {"member": f"m{n}"})).status == 200
    assert (await cloud.call("POST", members, {"member": "one-too-many"})).status == 413


async def test_publishing_is_for_administrators(cloud: World) -> None:
    assert (await cloud.call("POST", "/v2/images", {"visibility": "public"})).status == 403
    image = await cloud.create(data=b"x")
    publish = {"op": "replace", "path": "/visibility", "value": "public"}
    assert (await cloud.patch(image["id"], publish)).status == 403
    assert (await cloud.patch(image["id"], publish, token=ADMIN)).status == 200
    assert (await cloud.patch(image["id"], {"op": "replace", "path": "/name", "value": "n"})).status == 200


async def test_the_owner_is_the_project_of_the_caller(cloud: World) -> None:
    assert (await cloud.call("POST", "/v2/images", {"owner": "p2"})).status == 403
    assert (await cloud.call("POST", "/v2/images", {"owner": None})).status == 403
    assert (await cloud.create(owner="p1"))["owner"] == "p1"
    assert (await cloud.create(owner="p2", token=ADMIN))["owner"] == "p2"
    image = await cloud.create()
    give = {"op": "replace", "path": "/owner", "value": "p2"}
    assert (await cloud.patch(image["id"], give)).status == 403
    assert (await cloud.patch(image["id"], give, token=ADMIN)).status == 200
    assert (await cloud.call("GET", f"/v2/images/{image['id']}")).status == 404


async def test_stage_and_import(cloud: World) -> None:
    formless = (await cloud.call("POST", "/v2/images", {"name": "formless"})).json()
    octets = {"content-type": "application/octet-stream"}
    for verb in ("stage", "file"):
        assert (await cloud.call("PUT", f"/v2/images/{formless['id']}/{verb}", b"x", headers=octets)).status == 400
    image = await cloud.create(name="imported", disk_format="qcow2")
    path = f"/v2/images/{image['id']}"
    go = {"method": {"name": "glance-direct"}}
    assert (await cloud.call("POST", f"{path}/import", go)).status == 409
    assert (await cloud.call("PUT", f"{path}/stage", b"staged", headers=octets)).status == 204
    shown = await cloud.show(image["id"])
    assert (shown["status"], shown["size"], shown["checksum"]) == ("uploading", None, None)
    assert (await cloud.call("GET", f"{path}/file")).status == 204
    assert (await cloud.upload(image["id"], b"other")).status == 409
    # The format cannot change after the data was checked against it.
    assert (await cloud.patch(image["id"], {"op": "add", "path": "/disk_format", "value": "raw"})).status == 403
    for method in ("web-download", "glance-download", "copy-image"):
        assert (await cloud.call("POST", f"{path}/import", {"method": {"name": method}})).status == 400
    assert (await cloud.call("POST", f"{path}/import", go, token=BOB)).status == 404
    assert (await cloud.call("POST", f"{path}/import", go)).status == 202
    assert (await cloud.show(image["id"]))["status"] == "active"
    assert (await cloud.call("GET", f"{path}/file")).body == b"staged"


async def test_usage_is_shown(cloud: World) -> None:
    await cloud.create(data=b"x" * 1_500_000)
    usage = (await cloud.call("GET", "/v2/info/usage")).json()["usage"]
    assert usage["image_size_total"] == {"limit": -1, "usage": 2}
    assert (await cloud.call("GET", "/v2/info/usage", token=BOB)).json()["usage"]["image_size_total"]["usage"] == 0
