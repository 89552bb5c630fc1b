"""Registered limits, and the limits of projects and domains."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.embedded.identity.harness import SERVICE, Caller, Cloud, cloud_at, sqlite_at


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[Cloud]:
    async with cloud_at(sqlite_at(tmp_path)) as running:
        yield running


async def compute(admin: Caller) -> str:
    return str((await admin.get("/services?type=compute"))["services"][0]["id"])


async def register(admin: Caller, service: str, name: str = "servers", **fields: Any) -> dict[str, Any]:
    body = {"service_id": service, "resource_name": name, "default_limit": 10, **fields}
    answer = await admin.do("POST", "/registered_limits", {"registered_limits": [body]}, 201)
    return dict(answer["registered_limits"][0])


async def limit(admin: Caller, service: str, name: str = "servers", **fields: Any) -> dict[str, Any]:
    body = {"service_id": service, "resource_name": name, "resource_limit": 5, **fields}
    return dict((await admin.do("POST", "/limits", {"limits": [body]}, 201))["limits"][0])


async def test_limits_are_made_shown_changed_and_deleted(cloud: Cloud) -> None:
    admin = await cloud.admin()
    alice = await cloud.member(admin, "alice")
    service = await compute(admin)
    default = await register(admin, service, region_id="RegionOne", description="in all")
    path = f"/registered_limits/{default['id']}"
    assert default == {
        "id": default["id"], "service_id": service, "region_id": "RegionOne", "resource_name": "servers",
        "default_limit": 10, "description": "in all",
        "links": {"self": f"http://cloud.example/identity/v3{path}"},
    }  # fmt: skip
    everywhere = await register(admin, service)
    assert everywhere["region_id"] is None
    for caller in (admin, alice):
        assert (await caller.get(path))["registered_limit"] == default
        assert (await caller.get("/registered_limits"))["registered_limits"] == [default, everywhere]
    changed = await admin.do("PATCH", path, {"registered_limit": {"default_limit": 0, "description": None}}, 200)
    assert changed["registered_limit"] == {**default, "default_limit": 0, "description": None}
    again = {"registered_limit": {"region_id": "RegionOne", "resource_name": "servers"}}
    await admin.do("PATCH", path, again, 200)  # as it is
    own = await limit(admin, service, region_id="RegionOne", project_id=alice.project_id, description="less")
    assert own == {
        "id": own["id"], "project_id": alice.project_id, "domain_id": None, "service_id": service,
        "region_id": "RegionOne", "resource_name": "servers", "resource_limit": 5, "description": "less",
        "links": {"self": f"http://cloud.example/identity/v3/limits/{own['id']}"},
    }  # fmt: skip
    changed = await admin.do("PATCH", f"/limits/{own['id']}", {"limit": {"resource_limit": 0}}, 200)
    assert changed["limit"] == {**own, "resource_limit": 0} == (await alice.get(f"/limits/{own['id']}"))["limit"]
    for method, body in (("PATCH", {"registered_limit": {"default_limit": 2}}), ("DELETE", None)):
        assert (await admin.request(method, path, body)).status == 403, "there is a limit of it"
    await admin.do("DELETE", f"/limits/{own['id']}")
    await admin.do("DELETE", path)
    assert (await admin.get("/registered_limits"))["registered_limits"] == [everywhere]
    assert (await alice.request("GET", path)).status == 404
    assert (await admin.get("/limits/model"))["model"]["name"] == "flat"


async def test_who_sees_which_limits(cloud: Cloud) -> None:
    admin = await cloud.admin()
    alice, bob = await cloud.member(admin, "alice"), await cloud.member(admin, "bob")
    service = await compute(admin)
    await register(admin, service)
    other = await admin.make("/domains", name="other")
    away = await admin.make("/projects", name="away", domain_id=other["id"])
    owners = {
        "alice": {"project_id": alice.project_id}, "away": {"project_id": away["id"]},
        "other": {"domain_id": other["id"]}, "default": {"domain_id": "default"},
    }  # fmt: skip
    ids = {name: (await limit(admin, service, **owner))["id"] for name, owner in owners.items()}
    user = await admin.make("/users", name="manager", password="secret")
    roles = {role["name"]: role["id"] for role in (await admin.get("/roles"))["roles"]}
    await admin.do("PUT", f"/domains/{other['id']}/users/{user['id']}/roles/{roles['member']}")
    await admin.do("PUT", f"/system/users/{user['id']}/roles/{roles['reader']}")
    callers = {
        "admin": (admin, set(ids)),
        "service": (await cloud.login(*SERVICE), set(ids)),
        "system": (await cloud.login("manager", "secret", scope={"system": {"all": True}}), set(ids)),
        "domain": (await cloud.login("manager", "secret", scope={"domain": {"id": other["id"]}}), {"other", "away"}),
        "alice": (alice, {"alice"}),
        "bob": (bob, set()),
        "unscoped": (await cloud.login("alice", "secret"), set()),
    }
    for who, (caller, expected) in callers.items():
        seen = {row["id"] for row in (await caller.get("/limits"))["limits"]}
        assert seen == {ids[name] for name in expected}, who
        for query in (f"?project_id={alice.project_id}", "?project_id=", "?domain_id=default"):
            found = {row["id"] for row in (await caller.get(f"/limits{query}"))["limits"]}
            assert found <= seen, (who, query)
        for name, id in ids.items():
            answer = await caller.request("GET", f"/limits/{id}")
            # The list is for services as well, as in Keystone.
            assert answer.status == (200 if name in expected and who != "service" else 403), (who, name)
        assert (await caller.request("GET", "/limits/nothing")).status == (404 if who in ("admin", "system") else 403)


async def test_filters_and_pages(cloud: Cloud) -> None:
    admin = await cloud.admin()
    service = await compute(admin)
    other = (await admin.make("/services", type="other"))["id"]
    made = [
        await register(admin, service),
        await register(admin, service, "cores"),
        await register(admin, other, "cores", region_id="RegionOne"),
    ]
    for query, expected in (
        (f"?service_id={service}", made[:2]), ("?resource_name=cores", made[1:]), ("?region_id=RegionOne", made[2:]),
        ("?resource_name__contains=ERV", made[:1]), ("?limit=2", made[:2]), (f"?marker={made[0]['id']}", made[1:]),
        ("?resource_name=nothing", []),
    ):  # fmt: skip
        assert (await admin.get(f"/registered_limits{query}"))["registered_limits"] == expected, query
    limits = [
        await limit(admin, service, domain_id="default"),
        await limit(admin, service, "cores", project_id=admin.project_id),
        await limit(admin, other, "cores", region_id="RegionOne", project_id=admin.project_id),
    ]
    for query, found in (
        (f"?service_id={service}", limits[:2]), ("?resource_name=cores", limits[1:]),
        ("?region_id=RegionOne", limits[2:]),
        ("?domain_id=default", limits[:1]), (f"?project_id={admin.project_id}", limits[1:]),
    ):  # fmt: skip
        assert (await admin.get(f"/limits{query}"))["limits"] == found, query


async def test_bad_input(cloud: Cloud) -> None:
    admin = await cloud.admin()
    service = await compute(admin)
    default = await register(admin, service)
    second = await register(admin, service, "cores")
    project = {"project_id": admin.project_id}
    await limit(admin, service, **project)
    for kind, fields, status in (
        ("registered_limits", {}, 409),
        ("registered_limits", {"service_id": "0" * 32}, 400),
        ("registered_limits", {"region_id": "nowhere"}, 400),
        ("registered_limits", {"default_limit": -2}, 400),
        ("registered_limits", {"default_limit": 2**31}, 400),
        ("registered_limits", {"default_limit": True}, 400),
        ("registered_limits", {"resource_name": ""}, 400),
        ("registered_limits", {"resource_name": "x" * 256}, 400),
        ("registered_limits", {"description": "x" * 256}, 400),
        ("registered_limits", {"project_id": admin.project_id}, 400),
        ("limits", project, 409),
        ("limits", {}, 400),
        ("limits", {"project_id": None}, 400),
        ("limits", {**project, "domain_id": None}, 400),
        ("limits", {"project_id": "0" * 32}, 400),
        ("limits", {"domain_id": "nowhere"}, 400),
        ("limits", {**project, "region_id": "nowhere"}, 400),
        ("limits", {**project, "region_id": "RegionOne"}, 403),
        ("limits", {**project, "resource_name": "other"}, 403),
        ("limits", {**project, "resource_limit": "5"}, 400),
    ):
        amount = "default_limit" if kind == "registered_limits" else "resource_limit"
        wanted = {"service_id": service, "resource_name": "servers", amount: 5, **fields}
        answer = await admin.request("POST", f"/{kind}", {kind: [wanted]})
        assert answer.status == status, (kind, fields, answer)
        fresh = {"service_id": service, "resource_name": "new", amount: 5, **({} if amount[0] == "d" else project)}
        assert (await admin.request("POST", f"/{kind}", {kind: [fresh, wanted]})).status in (status, 403)
    for kind in ("registered_limits", "limits"):
        assert (await admin.request("POST", f"/{kind}", {kind: []})).status == 400
    assert (await admin.get("/registered_limits"))["registered_limits"] == [default, second], "all or none"
    assert len((await admin.get("/limits"))["limits"]) == 1
    taken = {"registered_limit": {"resource_name": "servers"}}
    assert (await admin.request("PATCH", f"/registered_limits/{second['id']}", taken)).status == 409
    assert (await admin.request("PATCH", f"/limits/{second['id']}", {"limit": {"project_id": "x"}})).status == 400


async def test_limits_go_with_their_project_and_domain(cloud: Cloud) -> None:
    admin = await cloud.admin()
    service = await compute(admin)
    await register(admin, service, region_id="RegionOne")
    in_region = {"region_id": "RegionOne"}
    domain = await admin.make("/domains", name="d")
    inside = await admin.make("/projects", name="inside", domain_id=domain["id"])
    project = await admin.make("/projects", name="p")
    of_domain = await limit(admin, service, **in_region, project_id=domain["id"])
    assert (of_domain["project_id"], of_domain["domain_id"]) == (None, domain["id"]), "a domain is a project, too"
    await limit(admin, service, **in_region, project_id=inside["id"])
    await limit(admin, service, **in_region, project_id=project["id"])
    for path in (f"/services/{service}", "/regions/RegionOne"):
        answer = await admin.request("DELETE", path)
        assert answer.status == 403, "they have limits"
    await admin.do("DELETE", f"/projects/{project['id']}")
    assert len((await admin.get("/limits"))["limits"]) == 2
    await admin.do("PATCH", f"/domains/{domain['id']}", {"domain": {"enabled": False}}, 200)
    await admin.do("DELETE", f"/domains/{domain['id']}")
    assert (await admin.get("/limits"))["limits"] == []
