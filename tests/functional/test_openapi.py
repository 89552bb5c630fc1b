"""Every answer to a read is what the OpenAPI document says, at every microversion at which the operation changes.

All other functional tests compare the answers that they get with the document as well (`tests/schemas/openapi.py`).
"""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from micronova.api.compute import api_document
from micronova.api.compute.versions_doc import LEAST, NEWEST
from micronova.api.view import View
from micronova.http.service import Route
from tests.functional import good_requests as good
from tests.functional.full_cloud import FullCloud, Person, full_cloud
from tests.schemas.openapi import Judge
from tests.unit.api.test_openapi import views

__all__ = ["full_cloud"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Writes whose answer has a form of its own.
WRITES = (
    "POST /os-aggregates", "POST /os-keypairs", "PUT /os-quota-sets/{id}", "PUT /os-quota-class-sets/{id}",
    "PUT /servers/{id}",
)  # fmt: skip

# What only a server shows that has a volume and is being live migrated.
OF_MOVING = {"volume_attachments.ATTACHMENT", "migrations.MIGRATION", "server_migrations.MIGRATION"}


def changes_of(route: Route) -> list[int]:
    """Return the microversions at which a route or what it answers with changes, and the last one."""
    ranges = [route.versions, *(field.versions for view in _views(route.answer) for field in view.fields)]
    found = {LEAST, NEWEST, *(each.since for each in ranges), *(each.until + 1 for each in ranges)}
    return sorted(minor for minor in found if LEAST <= minor <= NEWEST and minor in route.versions)


def _views(shape: object) -> list[View]:
    if isinstance(shape, View):
        return [shape, *(view for field in shape.fields for view in _views(field.type))]
    if isinstance(shape, dict | list | tuple):
        return [view for each in (shape.values() if isinstance(shape, dict) else shape) for view in _views(each)]
    return []


@pytest.mark.thorough
async def test_every_view_at_every_microversion_that_changes_it(
    full_cloud: FullCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await full_cloud.person("member")
    reader = await full_cloud.person("reader", project=await full_cloud.project_name(owner))
    things = await good.make_things(full_cloud, owner)
    names = {id(view): name for name, view in views().items()}
    rendered, wanted = _renderings(monkeypatch), set()
    asked = 0
    async with _moving(full_cloud, owner, things) as moving:
        for service, route in full_cloud.routes():
            if service.name != "compute" or route.policy is None or good.is_removed(route):
                continue
            if route.method != "GET" and route.label not in WRITES:
                continue
            noun = route.path.split("/")[1]
            named = moving if OF_MOVING & {names[id(view)] for view in _views(route.answer)} else things
            for minor in changes_of(route):
                wanted |= {(id(view), minor) for view in _views(route.answer)}
                path, body = good.path(service, route, named), good.body(route, named)
                if (old := good.old_id(noun, minor)) is not None:
                    path = path.replace(named[noun], old)
                for caller in (full_cloud.admin, owner, reader) if route.method == "GET" else (full_cloud.admin,):
                    answer = await caller.request(route.method, path, body, minor=minor)  # the judge compares it
                    assert answer.status in (200, 201, 204, 400, 403, 404, 501), (path, minor, answer)
                    asked += 1
    assert asked > 500
    missing = {(names[view], minor) for view, minor in wanted - rendered}
    assert not missing


@contextlib.asynccontextmanager
async def _moving(cloud: FullCloud, owner: Person, things: good.Things) -> AsyncIterator[good.Things]:
    """Yield the things with another server, which has a volume and is being live migrated; end the migration."""
    volume = await owner.make("/volume/v3/volumes", "volume", name="moving", size=1)
    await good.until_available(cloud, owner, f"volumes/{volume['id']}", "volume")
    body = {"name": "moving", "imageRef": things["image"], "flavorRef": things["flavors"], "networks": "none"}
    server = await owner.make("/compute/v2.1/servers", "server", **body)
    at = f"/compute/v2.1/servers/{server['id']}"
    await cloud.until(lambda: _with_status(owner, at, "ACTIVE"), "the server to run")
    await owner.do("POST", f"{at}/os-volume_attachments", {"volumeAttachment": {"volumeId": volume["id"]}})
    await cloud.until(lambda: _in_use(owner, at), "the server to have the volume")
    async with cloud.faults({"operation": "live_migrate", "kind": "hang", "name": "moving", "count": 1}):
        await cloud.admin.do("POST", f"{at}/action", {"os-migrateLive": {"host": None, "block_migration": "auto"}})
        [migration] = await cloud.until(lambda: _running(cloud.admin, at), "the migration to run")
        yield {**things, "servers": server["id"], "no volume": volume["id"], "migration": str(migration["id"])}
        await cloud.admin.do("DELETE", f"{at}/migrations/{migration['id']}")
        await cloud.until(lambda: _with_status(owner, at, "ACTIVE"), "the migration to end")
    await owner.do("DELETE", at)


async def _with_status(owner: Person, path: str, status: str) -> bool | None:
    return (await owner.do("GET", path))["server"]["status"] == status or None


async def _in_use(owner: Person, path: str) -> bool | None:
    attached = (await owner.do("GET", f"{path}/os-volume_attachments"))["volumeAttachments"]
    shown = (await owner.do("GET", path))["server"]
    return True if attached and shown["OS-EXT-STS:task_state"] is None else None


async def _running(admin: Person, path: str) -> list[Any] | None:
    found = (await admin.do("GET", f"{path}/migrations"))["migrations"]
    return found if found and found[0]["status"] == "running" else None


def _renderings(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Return a set to which each view that is rendered is added, with the microversion."""
    seen: set[tuple[int, int]] = set()
    at = View.at

    def watched(view: View, minor: int, flags: frozenset[str] = frozenset()) -> Any:
        shape = at(view, minor, flags)

        def render(*args: Any) -> dict[str, Any]:
            seen.add((id(view), minor))
            return shape(*args)

        return render

    monkeypatch.setattr(View, "at", watched)
    return seen


async def test_the_document_is_served(full_cloud: FullCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/compute/v2.1/openapi.json"
    judge = full_cloud.transport
    assert isinstance(judge, Judge)

    async def version(url: str, headers: dict[str, str] | None = None) -> str:
        sent = {"x-auth-token": full_cloud.admin.token or "", **(headers or {})}
        answer = await judge.request("GET", url, sent, None)
        assert answer.status == 200 and answer.headers["content-type"] == "application/json"
        return str(answer.json()["info"]["version"])

    assert await version(path) == f"2.{NEWEST}"
    assert await version(path, {"openstack-api-version": "compute 2.53"}) == "2.53"
    assert await version(path, {"x-openstack-nova-api-version": "2.7"}) == "2.7"
    assert await version(f"{path}?microversion=2.90", {"openstack-api-version": "compute 2.53"}) == "2.90"
    served = (await full_cloud.admin.request("GET", path, minor=90)).json()
    assert served["servers"] == [{"url": "http://cloud:8774/compute/v2.1"}]
    assert served["paths"] == json.loads(json.dumps(judge.document(90).content["paths"]))
    monkeypatch.delattr(api_document, "document")  # each is made once, whatever name a client has for us
    other = await judge.request("GET", path, {"x-auth-token": full_cloud.admin.token or "", "host": "other"}, None)
    assert other.json()["servers"] == [{"url": "http://other/compute/v2.1"}]
    for minor in (7, 53, 90):
        assert await version(f"{path}?microversion=2.{minor}") == f"2.{minor}"
    monkeypatch.undo()
    for wrong, status in (("2.999", 406), ("zork", 400), ("", 400)):
        assert (await full_cloud.admin.request("GET", f"{path}?microversion={wrong}")).status == status
    assert (await full_cloud.anonymous.request("GET", path)).status == 401
