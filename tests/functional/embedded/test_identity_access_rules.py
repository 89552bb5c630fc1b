"""Access rules of application credentials, and the tokens that carry them."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from micronova.clients.identity.client import IdentityClient, ServiceToken
from micronova.embedded.identity.store.access_rules import MAX_RULES, MAX_RULES_BYTES
from micronova.http.auth import KeystoneTokens
from micronova.http.client import ASGITransport
from micronova.http.tokens import PREFIX, PREFIX_WITH_RULES, TokenKey
from micronova.objects.context import RequestContext
from micronova.objects.errors import Unauthorized
from tests.unit.embedded.identity.harness import (
    KEY,
    SERVICE,
    Caller,
    Cloud,
    by_credential,
    by_token,
    cloud_at,
    sqlite_at,
)

KNOWN = {"openstack-identity-access-rules": "1.0"}


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[Cloud]:
    async with cloud_at(sqlite_at(tmp_path)) as running:
        yield running


def rule(path: str, method: str = "GET", service: str = "identity") -> dict[str, Any]:
    return {"service": service, "method": method, "path": path}


async def limited(cloud: Cloud, user: Caller, *rules: dict[str, Any], **fields: Any) -> tuple[dict[str, Any], Caller]:
    """Make an application credential with these rules, and log in with it."""
    path = f"/users/{user.user_id}/application_credentials"
    name = f"limited {len((await user.get(path))['application_credentials'])}"
    made = await user.make(path, name=name, access_rules=list(rules), **fields)
    return made, cloud.caller(await cloud.authenticate(by_credential(made)))


async def test_rules_are_made_with_credentials_and_shared_by_them(cloud: Cloud) -> None:
    alice = await cloud.member(await cloud.admin(), "alice")
    path, credentials = f"/users/{alice.user_id}/access_rules", f"/users/{alice.user_id}/application_credentials"
    assert (await alice.get(path))["access_rules"] == []
    servers, images = rule("/v2.1/servers", service="compute"), rule("/v2/images", service="image")
    first = await alice.make(credentials, name="first", access_rules=[servers, images, servers])
    made = first["access_rules"]
    assert [{name: value for name, value in each.items() if name != "id"} for each in made] == [servers, images]
    assert (await alice.get(f"{credentials}/{first['id']}"))["application_credential"]["access_rules"] == made
    shown = [{**each, "links": {"self": f"http://cloud.example/identity/v3{path}/{each['id']}"}} for each in made]
    assert (await alice.get(path))["access_rules"] == shown
    assert (await alice.get(f"{path}?service=image"))["access_rules"] == shown[1:]
    assert (await alice.get(f"{path}/{made[0]['id']}"))["access_rule"] == shown[0]
    second = await alice.make(credentials, name="second", access_rules=[images, {"id": made[0]["id"]}])
    assert {each["id"] for each in second["access_rules"]} == {each["id"] for each in made}, "none is new"
    everything = await alice.make(credentials, name="third")
    assert "access_rules" not in everything
    for id in (first["id"], second["id"]):
        assert (await alice.request("DELETE", f"{path}/{made[0]['id']}")).status == 403, "a credential has it"
        await alice.do("DELETE", f"{credentials}/{id}")
    assert (await alice.get(path))["access_rules"] == shown, "they stay"
    await alice.do("DELETE", f"{path}/{made[0]['id']}")
    for method in ("GET", "DELETE"):
        assert (await alice.request(method, f"{path}/{made[0]['id']}")).status == 404


async def test_who_sees_access_rules(cloud: Cloud) -> None:
    admin = await cloud.admin()
    alice, mallory = await cloud.member(admin, "alice"), await cloud.member(admin, "mallory")
    system = await cloud.login("admin", "admin-password", scope={"system": {"all": True}})
    made, _ = await limited(cloud, alice, rule("/v3/users"))
    [known] = made["access_rules"]
    path = f"/users/{alice.user_id}/access_rules"
    for caller, status in ((alice, 200), (system, 200), (admin, 403), (mallory, 403)):
        assert (await caller.request("GET", path)).status == status
        assert (await caller.request("GET", f"{path}/{known['id']}")).status == status
    assert (await mallory.request("GET", f"/users/{mallory.user_id}/access_rules/{known['id']}")).status == 404
    assert (await mallory.request("DELETE", f"/users/{mallory.user_id}/access_rules/{known['id']}")).status == 404
    wanted = {"application_credential": {"name": "x", "access_rules": [{"id": known["id"]}]}}
    answer = await mallory.request("POST", f"/users/{mallory.user_id}/application_credentials", wanted)
    assert answer.status == 404, "a rule of another user"
    await alice.do("DELETE", f"/users/{alice.user_id}/application_credentials/{made['id']}")
    await system.do("DELETE", f"{path}/{known['id']}")
    await limited(cloud, alice, rule("/v3/users"))
    await admin.do("DELETE", f"/users/{alice.user_id}")
    assert (await system.get(path))["access_rules"] == []


async def test_bad_rules(cloud: Cloud) -> None:
    alice = await cloud.member(await cloud.admin(), "alice")
    path = f"/users/{alice.user_id}/application_credentials"
    for bad, status in (
        ({"service": "compute", "method": "GET"}, 400),
        ({}, 400),
        (rule("v2.1/servers"), 400),
        (rule(""), 400),
        (rule("/" + "x" * 225), 400),
        (rule("/x", "get"), 400),
        (rule("/x", "OPTIONS"), 400),
        (rule("/x", service=""), 400),
        (rule("/x", service="a/b"), 400),
        ({**rule("/x"), "zork": 1}, 400),
        ({**rule("/x"), "id": "0" * 32}, 400),
        ({"id": "0" * 32}, 404),
        ("x", 400),
    ):
        body = {"application_credential": {"name": "x", "access_rules": [bad]}}
        assert (await alice.request("POST", path, body)).status == status, bad
    many = [rule(f"/{number:0200}") for number in range(MAX_RULES_BYTES // 200)]
    body = {"application_credential": {"name": "x", "access_rules": many}}
    assert (await alice.request("POST", path, body)).status == 400, "they do not fit into a token"
    body = {"application_credential": {"name": "x", "access_rules": [rule(f"/{n}") for n in range(MAX_RULES + 1)]}}
    statistics = cloud.identity.core.database.statistics
    written = dict(statistics.by_function)
    assert (await alice.request("POST", path, body)).status == 400, "too many to compare requests with"
    assert statistics.by_function == written, "it is refused before a transaction"
    assert (await alice.get(path))["application_credentials"] == []
    assert (await alice.get(f"/users/{alice.user_id}/access_rules"))["access_rules"] == [], "all or nothing"
    # One that just fits gives a token that is accepted.
    _, caller = await limited(cloud, alice, *many[:-2])
    assert caller.token is not None and len(caller.token) < 8192
    assert (await caller.request("GET", "/auth/tokens", subject=caller.token, **KNOWN)).status == 200


async def test_a_token_is_good_for_what_its_rules_allow_and_nothing_else(cloud: Cloud) -> None:
    admin = await cloud.admin()
    _, caller = await limited(
        cloud, admin, rule("/v3/users/*"), rule("/v3/projects"), rule("/v3/roles", "HEAD"), rule("/identity/v3/groups"),
        rule("/v3/regions", service="compute"),
    )  # fmt: skip
    for method, path, status in (
        ("GET", f"/users/{admin.user_id}", 200),
        ("HEAD", f"/users/{admin.user_id}", 401),
        ("GET", "/users", 401),
        ("GET", f"/users/{admin.user_id}/projects", 401),
        ("GET", "/projects", 200),
        ("GET", "/projects/", 200),
        ("GET", "/projects?name=admin", 200),
        ("POST", "/projects", 401),
        ("HEAD", "/roles", 200),
        ("GET", "/roles", 401),
        ("GET", "/groups", 200),
        ("GET", "/regions", 401),
        ("GET", "/auth/catalog", 401),
        ("DELETE", "/auth/tokens", 401),
    ):
        body = {"project": {"name": "x"}} if method == "POST" else None
        answer = await caller.request(method, path, body, subject=caller.token)
        assert answer.status == status, (method, path, answer)
    assert (await admin.get("/projects?name=x"))["projects"] == []
    service = await cloud.login(*SERVICE)
    assert (await caller.request("GET", "/users", **{"x-service-token": service.token})).status == 200, "for a service"
    for other in (admin.token, caller.token):
        assert (await caller.request("GET", "/users", **{"x-service-token": other})).status == 401
    assert (await caller.request("GET", "/users", **{"x-service-token": "forged"})).status == 401


async def test_a_token_is_shown_only_to_who_enforces_its_rules(cloud: Cloud) -> None:
    alice = await cloud.member(await cloud.admin(), "alice")
    made, caller = await limited(cloud, alice, rule("/v2.1/servers", "POST", "compute"))
    assert caller.body["application_credential"]["access_rules"] == made["access_rules"]
    service = await cloud.login(*SERVICE)
    for headers, status in (({}, 404), ({**KNOWN, **dict.fromkeys(KNOWN, "0.9")}, 404), (KNOWN, 200)):
        for who in (service, alice, caller):  # a token may always ask about itself
            answer = await who.request("GET", "/auth/tokens", subject=caller.token, **headers)
            assert answer.status == status, (headers, answer)
        assert (await alice.request("HEAD", "/auth/tokens", subject=caller.token, **headers)).status == status
    assert (await alice.request("GET", "/auth/tokens", subject=caller.token, **dict.fromkeys(KNOWN, "x"))).status == 404
    assert (await caller.request("GET", "/auth/tokens", subject=alice.token, **KNOWN)).status == 401
    # Our own client enforces them, and says so.
    transport = ASGITransport(cloud.identity.service.app)
    user, password, project = SERVICE
    now = cloud.identity.core.clock.now
    token = ServiceToken(transport, username=user, password=password, project_name=project, now=now)
    validated = await KeystoneTokens(IdentityClient(transport, token), now).authenticate(
        caller.token, RequestContext(request_id="")
    )
    assert validated.access_rules == (("compute", "POST", "/v2.1/servers"),)


async def test_a_token_with_rules_is_no_source_of_further_rights(cloud: Cloud) -> None:
    admin = await cloud.admin()
    alice = await cloud.member(admin, "alice")
    everything = [rule("/**", method) for method in ("GET", "POST", "PATCH", "DELETE", "PUT")]
    made, caller = await limited(cloud, alice, *everything, unrestricted=True)
    stored = await alice.make("/credentials", type="cert", blob="x")
    own = f"/users/{alice.user_id}"
    trust = {
        "trustor_user_id": alice.user_id, "trustee_user_id": alice.user_id, "project_id": alice.project_id,
        "impersonation": True, "roles": [{"name": "member"}],
    }  # fmt: skip
    for method, path, body in (
        ("POST", f"{own}/application_credentials", {"application_credential": {"name": "more"}}),
        ("DELETE", f"{own}/application_credentials/{made['id']}", None),
        ("DELETE", f"{own}/access_rules/{made['access_rules'][0]['id']}", None),
        ("POST", "/OS-TRUST/trusts", {"trust": trust}),
        ("POST", "/credentials", {"credential": {"type": "cert", "blob": "x"}}),
        ("GET", f"/credentials/{stored['id']}", None),
        ("GET", "/credentials", None),
        ("POST", f"{own}/credentials/OS-EC2", {"tenant_id": alice.project_id}),
        ("GET", f"{own}/credentials/OS-EC2", None),
    ):
        assert (await caller.request(method, path, body)).status == 403, (method, path)
    assert (await cloud.authenticate(by_token(caller.token))).status == 403
    assert (await cloud.authenticate(by_token(caller.token), "unscoped")).status == 403


async def test_processes_that_do_not_know_rules_refuse_the_tokens(cloud: Cloud) -> None:
    """An older service takes tokens with the first prefix, and ignores claims that it does not know."""
    alice = await cloud.member(await cloud.admin(), "alice")
    _, caller = await limited(cloud, alice, rule("/v3/users"))
    token = caller.token or ""
    assert token.startswith(PREFIX_WITH_RULES)
    with pytest.raises(Unauthorized):
        cloud.identity.verifier.verify(PREFIX + token.removeprefix(PREFIX_WITH_RULES), cloud.identity.core.clock.now())
    text = token.removeprefix(PREFIX_WITH_RULES)
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    with pytest.raises(InvalidSignature):  # as an older verifier checks it
        Ed25519PublicKey.from_public_bytes(TokenKey(KEY).public).verify(data[-64:], data[:-64])
