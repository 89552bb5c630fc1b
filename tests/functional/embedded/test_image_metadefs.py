"""Metadata definitions as clients use them, on both databases."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.embedded.image.world import ADMIN, ALICE, BOB, READER, World, world

ALL = "/v2/metadefs/namespaces"
CPU = {"title": "vCPUs", "type": "integer", "minimum": 1, "maxLength": 3, "default": None}
SHOWN_TIMES = {"created_at": "2027-01-15T08:00:00Z", "updated_at": "2027-01-15T08:00:00Z"}


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made


async def do(cloud: World, method: str, path: str, body: Any = None, status: int | None = None) -> Any:
    answer = await cloud.call(method, path, body, token=ADMIN)
    assert answer.status == (status or {"POST": 201, "DELETE": 204}.get(method, 200)), answer
    return answer.json() if answer.body else None


async def names(cloud: World, query: str = "", token: str = ALICE) -> list[str]:
    answer = await cloud.call("GET", f"{ALL}?{query}", token=token)
    assert answer.status == 200, answer
    return [each["namespace"] for each in answer.json()["namespaces"]]


async def test_a_namespace_with_all_that_can_be_in_it(cloud: World) -> None:
    body = {
        "namespace": "OS::Compute::Test",
        "display_name": "Test",
        "description": "what flavors say",
        "visibility": "public",
        "protected": True,
        "resource_type_associations": [{"name": "OS::Nova::Flavor", "prefix": "hw:"}, {"name": "Our::Thing"}],
        "properties": {"cpus": CPU},
        "objects": [{"name": "group", "required": ["a"], "properties": {"a": {"title": "A", "type": "string"}}}],
        "tags": [{"name": "t"}],
    }
    answer = await cloud.call("POST", ALL, body, token=ADMIN)
    assert answer.status == 201, answer
    assert answer.headers["location"].startswith("http://cloud/image/v2/metadefs/namespaces/OS")
    path = f"{ALL}/OS::Compute::Test"
    group = {
        "name": "group", "required": ["a"], "properties": {"a": {"title": "A", "type": "string"}}, **SHOWN_TIMES,
        "schema": "/v2/schemas/metadefs/object", "self": f"{path}/objects/group",
    }  # fmt: skip
    own = {
        "namespace": "OS::Compute::Test", "display_name": "Test", "description": "what flavors say",
        "visibility": "public", "protected": True, "owner": "p0", **SHOWN_TIMES,
        "schema": "/v2/schemas/metadefs/namespace", "self": path,
        "resource_type_associations": [
            {"name": "OS::Nova::Flavor", "prefix": "hw:", **SHOWN_TIMES}, {"name": "Our::Thing", **SHOWN_TIMES},
        ],
    }  # fmt: skip
    assert answer.json() == own | {"objects": [group], "properties": {"cpus": CPU}, "tags": [{"name": "t"}]}
    assert (await cloud.call("GET", path)).json() == answer.json()  # another project sees it: it is public
    assert (await cloud.call("GET", ALL)).json() == {
        "namespaces": [own], "first": ALL, "schema": "/v2/schemas/metadefs/namespaces"
    }  # fmt: skip
    prefixed = (await cloud.call("GET", f"{path}?resource_type=OS::Nova::Flavor")).json()
    assert prefixed["properties"] == {"hw:cpus": CPU}
    assert prefixed["objects"][0]["required"] == ["hw:a"]
    assert list(prefixed["objects"][0]["properties"]) == ["hw:a"]
    assert {"OS::Nova::Flavor", "OS::Glance::Image", "Our::Thing"} <= {
        each["name"] for each in (await cloud.call("GET", "/v2/metadefs/resource_types")).json()["resource_types"]
    }
    for inside in ("", "/objects/group", "/objects", "/properties/cpus", "/properties", "/tags/t", "/tags",
                   "/resource_types/OS::Nova::Flavor"):  # fmt: skip
        await do(cloud, "DELETE", path + inside, status=403)
    changed = await do(cloud, "PUT", path, {"namespace": "renamed"})
    assert changed["visibility"] == "private" and changed["protected"] is False and "description" not in changed
    await do(cloud, "GET", path, status=404)
    assert (await do(cloud, "GET", f"{ALL}/renamed"))["tags"] == [{"name": "t"}]
    await do(cloud, "DELETE", f"{ALL}/renamed")
    await do(cloud, "GET", f"{ALL}/renamed", status=404)
    await do(cloud, "POST", ALL, {"namespace": "renamed"})
    assert "objects" not in await do(cloud, "GET", f"{ALL}/renamed")


async def test_objects(cloud: World) -> None:
    await do(cloud, "POST", ALL, {"namespace": "n"})
    made = await do(cloud, "POST", f"{ALL}/n/objects", {"name": "one", "description": "d"})
    assert made["description"] == "d" and made["self"] == f"{ALL}/n/objects/one"
    await do(cloud, "POST", f"{ALL}/n/objects", {"name": "one"}, status=409)
    await do(cloud, "POST", f"{ALL}/n/objects", {"name": "two"})
    await do(cloud, "PUT", f"{ALL}/n/objects/two", {"name": "one"}, status=409)
    cloud.clock.time += 60
    changed = await do(cloud, "PUT", f"{ALL}/n/objects/one", {"name": "other", "properties": {"a": CPU}})
    assert changed["properties"] == {"a": CPU} and "description" not in changed
    assert (changed["created_at"], changed["updated_at"]) == ("2027-01-15T08:00:00Z", "2027-01-15T08:01:00Z")
    assert await do(cloud, "GET", f"{ALL}/n/objects/other") == changed
    await do(cloud, "GET", f"{ALL}/n/objects/one", status=404)
    listed = await do(cloud, "GET", f"{ALL}/n/objects?sort_key=name&sort_dir=asc")
    assert [each["name"] for each in listed["objects"]] == ["other", "two"]
    after = await do(cloud, "GET", f"{ALL}/n/objects?sort_key=name&sort_dir=asc&limit=1&marker=other")
    assert [each["name"] for each in after["objects"]] == ["two"]
    await do(cloud, "GET", f"{ALL}/n/objects?marker=nothing", status=404)
    await do(cloud, "DELETE", f"{ALL}/n/objects/other")
    await do(cloud, "DELETE", f"{ALL}/n/objects/other", status=404)
    await do(cloud, "DELETE", f"{ALL}/n/objects")
    assert (await do(cloud, "GET", f"{ALL}/n/objects"))["objects"] == []


async def test_properties(cloud: World) -> None:
    await do(cloud, "POST", ALL, {"namespace": "n"})
    assert await do(cloud, "POST", f"{ALL}/n/properties", {"name": "cpus", **CPU}) == {"name": "cpus", **CPU}
    await do(cloud, "POST", f"{ALL}/n/properties", {"name": "cpus", **CPU}, status=409)
    new = {"title": "other", "type": "string", "enum": ["a", "b"], "items": {"type": "string"}}
    assert await do(cloud, "PUT", f"{ALL}/n/properties/cpus", {"name": "cpus", **new}) == {"name": "cpus", **new}
    assert await do(cloud, "GET", f"{ALL}/n/properties") == {"properties": {"cpus": new}}
    await do(cloud, "POST", f"{ALL}/n/resource_types", {"name": "OS::Nova::Flavor", "prefix": "hw:"})
    query = "resource_type=OS::Nova::Flavor"
    assert (await do(cloud, "GET", f"{ALL}/n/properties/hw:cpus?{query}"))["name"] == "cpus"
    await do(cloud, "GET", f"{ALL}/n/properties/cpus?{query}", status=404)
    await do(cloud, "GET", f"{ALL}/n/properties/hw:cpus?resource_type=Other", status=404)
    await do(cloud, "DELETE", f"{ALL}/n/properties/cpus")
    await do(cloud, "GET", f"{ALL}/n/properties/cpus", status=404)


async def test_tags(cloud: World) -> None:
    await do(cloud, "POST", ALL, {"namespace": "n"})
    tags = {"tags": [{"name": "a"}, {"name": "b"}]}
    assert await do(cloud, "POST", f"{ALL}/n/tags", tags) == tags
    assert await do(cloud, "POST", f"{ALL}/n/tags", {"tags": [{"name": "c"}]}) == {"tags": [{"name": "c"}]}
    answer = await cloud.call(
        "POST", f"{ALL}/n/tags", {"tags": [{"name": "d"}]}, token=ADMIN, headers={"x-openstack-append": "True"}
    )
    assert answer.status == 201, answer
    assert await do(cloud, "POST", f"{ALL}/n/tags/e") == {"name": "e", **SHOWN_TIMES}
    await do(cloud, "POST", f"{ALL}/n/tags/e", status=409)
    await do(cloud, "POST", f"{ALL}/n/tags", {"tags": [{"name": "x"}, {"name": "x"}]}, status=409)
    assert await do(cloud, "GET", f"{ALL}/n/tags?sort_key=name&sort_dir=asc") == {
        "tags": [{"name": "c"}, {"name": "d"}, {"name": "e"}]
    }
    assert (await do(cloud, "PUT", f"{ALL}/n/tags/e", {"name": "f"}))["name"] == "f"
    await do(cloud, "DELETE", f"{ALL}/n/tags/f")
    await do(cloud, "DELETE", f"{ALL}/n/tags")
    assert await do(cloud, "GET", f"{ALL}/n/tags") == {"tags": []}


async def test_associations(cloud: World) -> None:
    await do(cloud, "POST", ALL, {"namespace": "n"})
    made = await do(cloud, "POST", f"{ALL}/n/resource_types", {"name": "T", "properties_target": "image"})
    assert made == {"name": "T", "properties_target": "image", **SHOWN_TIMES}
    await do(cloud, "POST", f"{ALL}/n/resource_types", {"name": "T"}, status=409)
    assert await do(cloud, "GET", f"{ALL}/n/resource_types") == {"resource_type_associations": [made]}
    await do(cloud, "DELETE", f"{ALL}/n/resource_types/T")
    await do(cloud, "DELETE", f"{ALL}/n/resource_types/T", status=404)


async def test_lists_show_what_the_caller_may_see(cloud: World) -> None:
    for name, more in (
        ("public", {"visibility": "public", "resource_type_associations": [{"name": "T"}]}),
        ("of-p1", {"owner": "p1"}),
        ("of-p2", {"owner": "p2", "resource_type_associations": [{"name": "T"}, {"name": "U"}]}),
    ):
        cloud.clock.time += 1
        await do(cloud, "POST", ALL, {"namespace": name, **more})
    assert await names(cloud) == ["of-p1", "public"]
    assert await names(cloud, token=READER) == ["of-p1", "public"]
    assert await names(cloud, token=BOB) == ["of-p2", "public"]
    assert await names(cloud, token=ADMIN) == ["of-p2", "of-p1", "public"]
    assert await names(cloud, "visibility=private") == ["of-p1"]
    assert await names(cloud, "resource_types=U,T", token=BOB) == ["of-p2", "public"]
    assert await names(cloud, "sort_key=namespace&sort_dir=asc&limit=1&marker=of-p1") == ["public"]
    first = (await cloud.call("GET", f"{ALL}?limit=1")).json()
    assert first["next"] == f"{ALL}?limit=1&marker=of-p1"
    assert "next" not in (await cloud.call("GET", first["next"])).json()
    for query, status in (
        ("marker=of-p2", 404),
        ("limit=x", 400),
        ("sort_key=id", 400),
        ("visibility=x", 400),
        ("x=", 400),
    ):
        assert (await cloud.call("GET", f"{ALL}?{query}")).status == status, query


BAD: list[tuple[str, str, Any, int]] = [
    ("POST", ALL, {}, 400),
    ("POST", ALL, {"namespace": ""}, 400),
    ("POST", ALL, {"namespace": "x" * 81}, 400),
    ("POST", ALL, {"namespace": "x", "unknown": 1}, 400),
    ("POST", ALL, {"namespace": "x", "visibility": "secret"}, 400),
    ("POST", ALL, {"namespace": "x", "description": "x" * 501}, 400),
    ("POST", ALL, {"namespace": "x", "created_at": "2020-01-01T00:00:00Z"}, 403),
    ("POST", ALL, {"namespace": "x", "self": "/"}, 403),
    ("POST", ALL, {"namespace": "x", "tags": [{"name": f"{n}"} for n in range(257)]}, 400),
    ("POST", ALL, {"namespace": "x", "properties": {"p": {"type": "string"}}}, 400),
    ("POST", ALL, {"namespace": "n"}, 409),
    ("PUT", f"{ALL}/other", {"namespace": "n"}, 409),
    ("PUT", f"{ALL}/nothing", {"namespace": "n"}, 404),
    ("POST", f"{ALL}/nothing/tags/t", None, 404),
    ("POST", f"{ALL}/n/tags/{'x' * 81}", None, 400),
    ("POST", f"{ALL}/n/properties", {"name": "p", "title": "p", "type": "text"}, 400),
    ("POST", f"{ALL}/n/properties", {"name": "p", "title": "p", "type": "integer", "minimum": 2, "maximum": 1}, 400),
    ("POST", f"{ALL}/n/properties", {"name": "p", "title": "x" * 20_000, "type": "string"}, 413),
    ("POST", f"{ALL}/n/objects", {"name": "o", "schema": "x"}, 403),
    ("POST", f"{ALL}/n/objects", {"name": "o", "properties": {"p": {"title": "p"}}}, 400),
    ("POST", f"{ALL}/n/resource_types", {"prefix": "x"}, 400),
    ("DELETE", f"{ALL}/nothing", None, 404),
]


async def test_bad_input_changes_nothing(cloud: World) -> None:
    await do(cloud, "POST", ALL, {"namespace": "n"})
    await do(cloud, "POST", ALL, {"namespace": "other"})
    before = await do(cloud, "GET", ALL), await do(cloud, "GET", f"{ALL}/n")
    for method, path, body, status in BAD:
        answer = await cloud.call(method, path, body, token=ADMIN)
        assert answer.status == status, (method, path, body, answer)
    assert (await do(cloud, "GET", ALL), await do(cloud, "GET", f"{ALL}/n")) == before


async def test_a_namespace_has_a_limited_number_of_definitions(cloud: World) -> None:
    await do(cloud, "POST", ALL, {"namespace": "n", "tags": [{"name": f"{n}"} for n in range(256)]})
    await do(cloud, "POST", f"{ALL}/n/tags/one-more", status=413)
    assert len((await do(cloud, "GET", f"{ALL}/n/tags"))["tags"]) == 256


async def test_schemas(cloud: World) -> None:
    expected = {
        "namespace": "namespace", "namespaces": "namespaces", "object": "object", "objects": "objects",
        "property": "property", "properties": "properties", "tag": "tag", "tags": "tags",
        "resource_type": "resource_type_association", "resource_types": "resource_type_associations",
    }  # fmt: skip
    for path, name in expected.items():
        answer = await cloud.call("GET", f"/v2/schemas/metadefs/{path}")
        assert (answer.status, answer.json()["name"]) == (200, name)
    assert (await cloud.call("GET", "/v2/schemas/metadefs/other")).status == 404
