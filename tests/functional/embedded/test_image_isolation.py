"""Every route, called by callers who may not. The routes come from the service, so that none is missing."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.http.service import Route
from tests.unit.embedded.image.world import ADMIN, ALICE, CAROL, OCTETS, PATCH, READER, World, world

SECRET = "kept-from-strangers"
NAMESPACE = "a-namespace"
MISSING = "00000000-0000-4000-8000-000000000000"

# Bodies and headers of valid requests, by the label of the route.
BODIES: dict[str, Any] = {
    "POST /v2/images": {"name": "x"},
    "PATCH /v2/images/{image_id}": [{"op": "replace", "path": "/name", "value": "x"}],
    "PUT /v2/images/{image_id}/file": b"data",
    "PUT /v2/images/{image_id}/stage": b"data",
    "POST /v2/images/{image_id}/import": {"method": {"name": "glance-direct"}},
    "POST /v2/images/{image_id}/members": {"member": "p3"},
    "PUT /v2/images/{image_id}/members/{member_id}": {"status": "accepted"},
    "POST /v2/tasks": {"type": "import"},
    "POST /v2/metadefs/namespaces": {"namespace": "x"},
    "PUT /v2/metadefs/namespaces/{namespace}": {"namespace": "x"},
    "POST /v2/metadefs/namespaces/{namespace}/resource_types": {"name": "x"},
    "POST /v2/metadefs/namespaces/{namespace}/objects": {"name": "x"},
    "PUT /v2/metadefs/namespaces/{namespace}/objects/{object_name}": {"name": "x"},
    "POST /v2/metadefs/namespaces/{namespace}/properties": {"name": "x", "title": "x", "type": "string"},
    "PUT /v2/metadefs/namespaces/{namespace}/properties/{property_name}": {
        "name": "x", "title": "x", "type": "string"
    },
    "POST /v2/metadefs/namespaces/{namespace}/tags": {"tags": []},
    "PUT /v2/metadefs/namespaces/{namespace}/tags/{tag_name}": {"name": "x"},
}  # fmt: skip
# Routes that concern no image and no namespace.
COMMON = {
    "GET /v2/images": 200,
    "POST /v2/images": 201,
    "GET /v2/schemas/{name}": 200,
    "GET /v2/info/import": 200,
    "GET /v2/info/stores": 200,
    "GET /v2/info/stores/detail": 403,
    "GET /v2/info/usage": 200,
    "GET /v2/tasks": 403,
    "POST /v2/tasks": 403,
    "GET /v2/tasks/{task_id}": 403,
    "GET /v2/schemas/metadefs/{name}": 200,
    "GET /v2/metadefs/namespaces": 200,
    "POST /v2/metadefs/namespaces": 403,
    "GET /v2/metadefs/resource_types": 200,
}
# Routes that a reader of the owner's project may call.
READABLE = {
    "GET /v2/images", "GET /v2/images/{image_id}", "GET /v2/images/{image_id}/tasks",
    "GET /v2/images/{image_id}/members", "GET /v2/images/{image_id}/members/{member_id}",
    "GET /v2/schemas/{name}", "GET /v2/info/import", "GET /v2/info/stores", "GET /v2/info/usage",
    "GET /v2/schemas/metadefs/{name}", "GET /v2/metadefs/namespaces", "GET /v2/metadefs/resource_types",
    "GET /v2/metadefs/namespaces/{namespace}", "GET /v2/metadefs/namespaces/{namespace}/resource_types",
    "GET /v2/metadefs/namespaces/{namespace}/objects", "GET /v2/metadefs/namespaces/{namespace}/objects/{object_name}",
    "GET /v2/metadefs/namespaces/{namespace}/properties",
    "GET /v2/metadefs/namespaces/{namespace}/properties/{property_name}",
    "GET /v2/metadefs/namespaces/{namespace}/tags", "GET /v2/metadefs/namespaces/{namespace}/tags/{tag_name}",
}  # fmt: skip


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


async def send(cloud: World, route: Route, image_id: str, token: str | None) -> tuple[int, bytes]:
    path = route.path.format(
        image_id=image_id, namespace=NAMESPACE if image_id != MISSING else image_id, tag="t", member_id="p2",
        name="namespace" if "metadefs" in route.path else "image", resource_type="T", object_name="o",
        property_name="p", tag_name="t", task_id=MISSING,
    )  # fmt: skip
    headers = OCTETS if route.raw_body else PATCH if route.method == "PATCH" else None
    answer = await cloud.call(route.method, path or "/", BODIES.get(route.label), token=token, headers=headers)
    return answer.status, answer.body


def guarded(cloud: World) -> list[Route]:
    return [route for route in cloud.role.service.routes if route.policy is not None]


async def make(cloud: World, **fields: Any) -> str:
    image = await cloud.create(name=SECRET, tags=["t"], data=SECRET.encode(), **fields)
    if image["visibility"] == "shared":
        await cloud.call("POST", f"/v2/images/{image['id']}/members", {"member": "p2"})
    namespace = {
        "namespace": NAMESPACE, "owner": "p1", "description": SECRET, "resource_type_associations": [{"name": "T"}],
        "objects": [{"name": "o"}], "properties": {"p": {"title": "p", "type": "string"}}, "tags": [{"name": "t"}],
    }  # fmt: skip
    await cloud.call("POST", "/v2/metadefs/namespaces", namespace, token=ADMIN)
    return str(image["id"])


async def test_without_a_token_only_versions_are_shown(cloud: World) -> None:
    image_id = await make(cloud)
    for route in guarded(cloud):
        for token in (None, "", "nonsense"):
            status, body = await send(cloud, route, image_id, token)
            assert status == 401, route.label
            assert SECRET.encode() not in body
    assert {route.path for route in cloud.role.service.routes if route.policy is None} == {
        "", "/versions", "/versions/", "/v2", "/v2/",
    }  # fmt: skip
    assert (await cloud.show(image_id))["status"] == "active"


@pytest.mark.parametrize("visibility", ["private", "shared"])
async def test_a_stranger_learns_nothing(cloud: World, visibility: str) -> None:
    image_id = await make(cloud, visibility=visibility)
    before = await cloud.show(image_id)
    for route in guarded(cloud):
        status, body = await send(cloud, route, image_id, CAROL)
        assert status == COMMON.get(route.label, 404), route.label
        assert SECRET.encode() not in body
        missing = await send(cloud, route, MISSING, CAROL)
        if route.label not in COMMON:  # the same as for an image that does not exist
            assert (status, body.replace(image_id.encode(), b"ID").replace(NAMESPACE.encode(), b"ID")) == (
                missing[0], missing[1].replace(MISSING.encode(), b"ID"),
            )  # fmt: skip
    assert await cloud.show(image_id) == before
    assert (await cloud.call("GET", f"/v2/images/{image_id}/file", token=ALICE)).body == SECRET.encode()


@pytest.mark.parametrize("visibility", ["private", "shared"])
async def test_a_reader_changes_nothing(cloud: World, visibility: str) -> None:
    image_id = await make(cloud, visibility=visibility)
    before = await cloud.show(image_id)
    for route in guarded(cloud):
        status, _ = await send(cloud, route, image_id, READER)
        private_members = visibility == "private" and "members" in route.path
        assert status == (200 if route.label in READABLE and not private_members else 403), route.label
    assert await cloud.show(image_id) == before


def without_rights(route: Route) -> int:
    """What a caller gets who has no rights: an image or a namespace is not there."""
    if route.policy == "default":
        return 200
    return 404 if "{image_id}" in route.path or "{namespace}" in route.path else 403


async def test_a_caller_without_a_role_may_do_nothing(cloud: World) -> None:
    image_id = await make(cloud)
    for route in guarded(cloud):
        status, body = await send(cloud, route, image_id, "nobody@p1/auditor")
        assert status == without_rights(route), route.label
        assert SECRET.encode() not in body


async def test_a_token_without_a_project_owns_nothing(cloud: World) -> None:
    image_id = await make(cloud)
    for route in guarded(cloud):
        status, body = await send(cloud, route, image_id, "drifter@")
        assert status == without_rights(route), route.label
        assert SECRET.encode() not in body
