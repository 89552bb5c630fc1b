"""Bad input is answered with a 4xx that says what is wrong, never with a 5xx, and changes nothing."""

import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.embedded.image.world import ALICE, OCTETS, PATCH, PATCH_20, World, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made


# (body, status, a word that the message must contain)
BODIES: list[tuple[Any, int, str]] = [
    (b"", 400, ""),
    (b"{", 400, ""),
    (b"null", 400, ""),
    (b"[]", 400, ""),
    (b'"text"', 400, ""),
    (b"\xff\xfe", 400, ""),
    (b'{"name": "\xff"}', 400, ""),
    (b'{"name": "\\ud800"}', 400, ""),
    (b"[" * 100_000, 400, ""),
    (b'{"a":' * 5000 + b"1" + b"}" * 5000, 400, ""),
    (b'{"min_disk": 1e999}', 400, ""),
    ({"name": 1}, 400, "name"),
    ({"name": "x" * 256}, 400, "name"),
    ({"name": "a\0b"}, 400, "U+0000"),
    ({"name": ["x"]}, 400, "name"),
    ({"id": "not-a-uuid"}, 400, "id"),
    ({"id": ""}, 400, "id"),
    ({"id": None}, 400, "id"),
    ({"id": 5}, 400, "id"),
    ({"id": f"{uuid.uuid4()}\n"}, 400, "id"),
    ({"id": f"../{uuid.uuid4()}"}, 400, "id"),
    ({"visibility": "secret"}, 400, "visibility"),
    ({"visibility": None}, 400, "visibility"),
    ({"visibility": True}, 400, "visibility"),
    ({"protected": "yes"}, 400, "protected"),
    ({"protected": None}, 400, "protected"),
    ({"protected": 1}, 400, "protected"),
    ({"os_hidden": "true"}, 400, "os_hidden"),
    ({"disk_format": "floppy"}, 400, "disk_format"),
    ({"disk_format": 7}, 400, "disk_format"),
    ({"disk_format": ""}, 400, "disk_format"),
    ({"container_format": "box"}, 400, "container_format"),
    ({"min_disk": -1}, 400, "min_disk"),
    ({"min_disk": 2**31}, 400, "min_disk"),
    ({"min_disk": 2**63}, 400, "min_disk"),
    ({"min_disk": 10**30}, 400, "min_disk"),
    ({"min_disk": 1.5}, 400, "min_disk"),
    ({"min_disk": "1"}, 400, "min_disk"),
    ({"min_disk": True}, 400, "min_disk"),
    ({"min_ram": None}, 400, "min_ram"),
    ({"tags": "a"}, 400, "tags"),
    ({"tags": [1]}, 400, "tags"),
    ({"tags": ["x" * 256]}, 400, "tags"),
    ({"tags": ["a\0"]}, 400, "U+0000"),
    ({"tags": {"a": 1}}, 400, "tags"),
    ({"tags": [f"t{n}" for n in range(129)]}, 413, "128"),
    ({"owner": 5}, 400, "owner"),
    ({"owner": "somebody else"}, 403, ""),
    ({"foo": 1}, 400, "foo"),
    ({"foo": None}, 400, "foo"),
    ({"foo": {"a": "b"}}, 400, "foo"),
    ({"foo": ["a"]}, 400, "foo"),
    ({"foo": "x" * 65_536}, 400, "foo"),
    ({"foo": "a\0b"}, 400, "U+0000"),
    ({"": "x"}, 400, "name"),
    ({"a\0b": "x"}, 400, "U+0000"),
    ({"x" * 256: "x"}, 400, "name"),
    ({f"p{n}": "x" for n in range(129)}, 413, "128"),
    ({"kernel_id": "vmlinuz"}, 400, "kernel_id"),
    ({"ramdisk_id": 3}, 400, "ramdisk_id"),
    ({"os_glance_stage": "x"}, 403, "os_glance"),
    ({"locations": []}, 403, "locations"),
    ({"status": "active"}, 403, "status"),
    ({"size": 10}, 403, "size"),
    ({"virtual_size": 10}, 403, "virtual_size"),
    ({"checksum": "0" * 32}, 403, "checksum"),
    ({"os_hash_value": "0"}, 403, "os_hash_value"),
    ({"created_at": "2020-01-01T00:00:00Z"}, 403, "created_at"),
    ({"direct_url": "file:///etc/passwd"}, 403, "direct_url"),
    ({"self": "/"}, 403, "self"),
    ({"file": "/etc/passwd"}, 403, "file"),
    ({"schema": "/"}, 403, "schema"),
    ({"visibility": "public"}, 403, "publicize_image"),
]


async def test_bad_bodies_of_new_images(cloud: World) -> None:
    for body, status, word in BODIES:
        answer = await cloud.call("POST", "/v2/images", body)
        assert answer.status == status, (body if len(str(body)) < 300 else str(body)[:80], answer)
        assert word in answer.json()["message"], (body, answer)
        assert answer.json()["code"].startswith(str(status))
    assert await cloud.names() == []


PATCHES: list[tuple[Any, int]] = [
    (b"", 400),
    (b"{}", 400),
    (b"[", 400),
    (b"[[]]", 400),
    (b"[null]", 400),
    (b"[1]", 400),
    ([{}], 400),
    ([{"op": "add"}], 400),
    ([{"op": "add", "path": "/name"}], 400),
    ([{"op": "move", "path": "/a", "from": "/b"}], 400),
    ([{"op": "test", "path": "/name", "value": "x"}], 400),
    ([{"op": ["add"], "path": "/name", "value": "x"}], 400),
    ([{"op": {"a": 1}, "path": "/name", "value": "x"}], 400),
    ([{"op": "add", "path": None, "value": "x"}], 400),
    ([{"op": "add", "path": 1, "value": "x"}], 400),
    ([{"op": "add", "path": "", "value": "x"}], 400),
    ([{"op": "add", "path": "/", "value": "x"}], 400),
    ([{"op": "add", "path": "name", "value": "x"}], 400),
    ([{"op": "add", "path": "//name", "value": "x"}], 400),
    ([{"op": "add", "path": "/name/", "value": "x"}], 400),
    ([{"op": "add", "path": "/tags/0", "value": "x"}], 400),
    ([{"op": "add", "path": "/a~2b", "value": "x"}], 400),
    ([{"op": "add", "path": "/a~", "value": "x"}], 400),
    ([{"op": "add", "path": "/a\0b", "value": "x"}], 400),
    ([{"op": "add", "path": "/" + "x" * 256, "value": "x"}], 400),
    ([{"op": "add", "path": "/foo", "value": 1}], 400),
    ([{"op": "add", "path": "/foo", "value": None}], 400),
    ([{"op": "add", "path": "/foo", "value": "a\0"}], 400),
    ([{"op": "replace", "path": "/name", "value": 3}], 400),
    ([{"op": "replace", "path": "/min_ram", "value": "much"}], 400),
    ([{"op": "replace", "path": "/min_ram", "value": -1}], 400),
    ([{"op": "replace", "path": "/tags", "value": "x"}], 400),
    ([{"op": "replace", "path": "/visibility", "value": "x"}], 400),
    ([{"op": "replace", "path": "/protected", "value": "x"}], 400),
    ([{"op": "replace", "path": "/disk_format", "value": "x"}], 400),
    ([{"op": "replace", "path": "/missing", "value": "x"}], 409),
    ([{"op": "remove", "path": "/missing"}], 409),
    ([{"op": "remove", "path": "/name"}], 403),
    ([{"op": "remove", "path": "/tags"}], 403),
    ([{"op": "replace", "path": "/id", "value": str(uuid.uuid4())}], 403),
    ([{"op": "replace", "path": "/status", "value": "active"}], 403),
    ([{"op": "replace", "path": "/size", "value": 0}], 403),
    ([{"op": "replace", "path": "/checksum", "value": "x"}], 403),
    ([{"op": "remove", "path": "/checksum"}], 403),
    ([{"op": "add", "path": "/locations/-", "value": {"url": "file:///etc/passwd", "metadata": {}}}], 403),
    ([{"op": "replace", "path": "/locations", "value": []}], 403),
    ([{"op": "add", "path": "/os_glance_x", "value": "x"}], 403),
    ([{"op": "replace", "path": "/owner", "value": "p2"}], 403),
    ([{"op": "replace", "path": "/visibility", "value": "public"}], 403),
    ([{"op": "replace", "path": "/disk_format", "value": "qcow2"}], 403),
    ([{"op": "replace", "path": "/container_format", "value": "ova"}], 403),
    ([{"op": "add", "path": f"/p{n}", "value": "x"} for n in range(129)], 413),
    # Valid operations before an invalid one are not applied either.
    ([{"op": "replace", "path": "/name", "value": "changed"}, {"op": "remove", "path": "/missing"}], 409),
]


async def test_bad_patches(cloud: World) -> None:
    image = await cloud.create(data=b"x")
    before = await cloud.show(image["id"])
    path = f"/v2/images/{image['id']}"
    for body, status in PATCHES:
        answer = await cloud.call("PATCH", path, body, headers=PATCH)
        assert answer.status == status, (body, answer)
        assert answer.json()["message"]
    for body in ([{"name": "x"}], [{"add": 5, "value": 1}], [{"replace": "/x", "value": 1}], [{"remove": "/x"}], [[]]):
        assert 400 <= (await cloud.call("PATCH", path, body, headers=PATCH_20)).status < 500, body
    change = [{"op": "replace", "path": "/name", "value": "x"}]
    for kind in ("application/json", "text/plain", "application/xml", "application/json-patch+json"):
        answer = await cloud.call("PATCH", path, change, headers={"content-type": kind})
        assert answer.status == 415, kind
    assert await cloud.show(image["id"]) == before


QUERIES = [
    "limit=-1", "limit=x", "limit=", "limit=1.5", "limit=%D9%A3", "limit=" + "9" * 40, "marker=x", "marker=",
    f"marker={uuid.uuid4()}", "marker=%00", "sort_key=color", "sort_key=", "sort_dir=up", "sort=", "sort=name:up",
    "sort=color:asc", "sort=name:asc:asc", "sort=name,", "sort=name:asc&sort_key=name",
    "sort_key=name&sort_dir=asc&sort_dir=desc", "visibility=x", "visibility=", "member_status=x",
    "os_hidden=maybe", "os_hidden=", "protected=2", "size_min=x",
    "size_min=-1", "size_max=1e3", "size_max=9223372036854775808", "min_ram=lots", "size=x", "created_at=yesterday",
    "created_at=gt:yesterday", "created_at=near:2020-01-01T00:00:00Z", "created_at=gt:", "created_at=",
    "updated_at=gte:99999-01-01", "name=gt:a", "status=lt:active",
    'name=in:"a', "%00=x", "foo=%00", "foo=%FF", "tag=%00", "name=%00", "&".join(f"a{n}=1" for n in range(1001)),
]  # fmt: skip


async def test_bad_queries(cloud: World) -> None:
    await cloud.create()
    for query in QUERIES:
        answer = await cloud.call("GET", f"/v2/images?{query.replace(chr(34), '%22')}")
        assert answer.status == 400, (query[:100], answer)
        assert answer.json()["message"]
    for query in (
        "name='; DROP TABLE images; --", "foo%27=%22%27", 'a"b=c', "x" * 300 + "=1", "limit=999999999", "tag=",
        "updated_at=gt:0001-01-01T00:00:00%2B14:00",
    ):  # fmt: skip
        answer = await cloud.call("GET", f"/v2/images?{query.replace(' ', '%20').replace(chr(34), '%22')}")
        assert answer.status == 200, query


async def test_bad_paths(cloud: World) -> None:
    image = await cloud.create()
    good = f"/v2/images/{image['id']}"
    for image_id in ("x", "\0", "..", "%2e%2e", "x" * 5000, image["id"] + "x", image["id"].upper() + "\n", "é"):
        for method, path in (
            ("GET", ""), ("PATCH", ""), ("DELETE", ""), ("GET", "/file"), ("PUT", "/file"), ("PUT", "/stage"),
            ("GET", "/members"), ("POST", "/members"), ("GET", "/tasks"), ("PUT", "/tags/x"), ("DELETE", "/tags/x"),
            ("POST", "/actions/deactivate"), ("POST", "/import"),
        ):  # fmt: skip
            body: Any = {"PATCH": []}.get(method, {"member": "m", "method": {"name": "glance-direct"}})
            headers = PATCH if method == "PATCH" else None
            answer = await cloud.call(method, f"/v2/images/{image_id}{path}", body, headers=headers)
            assert answer.status == 404, (method, image_id[:40], path, answer)
    for method, path in (
        ("PUT", "/v2/images"), ("DELETE", "/v2/images"), ("POST", good), ("PUT", good), ("DELETE", f"{good}/file"),
        ("POST", f"{good}/file"), ("GET", f"{good}/stage"), ("GET", f"{good}/tags/x"), ("POST", "/"),
    ):  # fmt: skip
        assert (await cloud.call(method, path, {})).status == 405, (method, path)
    for path in (f"{good}/actions/explode", "/v3/images", "/v2/nothing", f"{good}/file/x", f"{good}/locations"):
        assert (await cloud.call("POST", path, {})).status == 404, path
    for tag, status in (("\0", 404), ("x" * 256, 400)):
        assert (await cloud.call("PUT", f"{good}/tags/{tag}")).status == status
        assert (await cloud.call("DELETE", f"{good}/tags/{tag}")).status == 404


async def test_bad_members_and_imports(cloud: World) -> None:
    image = await cloud.create()
    path = f"/v2/images/{image['id']}"
    for body in (b"", b"{", {}, *({"member": bad} for bad in (None, 1, "", "x" * 256, "\0", ["p2"])), []):
        assert (await cloud.call("POST", f"{path}/members", body)).status == 400, body
    await cloud.call("POST", f"{path}/members", {"member": "p2"})
    for body in (b"", {}, {"status": None}, {"status": "maybe"}, {"status": 1}, {"status": ["accepted"]}, []):
        assert (await cloud.call("PUT", f"{path}/members/p2", body, token="bob@p2")).status == 400, body
    for member in ("nobody", "\0", "x" * 300):
        assert (await cloud.call("GET", f"{path}/members/{member}")).status == 404
        assert (await cloud.call("PUT", f"{path}/members/{member}", {"status": "accepted"})).status == 404
        assert (await cloud.call("DELETE", f"{path}/members/{member}")).status == 404
    for body in (b"", {}, *({"method": bad} for bad in ("glance-direct", {}, {"name": None}, {"name": "x"}))):
        assert (await cloud.call("POST", f"{path}/import", body)).status == 400, body


async def test_bad_uploads(cloud: World) -> None:
    image = await cloud.create()
    file = f"/v2/images/{image['id']}/file"
    for headers, status in (
        ({"content-type": "application/json"}, 415),
        ({**OCTETS, "x-openstack-image-size": "5"}, 400),
        ({**OCTETS, "content-length": "x"}, 400),
        ({**OCTETS, "content-length": "-5"}, 400),
        ({**OCTETS, "content-length": str(2**70)}, 413),
    ):
        assert (await cloud.call("PUT", file, b"data", headers=headers)).status == status, headers
    assert (await cloud.show(image["id"]))["status"] == "queued"
    assert cloud.files == []


async def test_bodies_that_are_too_large(cloud: World) -> None:
    big = json.dumps({"name": "x" * 2_000_000}).encode()
    assert (await cloud.call("POST", "/v2/images", big)).status == 413
    # The same without a length: the body is not read to its end.
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 65_536
            yield b" " * 65_536

    answer = await cloud.stream(
        "POST", "/v2/images", endless(), token=ALICE, headers={"content-type": "application/json"}
    )
    assert answer.status == 413
    assert read < 4 << 20
