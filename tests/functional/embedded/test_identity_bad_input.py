"""Bad input is refused with a message that names what is wrong, and never with a 5xx, on both databases."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.unit.embedded.identity.harness import Caller, Cloud, cloud_at, sqlite_at

LONG = "x" * 256
NUL = "a\x00b"
USER = {"user": {"name": "u", "domain": {"id": "default"}, "password": "p"}}


def password(**user: Any) -> dict[str, Any]:
    return {"auth": {"identity": {"methods": ["password"], "password": {"user": user}}}}


def scoped(scope: Any) -> dict[str, Any]:
    return {"auth": {"identity": {"methods": ["password"], "password": USER}, "scope": scope}}


# Method, path ({p} is a project, {u} the caller, {r} a role), body, what the message must contain.
BODIES: list[tuple[str, str, Any, str]] = [
    ("POST", "/auth/tokens", None, "body"),
    ("POST", "/auth/tokens", [], "body"),
    ("POST", "/auth/tokens", "auth", "body"),
    ("POST", "/auth/tokens", {}, "auth"),
    ("POST", "/auth/tokens", {"auth": None}, "auth"),
    ("POST", "/auth/tokens", {"auth": {}}, "identity"),
    ("POST", "/auth/tokens", {"auth": {"identity": {}}}, "methods"),
    ("POST", "/auth/tokens", {"auth": {"identity": {"methods": "password"}}}, "methods"),
    ("POST", "/auth/tokens", {"auth": {"identity": {"methods": [1]}}}, "methods"),
    ("POST", "/auth/tokens", {"auth": {"identity": {"methods": ["password"]}}}, "password"),
    ("POST", "/auth/tokens", {"auth": {"identity": {"methods": ["password"], "password": {}}}}, "user"),
    ("POST", "/auth/tokens", {"auth": {"identity": {"methods": ["token"], "token": {}}}}, "token"),
    ("POST", "/auth/tokens", {"auth": {"identity": {"methods": ["token"], "token": {"id": 1}}}}, "token.id"),
    ("POST", "/auth/tokens", password(), "user"),
    ("POST", "/auth/tokens", password(name="u", password="p"), "domain"),
    ("POST", "/auth/tokens", password(name="u", domain={}, password="p"), "domain"),
    ("POST", "/auth/tokens", password(id="u", password=5), "password"),
    ("POST", "/auth/tokens", password(id=5, password="p"), "id"),
    ("POST", "/auth/tokens", password(id=NUL, password="p"), "U+0000"),
    ("POST", "/auth/tokens", password(name=NUL, domain={"id": "default"}, password="p"), "U+0000"),
    (
        "POST",
        "/auth/tokens",
        {"auth": {"identity": {"methods": ["application_credential"], "application_credential": {"secret": "x"}}}},
        "application_credential",
    ),
    ("POST", "/auth/tokens", scoped(5), "scope"),
    ("POST", "/auth/tokens", scoped("everything"), "scope"),
    ("POST", "/auth/tokens", scoped({"OS-TRUST:trust": {"id": 5}}), "OS-TRUST:trust"),
    ("POST", "/auth/tokens", scoped({"project": "p"}), "project"),
    ("POST", "/auth/tokens", scoped({"system": {"all": "yes"}}), "system"),
    ("POST", "/projects", None, "body"),
    ("POST", "/projects", {}, "project"),
    ("POST", "/projects", {"project": None}, "project"),
    ("POST", "/projects", {"project": []}, "project"),
    ("POST", "/projects", {"project": {}}, "name"),
    ("POST", "/projects", {"project": {"name": ""}}, "project.name"),
    ("POST", "/projects", {"project": {"name": "   "}}, "project.name"),
    ("POST", "/projects", {"project": {"name": 5}}, "project.name"),
    ("POST", "/projects", {"project": {"name": "x" * 65}}, "project.name"),
    ("POST", "/projects", {"project": {"name": NUL}}, "U+0000"),
    ("POST", "/projects", {"project": {"name": "n", "enabled": "yes"}}, "project.enabled"),
    ("POST", "/projects", {"project": {"name": "n", "enabled": 1}}, "project.enabled"),
    ("POST", "/projects", {"project": {"name": "n", "description": 1}}, "project.description"),
    ("POST", "/projects", {"project": {"name": "n", "domain_id": "nowhere"}}, "domain_id"),
    ("POST", "/projects", {"project": {"name": "n", "domain_id": 7}}, "project.domain_id"),
    ("POST", "/projects", {"project": {"name": "n", "parent_id": "nothing"}}, "parent_id"),
    ("POST", "/projects", {"project": {"name": "n", "is_domain": True, "domain_id": "default"}}, "is_domain"),
    ("POST", "/projects", {"project": {"name": "n", "is_domain": True, "parent_id": "default"}}, "is_domain"),
    ("POST", "/projects", {"project": {"name": "n", "tags": "t"}}, "project.tags"),
    ("POST", "/projects", {"project": {"name": "n", "tags": ["a", "a"]}}, "tags"),
    ("POST", "/projects", {"project": {"name": "n", "tags": ["a,b"]}}, "project.tags"),
    ("POST", "/projects", {"project": {"name": "n", "tags": [f"t{n}" for n in range(81)]}}, "project.tags"),
    ("POST", "/projects", {"project": {"name": "n", "options": {"zork": 1}}}, "zork"),
    ("POST", "/projects", {"project": {"name": "n", "options": {"immutable": "x"}}}, "immutable"),
    ("PATCH", "/projects/{p}", {"project": {}}, "project"),
    ("PATCH", "/projects/{p}", {"project": {"name": None}}, "project.name"),
    ("PATCH", "/projects/{p}", {"project": {"enabled": None}}, "project.enabled"),
    ("PATCH", "/projects/{p}", {"project": {"is_domain": True}}, "is_domain"),
    ("PUT", "/projects/{p}/tags", {}, "tags"),
    ("PUT", "/projects/{p}/tags", {"tags": [""]}, "tags"),
    ("PUT", "/projects/{p}/tags", {"tags": ["a"], "more": 1}, "more"),
    ("PUT", "/projects/{p}/tags", {"tags": [5]}, "tags"),
    ("POST", "/domains", {"domain": {}}, "name"),
    ("POST", "/domains", {"domain": {"name": ["x"]}}, "domain.name"),
    ("POST", "/domains", {"domain": {"name": "d", "enabled": None}}, "domain.enabled"),
    ("PATCH", "/domains/default", {"domain": {}}, "domain"),
    ("PATCH", "/domains/default", {"domain": {"enabled": "no"}}, "domain.enabled"),
    ("POST", "/users", {"user": {}}, "name"),
    ("POST", "/users", {"user": {"name": LONG}}, "user.name"),
    ("POST", "/users", {"user": {"name": "n", "password": 5}}, "user.password"),
    ("POST", "/users", {"user": {"name": "n", "password": ""}}, "user.password"),
    ("POST", "/users", {"user": {"name": "n", "password": "x" * 5000}}, "user.password"),
    ("POST", "/users", {"user": {"name": "n", "enabled": "false"}}, "user.enabled"),
    ("POST", "/users", {"user": {"name": "n", "options": {"zork": True}}}, "zork"),
    ("POST", "/users", {"user": {"name": "n", "options": {"multi_factor_auth_enabled": True}}}, "multi_factor"),
    ("POST", "/users", {"user": {"name": "n", "default_project_id": "x" * 65}}, "user.default_project_id"),
    ("PATCH", "/users/{u}", {"user": {}}, "user"),
    ("PATCH", "/users/{u}", {"user": {"name": ""}}, "user.name"),
    ("POST", "/users/{u}/password", {"user": {"password": "x"}}, "original_password"),
    ("POST", "/users/{u}/password", {"user": {"password": "", "original_password": "x"}}, "password"),
    ("POST", "/users/{u}/password", {"user": {"password": "x", "original_password": "x", "y": 1}}, "y"),
    ("POST", "/groups", {"group": {}}, "name"),
    ("POST", "/groups", {"group": {"name": None}}, "group.name"),
    ("POST", "/groups", {"group": {"name": "g", "description": {}}}, "group.description"),
    ("POST", "/roles", {"role": {}}, "name"),
    ("POST", "/roles", {"role": {"name": LONG}}, "role.name"),
    ("POST", "/roles", {"role": {"name": "r", "domain_id": "nowhere"}}, "domain_id"),
    ("PATCH", "/roles/{r}", {"role": {}}, "role"),
    ("POST", "/regions", {"region": {"id": "a/b"}}, "region.id"),
    ("POST", "/regions", {"region": {"id": LONG}}, "region.id"),
    ("PUT", "/regions/here", {"region": {"id": "there"}}, "region.id"),
    ("POST", "/services", {"service": {"name": "n"}}, "type"),
    ("POST", "/services", {"service": {"type": ""}}, "service.type"),
    ("POST", "/services", {"service": {"type": "t", "enabled": "x"}}, "service.enabled"),
    ("POST", "/endpoints", {"endpoint": {"interface": "public", "url": "http://x"}}, "service_id"),
    ("POST", "/endpoints", {"endpoint": {"service_id": "s", "url": "http://x", "interface": "zork"}}, "interface"),
    ("POST", "/endpoints", {"endpoint": {"service_id": "s", "url": "zork", "interface": "public"}}, "endpoint.url"),
    ("POST", "/endpoints", {"endpoint": {"service_id": "s", "url": "http://x", "interface": "public"}}, "service_id"),
    ("POST", "/users/{u}/application_credentials", {"application_credential": {}}, "name"),
    ("POST", "/users/{u}/application_credentials", {"application_credential": {"name": "a", "zork": 1}}, "zork"),
    ("POST", "/users/{u}/application_credentials", {"application_credential": {"name": "a", "roles": [{}]}}, "roles"),
    ("POST", "/users/{u}/application_credentials", {"application_credential": {"name": "a", "roles": ["r"]}}, "roles"),
    (
        "POST",
        "/users/{u}/application_credentials",
        {"application_credential": {"name": "a", "roles": [{"name": "service"}]}},
        "roles",
    ),
    (
        "POST",
        "/users/{u}/application_credentials",
        {"application_credential": {"name": "a", "expires_at": "soon"}},
        "expires_at",
    ),
    (
        "POST",
        "/users/{u}/application_credentials",
        {"application_credential": {"name": "a", "expires_at": "2001-01-01T00:00:00"}},
        "expires_at",
    ),
    (
        "POST",
        "/users/{u}/application_credentials",
        {"application_credential": {"name": "a", "access_rules": [{"method": "get", "path": "/", "service": "c"}]}},
        "access_rules",
    ),
]

RAW = {
    "not JSON": b"{",
    "an empty object twice": b"{}{}",
    "invalid UTF-8": b'{"project": {"name": "\xff\xfe"}}',
    "half a character": b'{"project": {"name": "\\ud800"}}',
    "nested deeply": b'{"project": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a deep extra attribute": b'{"project": {"name": "n", "x": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}}",
    "a number": b"5",
    "null": b"null",
    "NaN": b'{"project": {"name": "n", "x": NaN}}',
    "a body of 200 kB": b'{"project": {"name": "' + b"x" * 200_000 + b'"}}',
}

QUERIES = [
    "/projects?enabled=perhaps",
    "/projects?is_domain=perhaps",
    "/projects?limit=none",
    "/projects?name=%00",
    "/projects?%00=1",
    "/projects?name=%ff",
    "/users?enabled=2",
    "/users?marker=nobody",
    "/groups?limit=-5",
    "/endpoints?interface=zork",
    "/role_assignments?effective=perhaps",
    "/role_assignments?user.id=a&group.id=b",
    "/OS-REVOKE/events?since=yesterday",
    "/projects/%00",
    "/users/%00/projects",
    "/projects/{p}/tags/%00",
    "/nothing",
    "/projects/{p}/nothing",
]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str | None]:
    if request.param == "sqlite":
        return sqlite_at(tmp_path_factory.mktemp("identity")), None
    return request.getfixturevalue("module_database_url"), f"t{uuid.uuid4().hex}"


@pytest.fixture
async def cloud(url: tuple[str, str | None]) -> AsyncIterator[Cloud]:
    async with cloud_at(url[0], schema=url[1]) as running:
        yield running


async def send(cloud: Cloud, caller: Caller, role: str, method: str, path: str, **what: Any) -> Any:
    filled = path.format(p=caller.project_id, u=caller.user_id, r=role)
    return await cloud.request(method, filled, token=caller.token, **what)


async def test_bad_bodies(cloud: Cloud) -> None:
    """One service for all bodies: it works after each of them."""
    assert len(BODIES) > 90
    admin = await cloud.admin()
    role = (await admin.make("/roles", name=uuid.uuid4().hex))["id"]
    wrong = []
    for method, path, body, named in BODIES:
        answer = await send(cloud, admin, role, method, path, body=body)
        message = answer.json()["error"]["message"] if answer.body else ""
        if answer.status != 400 or named not in message:
            wrong.append((method, path, body, answer.status, message, named))
    assert not wrong
    assert (await admin.get("/projects?name=n"))["projects"] == []
    await cloud.admin()


async def test_bodies_that_are_not_json(cloud: Cloud) -> None:
    admin = await cloud.admin()
    for name, raw in RAW.items():
        answer = await cloud.request("POST", "/projects", raw=raw, token=admin.token)
        assert answer.status in (400, 413), (name, answer)
        assert answer.json()["error"]["message"]
    answer = await cloud.request("POST", "/projects", raw=b"<a/>", token=admin.token, content_type="application/xml")
    assert answer.status == 415


async def test_bad_queries_and_paths(cloud: Cloud) -> None:
    admin = await cloud.admin()
    for path in QUERIES:
        answer = await send(cloud, admin, "", "GET", path)
        assert 400 <= answer.status < 500, (path, answer)
        assert answer.json()["error"]["code"] == answer.status


async def test_wrong_methods(cloud: Cloud) -> None:
    admin = await cloud.admin()
    for method, path in (("PUT", "/projects"), ("DELETE", "/users"), ("PATCH", "/auth/tokens"), ("PUT", "/limits")):
        answer = await cloud.request(method, path, {}, token=admin.token)
        assert answer.status == 405 and answer.json()["error"]["title"] == "Method Not Allowed"


async def test_strange_tokens(cloud: Cloud) -> None:
    good = (await cloud.admin()).token or ""
    for token in ("x", "mn1.", "mn1.====", "mn1." + "A" * 9000, good[:-1], good + "A", good.upper(), "gAAAAABq", "a b"):
        assert (await cloud.request("GET", "/projects", token=token)).status == 401, token


async def test_unusual_but_valid_input(cloud: Cloud) -> None:
    """Unicode, quotes and wildcards are data."""
    admin = await cloud.admin()
    for name in ("Zoë's ☕", "100%", "a'; DROP TABLE users; --", "../../x", "名前", "\\", '"', "a\nb"):
        project = await admin.make("/projects", name=name, note={"deep": [1, None, {"x": name}]})
        assert (await admin.get(f"/projects/{project['id']}"))["project"]["name"] == name
        await admin.do("PUT", f"/projects/{project['id']}/tags/%E2%98%95%0D%0Ax", status=201)
        await admin.do("DELETE", f"/projects/{project['id']}")


async def test_a_client_cannot_set_the_attributes_of_the_service(cloud: Cloud) -> None:
    admin = await cloud.admin()
    forged = {
        "id": "mine",
        "links": {"self": "x"},
        "password_hash": "x",
        "created_at": 1,
        "is_domain": False,
        "extra": 1,
    }
    project = await admin.make("/projects", name=uuid.uuid4().hex, **forged)
    assert project["id"] != "mine" and project["links"] != {"self": "x"} and "extra" not in project
    user = await admin.make("/users", name=uuid.uuid4().hex, **forged, password_expires_at="never")
    assert user["id"] != "mine" and user["password_expires_at"] is None and "password_hash" not in user


async def test_concurrent_creates_create_one(cloud: Cloud) -> None:
    """Of many requests for the same name, one succeeds and all others get a conflict."""
    admin = await cloud.admin()
    name = uuid.uuid4().hex

    async def race(path: str, key: str) -> list[int]:
        answers = await asyncio.gather(*(admin.request("POST", path, {key: {"name": name}}) for _ in range(20)))
        return sorted(answer.status for answer in answers)

    for path, key in (("/projects", "project"), ("/users", "user"), ("/groups", "group"), ("/roles", "role")):
        assert await race(path, key) == [201] + [409] * 19
    user = (await admin.get(f"/users?name={name}"))["users"][0]["id"]
    role = (await admin.get(f"/roles?name={name}"))["roles"][0]["id"]
    grant = f"/projects/{admin.project_id}/users/{user}/roles/{role}"
    answers = await asyncio.gather(*(admin.request("PUT", grant) for _ in range(20)))
    assert {answer.status for answer in answers} == {204}
    answers = await asyncio.gather(*(admin.request("DELETE", grant) for _ in range(20)))
    assert sorted(answer.status for answer in answers) == [204] + [404] * 19
