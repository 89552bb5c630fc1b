"""Domains, projects, users, groups, roles, grants and the catalog, on both databases."""

import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.embedded.identity.harness import Caller, Cloud, cloud_at, sqlite_at


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cloud]:
    if request.param == "sqlite":
        running = cloud_at(sqlite_at(tmp_path))
    else:
        url = request.getfixturevalue("database_url")
        running = cloud_at(url, schema=f"t{uuid.uuid4().hex}")
    async with running as started:
        yield started


@pytest.fixture
async def admin(cloud: Cloud) -> Caller:
    return await cloud.admin()


def names(listed: dict[str, Any]) -> list[str]:
    """Return the names in a collection."""
    [key] = [key for key in listed if key not in ("links", "truncated")]
    return [item["name"] for item in listed[key]]


async def roles_of(admin: Caller) -> dict[str, str]:
    return {role["name"]: role["id"] for role in (await admin.get("/roles"))["roles"]}


async def test_projects(admin: Caller) -> None:
    made = await admin.make("/projects", name="web", description="d", tags=["b", "a"], cost_centre="4711")
    assert made["domain_id"] == made["parent_id"] == "default" and made["enabled"] and not made["is_domain"]
    assert made["tags"] == ["a", "b"] and made["options"] == {} and made["cost_centre"] == "4711"
    path = f"/projects/{made['id']}"
    assert made["links"]["self"] == f"http://cloud.example/identity/v3{path}"
    assert (await admin.get(path))["project"] == made
    changed = await admin.do("PATCH", path, {"project": {"name": "web2", "owner": "me", "tags": ["c"]}}, 200)
    assert changed["project"] == {**made, "name": "web2", "owner": "me", "tags": ["c"]}
    assert (await admin.request("POST", "/projects", {"project": {"name": "web2"}})).status == 409
    assert (await admin.request("PATCH", path, {"project": {"name": "demo"}})).status == 409
    assert (await admin.request("PATCH", path, {"project": {"domain_id": "other"}})).status == 400
    assert (await admin.request("PATCH", path, {"project": {"parent_id": "other"}})).status == 403
    await admin.do("DELETE", path)
    assert (await admin.request("GET", path)).status == 404
    assert (await admin.request("DELETE", path)).status == 404


async def test_lists_filters_and_pages(admin: Caller) -> None:
    for number in range(5):
        await admin.make("/projects", name=f"Page {number}", enabled=number % 2 == 0)
    everything = names(await admin.get("/projects?name__startswith=page"))
    assert everything == [f"Page {number}" for number in range(5)], "in the order in which they were created"
    assert names(await admin.get("/projects?name=Page%203")) == ["Page 3"]
    assert names(await admin.get("/projects?name__contains=GE%204&domain_id=default")) == ["Page 4"]
    assert names(await admin.get("/projects?name__contains=%25")) == [], "a percent sign is no wildcard"
    assert names(await admin.get("/projects?name__istartswith=PAGE&enabled=false")) == ["Page 1", "Page 3"]
    assert names(await admin.get("/projects?domain_id=nowhere")) == []
    assert names(await admin.get("/projects?is_domain=true")) == ["Default"]
    found: list[str] = []
    link: str | None = "/projects?name__startswith=page&limit=2"
    while link:
        page = await admin.get(link)
        found += names(page)
        assert page["links"]["previous"] is None
        link = page["links"]["next"]
        link = link.removeprefix("http://cloud.example/identity/v3") if link else None
    assert found == everything
    assert (await admin.request("GET", "/projects?limit=2&marker=none")).status == 404
    for bad in ("limit=x", "limit=0", "limit=-1", "limit=1e3", "enabled=maybe", "limit=%D9%A1"):
        assert (await admin.request("GET", f"/projects?{bad}")).status == 400, bad


async def test_a_tree_of_projects(cloud: Cloud, admin: Caller) -> None:
    top = await admin.make("/projects", name="top")
    left = await admin.make("/projects", name="left", parent_id=top["id"], tags=["b", "a"])
    right = await admin.make("/projects", name="right", parent_id=top["id"])
    leaf = await admin.make("/projects", name="leaf", parent_id=left["id"])
    assert leaf["domain_id"] == "default"
    assert names(await admin.get(f"/projects?parent_id={top['id']}")) == ["left", "right"]
    shown = (await admin.get(f"/projects/{leaf['id']}?parents_as_ids"))["project"]
    assert shown["parents"] == {left["id"]: {top["id"]: {"default": None}}}
    shown = (await admin.get(f"/projects/{top['id']}?subtree_as_ids"))["project"]
    assert shown["subtree"] == {left["id"]: {leaf["id"]: None}, right["id"]: None}
    shown = (await admin.get(f"/projects/{top['id']}?subtree_as_list"))["project"]
    assert [each["project"]["name"] for each in shown["subtree"]] == ["left", "right", "leaf"]
    assert [each["project"]["tags"] for each in shown["subtree"]] == [["a", "b"], [], []]
    shown = (await admin.get(f"/projects/{leaf['id']}?parents_as_list"))["project"]
    assert [each["project"]["name"] for each in shown["parents"]] == ["left", "top"]
    assert [each["project"]["tags"] for each in shown["parents"]] == [["a", "b"], []]
    assert (await admin.request("GET", f"/projects/{top['id']}?subtree_as_list&subtree_as_ids")).status == 400
    assert (await admin.request("DELETE", f"/projects/{top['id']}")).status == 403
    assert (await admin.request("PATCH", f"/projects/{top['id']}", {"project": {"enabled": False}})).status == 403
    deep = leaf
    for _ in range(2):
        deep = await admin.make("/projects", name=uuid.uuid4().hex, parent_id=deep["id"])
    assert (await admin.request("POST", "/projects", {"project": {"name": "x", "parent_id": deep["id"]}})).status == 403
    # An inherited role applies to the projects below its target, not to the target.
    role = (await roles_of(admin))["member"]
    user = await admin.make("/users", name="alice", password="secret")
    grant = f"/OS-INHERIT/projects/{top['id']}/users/{user['id']}/roles"
    await admin.do("PUT", f"{grant}/{role}/inherited_to_projects")
    assert names(await admin.get(f"{grant}/inherited_to_projects")) == ["member"]
    assert (await cloud.login("alice", "secret", "leaf")).roles == {"member", "reader"}
    unscoped = await cloud.login("alice", "secret")
    assert {"left", "right", "leaf"} <= set(names(await unscoped.get("/auth/projects")))
    assert "top" not in names(await unscoped.get("/auth/projects"))
    effective = await admin.get(f"/role_assignments?effective&user.id={user['id']}&role.id={role}")
    assert len(effective["role_assignments"]) == 5
    assert effective["role_assignments"][0]["scope"]["OS-INHERIT:inherited_to"] == "projects"
    await admin.do("DELETE", f"{grant}/{role}/inherited_to_projects")
    assert names(await (await cloud.login("alice", "secret")).get("/auth/projects")) == []


async def test_tags(admin: Caller) -> None:
    project = await admin.make("/projects", name="tagged")
    path = f"/projects/{project['id']}/tags"
    await admin.do("PUT", f"{path}/one", status=201)
    assert (await admin.request("PUT", f"{path}/one")).status == 400
    assert (await admin.request("GET", f"{path}/one")).status == 204
    assert (await admin.request("GET", f"{path}/two")).status == 404
    assert (await admin.do("PUT", path, {"tags": ["z", "y"]}, 200))["tags"] == ["y", "z"]
    assert (await admin.get(path))["tags"] == ["y", "z"]
    await admin.make("/projects", name="other", tags=["z"])
    assert names(await admin.get("/projects?tags=y,z")) == ["tagged"]
    assert names(await admin.get("/projects?tags-any=y,z")) == ["tagged", "other"]
    assert names(await admin.get("/projects?tags-any=y,z&not-tags=y,z")) == ["other"]
    assert "other" not in names(await admin.get("/projects?not-tags-any=z"))
    await admin.do("DELETE", f"{path}/y")
    assert (await admin.request("DELETE", f"{path}/y")).status == 404
    await admin.do("DELETE", path)
    assert (await admin.get(path))["tags"] == []


async def test_immutable_resources_cannot_be_changed(admin: Caller) -> None:
    project = await admin.make("/projects", name="fixed", options={"immutable": True})
    path = f"/projects/{project['id']}"
    assert project["options"] == {"immutable": True}
    for method, body in (("PATCH", {"project": {"name": "x"}}), ("DELETE", None), ("PUT", {"tags": ["a"]})):
        where = f"{path}/tags" if method == "PUT" else path
        assert (await admin.request(method, where, body)).status == 403, method
    await admin.do("PATCH", path, {"project": {"options": {"immutable": None}}}, 200)
    await admin.do("DELETE", path)
    for name, role in (await roles_of(admin)).items():
        assert (await admin.request("DELETE", f"/roles/{role}")).status == 403, name
        assert (await admin.request("PATCH", f"/roles/{role}", {"role": {"name": "x"}})).status == 403, name


async def test_users(cloud: Cloud, admin: Caller) -> None:
    made = await admin.make("/users", name="alice", password="secret", email="a@b.c", default_project_id="x" * 32)
    assert made["email"] == "a@b.c" and made["default_project_id"] == "x" * 32 and made["enabled"]
    assert not {"password", "password_hash"} & set(made)
    path = f"/users/{made['id']}"
    assert (await admin.get(path))["user"] == made
    changed = await admin.do("PATCH", path, {"user": {"name": "alicia", "email": "x", "password": "new"}}, 200)
    assert changed["user"]["name"] == "alicia" and changed["user"]["email"] == "x"
    assert "password" not in changed["user"]
    await cloud.login("alicia", "new")
    assert names(await admin.get("/users?name=alicia&domain_id=default&enabled=true")) == ["alicia"]
    assert names(await admin.get("/users?name=alicia&enabled=false")) == []
    assert (await admin.request("POST", "/users", {"user": {"name": "alicia"}})).status == 409
    assert (await admin.request("PATCH", path, {"user": {"name": "admin"}})).status == 409
    assert (await admin.request("PATCH", path, {"user": {"domain_id": "other"}})).status == 400
    await admin.do("PATCH", path, {"user": {"password": None}}, 200)
    nothing = {"methods": ["password"], "password": {"user": {"id": made["id"], "password": ""}}}
    assert (await cloud.authenticate(nothing)).status == 401
    await admin.do("DELETE", path)
    assert (await admin.request("GET", path)).status == 404
    listed = (await admin.get("/users"))["users"]
    assert all(not {"password", "password_hash"} & set(user) for user in listed)


async def test_groups(cloud: Cloud, admin: Caller) -> None:
    group = await admin.make("/groups", name="team", description="d", floor=3)
    assert group["floor"] == 3
    user = await admin.make("/users", name="alice", password="secret")
    member = f"/groups/{group['id']}/users/{user['id']}"
    for _ in range(2):
        await admin.do("PUT", member)
    assert (await admin.request("HEAD", member)).status == 204
    assert (await admin.request("HEAD", f"/groups/{group['id']}/users/{admin.user_id}")).status == 404
    assert names(await admin.get(f"/groups/{group['id']}/users")) == ["alice"]
    assert names(await admin.get(f"/users/{user['id']}/groups")) == ["team"]
    roles = await roles_of(admin)
    project = await admin.make("/projects", name="work")
    await admin.do("PUT", f"/projects/{project['id']}/groups/{group['id']}/roles/{roles['manager']}")
    assert (await cloud.login("alice", "secret", "work")).roles == {"manager", "member", "reader"}
    assert names(await admin.get(f"/users/{user['id']}/projects")) == ["work"]
    await admin.do("PUT", f"/system/groups/{group['id']}/roles/{roles['reader']}")
    assert (await cloud.login("alice", "secret", scope={"system": {"all": True}})).roles == {"reader"}
    changed = await admin.do("PATCH", f"/groups/{group['id']}", {"group": {"name": "crew", "floor": 4}}, 200)
    assert changed["group"]["name"] == "crew" and changed["group"]["floor"] == 4
    await admin.do("DELETE", member)
    assert (await admin.request("DELETE", member)).status == 404
    await admin.do("PUT", member)
    await admin.do("DELETE", f"/groups/{group['id']}")
    assert names(await admin.get(f"/users/{user['id']}/projects")) == []
    for missing in (f"/groups/{'0' * 32}/users/{user['id']}", f"/groups/{group['id']}/users/{'0' * 32}"):
        assert (await admin.request("PUT", missing)).status == 404


async def test_domains(admin: Caller) -> None:
    domain = await admin.make("/domains", name="acme", description="d", country="CH")
    assert domain["country"] == "CH"
    path = f"/domains/{domain['id']}"
    assert names(await admin.get("/domains?name=acme")) == ["acme"]
    await admin.make("/projects", name="demo", domain_id=domain["id"])
    await admin.make("/users", name="demo", domain_id=domain["id"])
    assert (await admin.request("POST", "/domains", {"domain": {"name": "acme"}})).status == 409
    assert (await admin.request("DELETE", path)).status == 403, "it is enabled"
    changed = await admin.do("PATCH", path, {"domain": {"enabled": False, "tags": ["t"]}}, 200)
    assert changed["domain"]["enabled"] is False and changed["domain"]["tags"] == ["t"]
    await admin.do("DELETE", path)
    assert (await admin.request("GET", path)).status == 404
    assert names(await admin.get(f"/projects?domain_id={domain['id']}")) == []
    assert (await admin.request("DELETE", "/domains/default")).status == 403


async def test_grants(admin: Caller) -> None:
    roles = await roles_of(admin)
    user = await admin.make("/users", name="alice")
    project = await admin.make("/projects", name="work")
    for place in (f"/projects/{project['id']}", "/domains/default", "/system"):
        path = f"{place}/users/{user['id']}/roles"
        one = f"{path}/{roles['member']}"
        assert (await admin.request("GET", one)).status == 404
        for _ in range(2):
            await admin.do("PUT", one)
        assert (await admin.request("GET", one)).status == 204
        assert (await admin.request("HEAD", one)).status == 204
        assert names(await admin.get(path)) == ["member"]
        await admin.do("DELETE", one)
        assert (await admin.request("DELETE", one)).status == 404
        for missing in (f"{path}/{'0' * 32}", f"{place}/users/{'0' * 32}/roles/{roles['member']}"):
            assert (await admin.request("PUT", missing)).status == 404
    assert (await admin.request("PUT", f"/projects/nope/users/{user['id']}/roles/{roles['member']}")).status == 404


async def test_role_assignments(admin: Caller) -> None:
    roles = await roles_of(admin)
    user, group = await admin.make("/users", name="alice"), await admin.make("/groups", name="team")
    project = await admin.make("/projects", name="work")
    await admin.do("PUT", f"/groups/{group['id']}/users/{user['id']}")
    await admin.do("PUT", f"/projects/{project['id']}/groups/{group['id']}/roles/{roles['member']}")
    await admin.do("PUT", f"/domains/default/users/{user['id']}/roles/{roles['reader']}")

    async def listed(query: str) -> list[dict[str, Any]]:
        return list((await admin.get(f"/role_assignments?{query}"))["role_assignments"])

    [direct] = await listed(f"user.id={user['id']}")
    assert direct["scope"] == {"domain": {"id": "default"}} and direct["role"] == {"id": roles["reader"]}
    [named] = await listed(f"user.id={user['id']}&include_names=true")
    assert named["user"] == {"id": user["id"], "name": "alice", "domain": {"id": "default", "name": "Default"}}
    assert named["role"] == {"id": roles["reader"], "name": "reader"}
    assert named["scope"]["domain"] == {"id": "default", "name": "Default"}
    [of_group] = await listed(f"group.id={group['id']}")
    assert of_group["group"] == {"id": group["id"]}
    effective = await listed(f"effective&scope.project.id={project['id']}")
    assert {each["role"]["id"] for each in effective} == {roles["member"], roles["reader"]}
    assert all(each["user"]["id"] == user["id"] for each in effective)
    assert all("membership" in each["links"] for each in effective)
    [implied] = [each for each in effective if each["role"]["id"] == roles["reader"]]
    assert implied["links"]["prior_role"].endswith(roles["member"])
    assert len(await listed("scope.system=all")) == 1
    assert await listed("user.id=nobody") == []
    assert await listed("effective=0&user.id=nobody") == []
    child = await admin.make("/projects", name="child", parent_id=project["id"])
    await admin.do("PUT", f"/projects/{child['id']}/users/{user['id']}/roles/{roles['reader']}")
    assert len(await listed(f"scope.project.id={project['id']}&include_subtree=true")) == 2
    for bad in (
        f"user.id={user['id']}&group.id={group['id']}",
        f"scope.project.id={project['id']}&scope.domain.id=default",
        f"effective&group.id={group['id']}",
        "include_subtree",
        "effective=perhaps",
    ):
        assert (await admin.request("GET", f"/role_assignments?{bad}")).status == 400, bad


async def test_a_domain_in_the_form_of_a_project(cloud: Cloud, admin: Caller) -> None:
    made = await admin.make("/projects", name="as-project", is_domain=True, domain_id=None, tags=["b", "a"])
    assert made["is_domain"] and made["domain_id"] is None and made["parent_id"] is None
    path = f"/projects/{made['id']}"
    assert (await admin.get(path))["project"] == made
    assert (await admin.get(f"/domains/{made['id']}"))["domain"]["name"] == "as-project"
    assert made["tags"] == ["a", "b"] and made in (await admin.get("/projects?is_domain=true"))["projects"]
    member = await cloud.member(admin, "alice")
    body = {"project": {"name": "x", "is_domain": True}}
    assert (await member.request("POST", "/projects", body)).status == 403
    for method, change in (("PATCH", {"project": {"enabled": False}}), ("DELETE", None)):
        assert (await member.request(method, path, change)).status == 403
    assert (await admin.request("DELETE", path)).status == 403, "it is enabled"
    changed = (await admin.do("PATCH", path, {"project": {"enabled": False, "description": "d"}}, 200))["project"]
    assert changed == {**made, "enabled": False, "description": "d"}
    assert (await admin.request("PATCH", path, {"project": {"parent_id": "default"}})).status == 400
    await admin.do("DELETE", path)
    assert (await admin.request("GET", f"/domains/{made['id']}")).status == 404


async def test_roles_of_domains(admin: Caller) -> None:
    """They imply other roles across domains, and no token has them: only what they imply is effective."""
    one, two = await admin.make("/domains", name="one"), await admin.make("/domains", name="two")
    role = await admin.make("/roles", name="r1", domain_id=one["id"])
    other = await admin.make("/roles", name="r2", domain_id=two["id"])
    reader = (await admin.get("/roles?name=reader"))["roles"][0]["id"]
    await admin.do("PUT", f"/roles/{role['id']}/implies/{other['id']}", status=201)
    assert (await admin.request("PUT", f"/roles/{reader}/implies/{role['id']}")).status == 403
    project = await admin.make("/projects", name="p", domain_id=one["id"])
    user = await admin.make("/users", name="u", domain_id=one["id"])
    await admin.do("PUT", f"/projects/{project['id']}/users/{user['id']}/roles/{role['id']}")
    query = f"/role_assignments?scope.project.id={project['id']}&user.id={user['id']}"
    assert len((await admin.get(query))["role_assignments"]) == 1
    assert (await admin.get(f"{query}&effective"))["role_assignments"] == []
    await admin.do("PUT", f"/roles/{other['id']}/implies/{reader}", status=201)
    [effective] = (await admin.get(f"{query}&effective"))["role_assignments"]
    assert effective["role"]["id"] == reader


async def test_roles_and_implied_roles(admin: Caller) -> None:
    roles = await roles_of(admin)
    assert set(roles) == {"admin", "manager", "member", "reader", "service"}
    role = await admin.make("/roles", name="auditor", description="d")
    local = await admin.make("/roles", name="auditor", domain_id="default")
    assert local["domain_id"] == "default" and role["domain_id"] is None
    assert names(await admin.get("/roles?domain_id=default")) == ["auditor"]
    assert (await admin.request("POST", "/roles", {"role": {"name": "auditor"}})).status == 409
    implies = f"/roles/{role['id']}/implies"
    made = await admin.do("PUT", f"{implies}/{roles['reader']}", status=201)
    assert made["role_inference"]["implies"]["name"] == "reader"
    assert (await admin.request("HEAD", f"{implies}/{roles['reader']}")).status == 204
    assert (await admin.request("GET", f"{implies}/{roles['member']}")).status == 404
    listed = (await admin.get(implies))["role_inference"]
    assert [each["name"] for each in listed["implies"]] == ["reader"]
    assert (await admin.request("PUT", f"{implies}/{roles['admin']}")).status == 403
    assert (await admin.request("PUT", f"/roles/{roles['reader']}/implies/{role['id']}")).status == 403, "a circle"
    assert (await admin.request("PUT", f"{implies}/{local['id']}")).status == 403
    everything = (await admin.get("/role_inferences"))["role_inferences"]
    assert {(each["prior_role"]["name"], each["implies"][0]["name"]) for each in everything} == {
        ("admin", "manager"),
        ("manager", "member"),
        ("member", "reader"),
        ("auditor", "reader"),
    }
    await admin.do("DELETE", f"{implies}/{roles['reader']}")
    changed = await admin.do("PATCH", f"/roles/{role['id']}", {"role": {"name": "inspector"}}, 200)
    assert changed["role"]["name"] == "inspector"
    await admin.do("DELETE", f"/roles/{role['id']}")
    assert (await admin.request("GET", f"/roles/{role['id']}")).status == 404


async def test_the_catalog(cloud: Cloud, admin: Caller) -> None:
    region = await admin.make("/regions", id="Mars", description="far", parent_region_id="RegionOne")
    assert region["id"] == "Mars"
    assert (await admin.request("POST", "/regions", {"region": {"id": "Mars"}})).status == 409
    await admin.do("PUT", "/regions/Venus", {"region": {"description": "hot"}}, 201)
    await admin.do("PATCH", "/regions/Venus", {"region": {"description": "", "mass": 1}}, 200)
    assert (await admin.get("/regions/Venus"))["region"]["mass"] == 1
    assert [each["id"] for each in (await admin.get("/regions?parent_region_id=RegionOne"))["regions"]] == ["Mars"]
    circle = {"region": {"parent_region_id": "Mars"}}
    assert (await admin.request("PATCH", "/regions/RegionOne", circle)).status == 400
    service = await admin.make("/services", type="dns", name="designate", motto="m")
    endpoint = await admin.make(
        "/endpoints", service_id=service["id"], interface="public", url="http://dns/%(tenant_id)s", region_id="Mars"
    )
    assert (await admin.request("DELETE", "/regions/Mars")).status == 403
    assert (await admin.request("DELETE", "/regions/RegionOne")).status == 403

    async def in_catalog() -> list[str]:
        caller = await cloud.admin()
        found = [entry for entry in caller.body["catalog"] if entry["type"] == "dns"]
        return [each["url"] for entry in found for each in entry["endpoints"]]

    assert await in_catalog() == [f"http://dns/{admin.project_id}"]
    path = f"/endpoints/{endpoint['id']}"
    await admin.do("PATCH", path, {"endpoint": {"enabled": False}}, 200)
    assert await in_catalog() == []
    await admin.do("PATCH", path, {"endpoint": {"enabled": True, "url": "http://new/"}}, 200)
    assert await in_catalog() == ["http://new/"]
    for url in ("%(public_url)s/dns/$(user_id)s", "$(public_url)s/dns/%(user_id)s"):
        await admin.do("PATCH", path, {"endpoint": {"url": url}}, 200)
        assert await in_catalog() == [f"http://cloud.example/dns/{admin.user_id}"]
        assert (await admin.get(path))["endpoint"]["url"].startswith("http://cloud.example/dns/")
    for unfilled in ("$(project_id)", "%(project_id)", "$(zork)s", "%(user-id)s", "$(project_id"):
        refused = await admin.request("PATCH", path, {"endpoint": {"url": f"http://new/{unfilled}"}})
        assert refused.status == 400 and unfilled in refused.json()["error"]["message"], unfilled
    assert names(await admin.get("/services?type=dns")) == ["designate"]
    listed = (await admin.get(f"/endpoints?service_id={service['id']}&interface=public&region_id=Mars"))["endpoints"]
    assert [each["id"] for each in listed] == [endpoint["id"]]
    made = await admin.make("/endpoints", service_id=service["id"], interface="admin", url="http://x", region="New")
    assert made["region_id"] == "New" and (await admin.request("GET", "/regions/New")).status == 200
    await admin.do("PATCH", f"/services/{service['id']}", {"service": {"enabled": False}}, 200)
    assert await in_catalog() == []
    await admin.do("DELETE", path)
    await admin.do("DELETE", f"/services/{service['id']}")
    await admin.do("DELETE", "/regions/Mars")
    assert (await admin.request("GET", path)).status == 404


async def test_a_domain_manager_manages_only_its_domain(cloud: Cloud, admin: Caller) -> None:
    roles = await roles_of(admin)
    domain = await admin.make("/domains", name="acme")
    boss = await admin.make("/users", name="boss", password="secret", domain_id=domain["id"])
    await admin.do("PUT", f"/domains/{domain['id']}/users/{boss['id']}/roles/{roles['manager']}")
    identity = {"methods": ["password"], "password": {"user": {"id": boss["id"], "password": "secret"}}}
    manager = cloud.caller(await cloud.authenticate(identity, {"domain": {"id": domain["id"]}}))
    project = await manager.make("/projects", name="inside")
    assert project["domain_id"] == domain["id"], "its own domain is the default"
    user = await manager.make("/users", name="worker", password="x")
    grant = f"/projects/{project['id']}/users/{user['id']}/roles"
    await manager.do("PUT", f"{grant}/{roles['member']}")
    assert (await manager.request("PUT", f"{grant}/{roles['admin']}")).status == 403, "not its to give"
    assert (await manager.request("PUT", f"/system/users/{user['id']}/roles/{roles['member']}")).status == 403
    assert names(await manager.get("/users")) == ["boss", "worker"], "lists contain only the domain"
    assert names(await manager.get("/projects")) == ["inside"]
    assert names(await manager.get("/domains")) == ["acme"]
    assignments = (await manager.get("/role_assignments?include_names"))["role_assignments"]
    assert {each["user"]["name"] for each in assignments} == {"boss", "worker"}
    demo = (await admin.get("/users?name=demo"))["users"][0]["id"]
    for method, path, body in (
        ("GET", f"/users/{demo}", None),
        ("PATCH", f"/users/{demo}", {"user": {"enabled": False}}),
        ("DELETE", f"/users/{demo}", None),
        ("GET", f"/projects/{admin.project_id}", None),
        ("DELETE", f"/projects/{admin.project_id}", None),
        ("POST", "/users", {"user": {"name": "spy", "domain_id": "default"}}),
        ("POST", "/projects", {"project": {"name": "spy", "domain_id": "default"}}),
        ("POST", "/domains", {"domain": {"name": "spy"}}),
        ("POST", "/roles", {"role": {"name": "spy"}}),
        ("GET", "/domains/default", None),
        ("PUT", f"/projects/{project['id']}/users/{demo}/roles/{roles['member']}", None),
        ("PUT", f"/projects/{admin.project_id}/users/{user['id']}/roles/{roles['member']}", None),
    ):
        assert (await manager.request(method, path, body)).status == 403, (method, path)
