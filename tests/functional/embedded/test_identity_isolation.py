"""Every route, called without a token, by a user of another project and by a reader; none is missing from the list."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.http.service import Route
from micronova.policies.identity import RULES
from tests.unit.embedded.identity.harness import Caller, Cloud, cloud_at, sqlite_at

# Routes that every user with a token may call: about itself, and about the catalog.
OPEN = {
    "identity:get_auth_catalog",
    "identity:get_auth_projects",
    "identity:get_auth_domains",
    "identity:get_auth_system",
    "identity:get_region",
    "identity:list_regions",
    "identity:list_limits",
    "identity:list_registered_limits",
    "identity:get_registered_limit",
    "identity:get_limit_model",
    "identity:list_credentials",
}
BODIES: dict[str, dict[str, Any]] = {
    "DomainBody": {"domain": {"name": "x"}},
    "ProjectBody": {"project": {"name": "x"}},
    "UserBody": {"user": {"name": "x"}},
    "GroupBody": {"group": {"name": "x"}},
    "RoleBody": {"role": {"name": "x"}},
    "RegionBody": {"region": {"description": "x"}},
    "ServiceBody": {"service": {"type": "x"}},
    "EndpointBody": {"endpoint": {"service_id": "x", "interface": "public", "url": "http://x"}},
    "TagsBody": {"tags": ["x"]},
    "ApplicationCredentialBody": {"application_credential": {"name": "x"}},
    "CredentialBody": {"credential": {"type": "cert", "blob": "x", "user_id": "USER"}},
    "CredentialChangesBody": {"credential": {"blob": "x"}},
    "RegisteredLimitsBody": {
        "registered_limits": [{"service_id": "x", "resource_name": "x", "default_limit": 1}],
    },
    "RegisteredLimitChangesBody": {"registered_limit": {"default_limit": 1}},
    "LimitsBody": {
        "limits": [{"service_id": "x", "resource_name": "x", "resource_limit": 1, "project_id": "x"}],
    },
    "LimitChangesBody": {"limit": {"resource_limit": 1}},
    "EC2Body": {"tenant_id": "x"},
    "EC2TokensBody": {"credentials": {"access": "x", "signature": "x"}},
    "TrustBody": {
        "trust": {"trustor_user_id": "x", "trustee_user_id": "x", "project_id": "x", "impersonation": True},
    },
}


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[Cloud]:
    async with cloud_at(sqlite_at(tmp_path)) as running:
        yield running


async def victim(cloud: Cloud, admin: Caller) -> dict[str, str]:
    """Create one resource of each kind, named SECRET, and return the ids for the paths."""
    domain = await admin.make("/domains", name="SECRET")
    where = {"domain_id": domain["id"]}
    project = await admin.make("/projects", name="SECRET", tags=["SECRET"], **where)
    user = await admin.make("/users", name="SECRET", password="secret", email="SECRET", **where)
    group = await admin.make("/groups", name="SECRET", **where)
    role, implied = await admin.make("/roles", name="SECRET"), await admin.make("/roles", name="SECRET2")
    await admin.do("PUT", f"/roles/{role['id']}/implies/{implied['id']}", status=201)
    await admin.do("PUT", f"/groups/{group['id']}/users/{user['id']}")
    for actor, key in (("users", user["id"]), ("groups", group["id"])):
        for place in (f"projects/{project['id']}", f"domains/{domain['id']}", "system"):
            await admin.do("PUT", f"/{place}/{actor}/{key}/roles/{role['id']}")
            if place != "system":
                await admin.do("PUT", f"/OS-INHERIT/{place}/{actor}/{key}/roles/{role['id']}/inherited_to_projects")
    [member] = (await admin.get("/roles?name=member"))["roles"]  # without it nobody creates credentials of EC2
    await admin.do("PUT", f"/projects/{project['id']}/users/{user['id']}/roles/{member['id']}")
    identity = {"methods": ["password"], "password": {"user": {"id": user["id"], "password": "secret"}}}
    owner = cloud.caller(await cloud.authenticate(identity, {"project": {"id": project["id"]}}))
    rule = {"service": "compute", "method": "GET", "path": "/SECRET"}
    credential = await owner.make(f"/users/{user['id']}/application_credentials", name="SECRET", access_rules=[rule])
    stored = await owner.make("/credentials", type="cert", blob="SECRET")
    ec2 = f"/users/{user['id']}/credentials/OS-EC2"
    access = (await owner.do("POST", ec2, {"tenant_id": project["id"]}, 201))["credential"]["access"]
    trust = await owner.make(
        "/OS-TRUST/trusts", trustor_user_id=user["id"], trustee_user_id=user["id"], project_id=project["id"],
        impersonation=True, roles=[{"id": role["id"]}],
    )  # fmt: skip
    service = await admin.make("/services", type="SECRET", name="SECRET")
    endpoint = await admin.make("/endpoints", service_id=service["id"], interface="internal", url="http://SECRET")
    of_resource = {"service_id": service["id"], "resource_name": "things"}
    registered = await admin.do(
        "POST", "/registered_limits", {"registered_limits": [{**of_resource, "default_limit": 1}]}, 201
    )
    limit = {**of_resource, "project_id": project["id"], "resource_limit": 1, "description": "a SECRET limit"}
    limits = await admin.do("POST", "/limits", {"limits": [limit]}, 201)
    return {
        "registered_limit_id": registered["registered_limits"][0]["id"],
        "limit_id": limits["limits"][0]["id"],
        "domain_id": domain["id"],
        "project_id": project["id"],
        "user_id": user["id"],
        "group_id": group["id"],
        "role_id": role["id"],
        "implied_id": implied["id"],
        "application_credential_id": credential["id"],
        "rule_id": credential["access_rules"][0]["id"],
        "credential_id": stored["id"],
        "trust_id": trust["id"],
        "access_key": access,
        "service_id": service["id"],
        "endpoint_id": endpoint["id"],
        "region_id": "RegionOne",
        "tag": "SECRET",
        "token": owner.token or "",
    }


def protected(cloud: Cloud) -> list[Route]:
    return [route for route in cloud.identity.service.routes if route.policy is not None]


async def call(cloud: Cloud, route: Route, ids: dict[str, str], token: str | None) -> Any:
    path = re.sub(r"\{(\w+)\}", lambda found: ids[found[1]], route.path)
    body = BODIES[route.body.__name__] if route.body else None
    return await cloud.request(route.method, path.removeprefix("/v3"), body, token=token, subject=ids["token"])


async def test_without_a_token(cloud: Cloud) -> None:
    ids = await victim(cloud, await cloud.admin())
    routes = protected(cloud)
    assert len(routes) > 100
    for route in routes:
        for token in (None, "forged"):
            answer = await call(cloud, route, ids, token)
            assert answer.status == 401, (route.label, answer)
            assert "SECRET" not in answer.body.decode()
            assert "keystone uri=" in answer.headers["www-authenticate"].lower()


@pytest.mark.parametrize("role", ["member", "reader", "manager", "service"])
async def test_as_a_stranger(cloud: Cloud, role: str) -> None:
    admin = await cloud.admin()
    ids = await victim(cloud, admin)
    stranger = await cloud.member(admin, "stranger", role)
    unscoped = await cloud.login("stranger", "secret")
    before = [(await admin.get(path)) for path in ("/users", "/projects", "/roles", "/role_assignments", "/domains")]
    allowed = set(OPEN)
    if role == "service":  # the services of the cloud check tokens and projects
        allowed |= {"identity:validate_token", "identity:get_project", "identity:list_revoke_events"}
    for route in protected(cloud):
        for caller in (stranger, unscoped):
            answer = await call(cloud, route, ids, caller.token)
            text = answer.body.decode()
            if role == "service" and caller is stranger and route.policy == "identity:ec2tokens_validate":
                assert answer.status == 404, "services ask about signatures"
                continue
            if route.policy in allowed:
                assert answer.status in (200, 403), (route.label, answer)
                sees_limits = role == "service" and caller is stranger and route.policy == "identity:list_limits"
                if route.policy in OPEN and not sees_limits:
                    assert "SECRET" not in text.replace("http://SECRET", "").replace('"SECRET"', ""), route.label
                continue
            assert answer.status == (404 if "{trust_id}" in route.path else 403), (route.label, answer)
            assert "SECRET" not in text, (route.label, text)
    after = [(await admin.get(path)) for path in ("/users", "/projects", "/roles", "/role_assignments", "/domains")]
    assert after == before
    assert (await admin.request("GET", "/auth/tokens", subject=ids["token"])).status == 200, "still valid"


async def test_a_reader_of_the_system_reads_everything_and_changes_nothing(cloud: Cloud) -> None:
    admin = await cloud.admin()
    ids = await victim(cloud, admin)
    user = await admin.make("/users", name="auditor", password="secret")
    role = (await admin.get("/roles?name=reader"))["roles"][0]["id"]
    await admin.do("PUT", f"/system/users/{user['id']}/roles/{role}")
    auditor = await cloud.login("auditor", "secret", scope={"system": {"all": True}})
    for route in protected(cloud):
        answer = await call(cloud, route, ids, auditor.token)
        if route.policy == "identity:list_revoke_events":
            assert answer.status == 403
        elif route.method in ("GET", "HEAD"):
            assert answer.status in (200, 204), (route.label, answer)
        else:
            assert answer.status == 403, (route.label, answer)


async def test_every_route_has_a_rule_that_exists(cloud: Cloud) -> None:
    known = {rule.name for rule in RULES}
    named = {route.policy for route in protected(cloud)}
    assert named <= known
    without = {route.label for route in cloud.identity.service.routes if route.policy is None}
    assert without == {
        "GET /",
        "HEAD /",
        "GET /v3",
        "HEAD /v3",
        "POST /v3/auth/tokens",
        "POST /v3/users/{user_id}/password",
    }


async def test_a_stranger_cannot_tell_whether_a_resource_exists(cloud: Cloud) -> None:
    """The answers for an existing and a missing resource are alike."""
    admin = await cloud.admin()
    ids = await victim(cloud, admin)
    stranger = await cloud.member(admin, "stranger")
    nothing = {**dict.fromkeys(ids, "0" * 32), "token": ids["token"]}
    for route in protected(cloud):
        if route.policy in OPEN or "{" not in route.path:
            continue
        there = await call(cloud, route, ids, stranger.token)
        not_there = await call(cloud, route, nothing, stranger.token)
        alike = there.body.replace(ids["trust_id"].encode(), b"0" * 32)  # what the stranger wrote itself
        assert (there.status, alike) == (not_there.status, not_there.body), route.label
