"""Every route, called by callers who may not. The routes come from the service, so that none is missing."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.http.service import Route
from tests.unit.embedded.image.world import ALICE, CAROL, OCTETS, PATCH, READER, World, world

SECRET = "kept-from-strangers"

# Bodies and headers of valid requests, by the label of the route.
BODIES: dict[str, Any] = {
    "POST /v2/images": {"name": "x"},
    "PATCH /v2/images/{image_id}": [{"op": "replace", "path": "/name", "value": "x"}],
    "PUT /v2/images/{image_id}/file": b"data",
    "PUT /v2/images/{image_id}/stage": b"data",
    "POST /v2/images/{image_id}/import": {"method": {"name": "glance-direct"}},
    "POST /v2/images/{image_id}/members": {"member": "p3"},
    "PUT /v2/images/{image_id}/members/{member_id}": {"status": "accepted"},
}
# Routes that concern no image.
COMMON = {
    "GET /v2/images": 200,
    "POST /v2/images": 201,
    "GET /v2/schemas/{name}": 200,
    "GET /v2/info/import": 200,
    "GET /v2/info/stores": 200,
    "GET /v2/info/stores/detail": 403,
    "GET /v2/info/usage": 200,
}
# Routes that a reader of the owner's project may call.
READABLE = {
    "GET /v2/images", "GET /v2/images/{image_id}", "GET /v2/images/{image_id}/tasks",
    "GET /v2/images/{image_id}/members", "GET /v2/images/{image_id}/members/{member_id}",
    "GET /v2/schemas/{name}", "GET /v2/info/import", "GET /v2/info/stores", "GET /v2/info/usage",
}  # fmt: skip


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


async def send(cloud: World, route: Route, image_id: str, token: str | None) -> tuple[int, bytes]:
    path = route.path.format(image_id=image_id, tag="t", member_id="p2", name="image")
    headers = OCTETS if route.raw_body else PATCH if route.method == "PATCH" else None
    answer = await cloud.call(route.method, path or "/", BODIES.get(route.label), token=token, headers=headers)
    return answer.status, answer.body


def guarded(cloud: World) -> list[Route]:
    return [route for route in cloud.role.service.routes if route.policy is not None]


async def make(cloud: World, **fields: Any) -> str:
    image = await cloud.create(name=SECRET, tags=["t"], data=SECRET.encode(), **fields)
    if image["visibility"] == "shared":
        await cloud.call("POST", f"/v2/images/{image['id']}/members", {"member": "p2"})
    return str(image["id"])


async def test_without_a_token_only_versions_are_shown(cloud: World) -> None:
    image_id = await make(cloud)
    for route in guarded(cloud):
        for token in (None, "", "nonsense"):
            status, body = await send(cloud, route, image_id, token)
            assert status == 401, route.label
            assert SECRET.encode() not in body
    assert {route.path for route in cloud.role.service.routes if route.policy is None} == {"", "/versions", "/v2"}
    assert (await cloud.show(image_id))["status"] == "active"


@pytest.mark.parametrize("visibility", ["private", "shared"])
async def test_a_stranger_learns_nothing(cloud: World, visibility: str) -> None:
    image_id = await make(cloud, visibility=visibility)
    before = await cloud.show(image_id)
    for route in guarded(cloud):
        status, body = await send(cloud, route, image_id, CAROL)
        assert status == COMMON.get(route.label, 404), route.label
        assert SECRET.encode() not in body
        missing = await send(cloud, route, "00000000-0000-4000-8000-000000000000", CAROL)
        if route.label not in COMMON:  # the same as for an image that does not exist
            assert (status, body.replace(image_id.encode(), b"ID")) == (
                missing[0], missing[1].replace(b"00000000-0000-4000-8000-000000000000", b"ID"),
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


async def test_a_caller_without_a_role_may_do_nothing(cloud: World) -> None:
    image_id = await make(cloud)
    for route in guarded(cloud):
        status, body = await send(cloud, route, image_id, "nobody@p1/auditor")
        expected = 200 if route.policy == "default" else 403 if "{image_id}" not in route.path else 404
        assert status == expected, route.label
        assert SECRET.encode() not in body


async def test_a_token_without_a_project_owns_nothing(cloud: World) -> None:
    image_id = await make(cloud)
    for route in guarded(cloud):
        status, body = await send(cloud, route, image_id, "drifter@")
        assert status == (200 if route.policy == "default" else 403 if "{image_id}" not in route.path else 404)
        assert SECRET.encode() not in body
