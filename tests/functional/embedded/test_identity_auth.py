"""Tokens: methods, scopes, contents, who may see them, and lockout."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.embedded.identity.store import application_credentials
from tests.clocks import HeldClock
from tests.unit.embedded.identity.harness import (
    ADMIN,
    DEMO,
    SERVICE,
    Caller,
    Cloud,
    CountingPasswords,
    by_credential,
    by_password,
    by_token,
    cloud_at,
    sqlite_at,
)


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@pytest.fixture
async def cloud(tmp_path: Path, clock: HeldClock) -> AsyncIterator[Cloud]:
    async with cloud_at(sqlite_at(tmp_path), clock=clock) as running:
        yield running


@pytest.fixture
async def admin(cloud: Cloud) -> Caller:
    return await cloud.admin()


async def test_version_documents(cloud: Cloud) -> None:
    answer = await cloud.request("GET", "")
    assert answer.status == 300
    [version] = answer.json()["versions"]["values"]
    assert version["id"].startswith("v3.") and version["status"] == "stable"
    assert version["links"] == [{"rel": "self", "href": "http://cloud.example/identity/v3/"}]
    for path in ("/", "/?x=1"):
        answer = await cloud.request("GET", path)
        assert answer.status == 200 and answer.json()["version"] == version


async def test_a_token_for_a_project(cloud: Cloud) -> None:
    scope = {"project": {"name": "demo", "domain": {"name": "Default"}}}
    answer = await cloud.authenticate(by_password("demo", "demo-password"), scope)
    assert answer.status == 201
    token = answer.json()["token"]
    assert token["user"]["name"] == "demo"
    assert token["user"]["domain"] == token["project"]["domain"] == {"id": "default", "name": "Default"}
    assert token["project"]["name"] == "demo" and token["is_domain"] is False
    assert {role["name"] for role in token["roles"]} == {"member", "reader"}
    assert token["methods"] == ["password"] and len(token["audit_ids"]) == 1
    assert token["issued_at"].endswith("Z") and token["expires_at"] > token["issued_at"]
    [compute] = [entry for entry in token["catalog"] if entry["type"] == "compute"]
    assert {endpoint["interface"] for endpoint in compute["endpoints"]} == {"public", "internal", "admin"}
    assert {endpoint["url"] for endpoint in compute["endpoints"]} == {"http://cloud.example/compute/v2.1"}
    assert {endpoint["region_id"] for endpoint in compute["endpoints"]} == {"RegionOne"}


async def test_the_catalog_has_the_urls_of_the_caller(cloud: Cloud, tmp_path: Path, clock: HeldClock) -> None:
    scope = {"project": {"name": "demo", "domain": {"id": "default"}}}
    answer = await cloud.authenticate(by_password("demo", "demo-password"), scope)
    urls = {endpoint["url"] for entry in answer.json()["token"]["catalog"] for endpoint in entry["endpoints"]}
    assert all(url.startswith("http://cloud.example/") for url in urls)
    async with cloud_at(f"sqlite:///{tmp_path}/other.db", clock=clock, public_url="https://set.example") as other:
        caller = await other.login("demo", "demo-password", "demo")
        assert caller.body["catalog"][0]["endpoints"][0]["url"].startswith("https://set.example/")
        [domain] = (await (await other.admin()).get("/domains"))["domains"]
        assert domain["links"]["self"] == "https://set.example/identity/v3/domains/default"


async def test_without_a_catalog(cloud: Cloud, admin: Caller) -> None:
    answer = await cloud.authenticate(by_password("admin", "admin-password"), {"system": {"all": True}}, "?nocatalog")
    assert answer.status == 201 and "catalog" not in answer.json()["token"]
    told = await admin.get("/auth/tokens?nocatalog", subject=admin.token or "")
    assert "catalog" not in told["token"]
    assert "catalog" in (await admin.get("/auth/tokens", subject=admin.token or ""))["token"]


async def test_scopes(cloud: Cloud, admin: Caller) -> None:
    system = await cloud.login("admin", "admin-password", scope={"system": {"all": True}})
    assert system.body["system"] == {"all": True} and "admin" in system.roles and "project" not in system.body
    unscoped = await cloud.login("admin", "admin-password")
    assert not unscoped.roles and "catalog" not in unscoped.body
    explicit = await cloud.login("admin", "admin-password", scope="unscoped")
    assert "project" not in explicit.body
    assert (
        await cloud.authenticate(by_password("admin", "admin-password"), {"domain": {"id": "default"}})
    ).status == 401
    role = (await admin.get("/roles?name=manager"))["roles"][0]["id"]
    await admin.do("PUT", f"/domains/default/users/{admin.user_id}/roles/{role}")
    domain = await cloud.login("admin", "admin-password", scope={"domain": {"name": "Default"}})
    assert domain.body["domain"] == {"id": "default", "name": "Default"}
    assert domain.roles == {"manager", "member", "reader"}


@pytest.mark.parametrize(
    "scope",
    [
        {"project": {"id": "0" * 32}},
        {"project": {"name": "admin", "domain": {"id": "default"}}},
        {"project": {"name": "nothing", "domain": {"id": "default"}}},
        {"project": {"name": "demo", "domain": {"id": "nowhere"}}},
        {"domain": {"id": "default"}},
        {"domain": {"id": "nowhere"}},
        {"system": {"all": True}},
        {"system": {"all": False}},
    ],
)
async def test_a_scope_without_a_role_is_refused_like_a_wrong_password(cloud: Cloud, scope: Any) -> None:
    refused = await cloud.authenticate(by_password("demo", "demo-password"), scope)
    wrong = await cloud.authenticate(by_password("demo", "wrong"), scope)
    assert refused.status == wrong.status == 401
    assert refused.json() == wrong.json()


async def test_the_default_project(cloud: Cloud, admin: Caller) -> None:
    user = await cloud.member(admin, "alice")
    await admin.do("PATCH", f"/users/{user.user_id}", {"user": {"default_project_id": user.project_id}}, 200)
    assert (await cloud.login("alice", "secret")).project_id == user.project_id
    assert "project" not in (await cloud.login("alice", "secret", scope="unscoped")).body
    await admin.do("PATCH", f"/users/{user.user_id}", {"user": {"default_project_id": admin.project_id}}, 200)
    assert "project" not in (await cloud.login("alice", "secret")).body, "a default project without a role is not used"


async def test_exchanging_a_token(cloud: Cloud, clock: HeldClock) -> None:
    first = await cloud.login("demo", "demo-password")
    clock.time += 3600
    scope = {"project": {"name": "demo", "domain": {"id": "default"}}}
    scoped = cloud.caller(await cloud.authenticate(by_token(first.token), scope))
    assert scoped.body["methods"] == ["password", "token"]
    assert scoped.body["audit_ids"][1] == first.body["audit_ids"][0]
    assert scoped.body["expires_at"] == first.body["expires_at"], "an exchange does not prolong a token"
    again = cloud.caller(await cloud.authenticate(by_token(scoped.token), scope))
    assert again.body["audit_ids"][1] == first.body["audit_ids"][0]
    both = {**by_password("demo", "demo-password"), "token": {"id": first.token}, "methods": ["password", "token"]}
    assert (await cloud.authenticate(both, scope)).status == 201
    mixed = {**by_password("admin", "admin-password"), "token": {"id": first.token}, "methods": ["password", "token"]}
    assert (await cloud.authenticate(mixed)).status == 401
    clock.time += 3 * 3600 + 1
    for gone in (first.token, "forged", ""):
        assert (await cloud.authenticate(by_token(gone))).status == 404


async def test_showing_and_checking_tokens(cloud: Cloud, admin: Caller, clock: HeldClock) -> None:
    user = await cloud.member(admin, "alice")
    stranger = await cloud.member(admin, "mallory")
    service = await cloud.login("micronova", "service-password", "service")
    for caller in (admin, user, service):
        told = await caller.request("GET", "/auth/tokens", subject=user.token)
        assert told.status == 200 and told.headers["x-subject-token"] == user.token
        assert {**told.json()["token"], "catalog": 0} == {**user.body, "catalog": 0}
    assert (await stranger.request("GET", "/auth/tokens", subject=user.token)).status == 403
    assert (await stranger.request("DELETE", "/auth/tokens", subject=user.token)).status == 403
    assert (await user.request("HEAD", "/auth/tokens", subject=user.token)).status == 200
    assert (await stranger.request("HEAD", "/auth/tokens", subject=user.token)).status == 403
    for subject in ("forged", "mn1.AAAA", "", (user.token or "")[:-4] + "AAAA"):
        assert (await admin.request("GET", "/auth/tokens", subject=subject)).status == 404
        assert (await stranger.request("GET", "/auth/tokens", subject=subject)).status == 404
    assert (await admin.request("GET", "/auth/tokens")).status == 404
    assert (await stranger.request("GET", "/auth/tokens")).status == 403
    assert (await cloud.request("GET", "/auth/tokens", token="forged", subject=user.token)).status == 401
    assert (await cloud.request("GET", "/auth/tokens", subject=user.token)).status == 401
    clock.time += 4 * 3600 + 1
    late = await cloud.admin()
    assert (await late.request("GET", "/auth/tokens", subject=user.token)).status == 404
    assert (await user.request("GET", f"/users/{user.user_id}")).status == 401


async def test_a_token_is_checked_without_a_database_read(cloud: Cloud, admin: Caller) -> None:
    statistics = cloud.identity.core.database.statistics
    before = statistics.reads + statistics.writes
    assert (await admin.request("HEAD", "/auth/tokens", subject=admin.token)).status == 200
    assert statistics.reads + statistics.writes == before
    await cloud.login("demo", "demo-password", "demo")
    assert statistics.reads + statistics.writes == before + 2, "a log-in takes two reads and no write"


async def test_the_scopes_that_a_user_can_get_tokens_for(cloud: Cloud, admin: Caller) -> None:
    unscoped = await cloud.login("demo", "demo-password")
    listed = await unscoped.get("/auth/projects")
    assert [project["name"] for project in listed["projects"]] == ["demo"]
    assert listed["links"]["self"] == "http://cloud.example/identity/v3/auth/projects"
    assert (await unscoped.get("/auth/domains"))["domains"] == []
    assert (await unscoped.get("/auth/system"))["system"] == []
    assert (await admin.get("/auth/system"))["system"] == [{"all": True}]
    assert (await unscoped.request("GET", "/auth/catalog")).status == 403
    assert {entry["type"] for entry in (await admin.get("/auth/catalog"))["catalog"]} >= {"identity", "compute"}
    demo = listed["projects"][0]["id"]
    await admin.do("PATCH", f"/projects/{demo}", {"project": {"enabled": False}}, 200)
    unscoped = await cloud.login("demo", "demo-password")
    assert (await unscoped.get("/auth/projects"))["projects"] == []


async def test_failures_do_not_tell_why_and_take_the_same_time(cloud: Cloud, admin: Caller) -> None:
    user = await cloud.member(admin, "alice")
    await cloud.member(admin, "bob")
    await admin.make("/users", name="nopassword")
    await admin.do("PATCH", f"/users/{user.user_id}", {"user": {"enabled": False}}, 200)
    passwords = cloud.identity.core.passwords
    assert isinstance(passwords, CountingPasswords)
    answers = []
    for identity in (
        by_password("bob", "wrong"),
        by_password("nobody", "secret"),
        by_password("nopassword", "secret"),
        by_password("alice", "secret"),  # disabled
        {"methods": ["password"], "password": {"user": {"id": "0" * 32, "password": "secret"}}},
        {"methods": ["password"], "password": {"user": {"id": user.user_id}}},
        by_credential({"id": None, "secret": "x"}, name="robot", user={"id": user.user_id}),
    ):
        before = passwords.checked
        answers.append(await cloud.authenticate(identity))
        assert passwords.checked == before + 1
    assert {answer.status for answer in answers} == {401}
    assert len({answer.body for answer in answers}) == 1


async def test_lockout_per_user_and_address(tmp_path: Path, clock: HeldClock) -> None:
    async with cloud_at(sqlite_at(tmp_path), clock=clock, lockout_attempts=5, lockout_seconds=60) as cloud:
        passwords = cloud.identity.core.passwords
        assert isinstance(passwords, CountingPasswords)
        for _ in range(5):
            assert (await cloud.authenticate(by_password("demo", "wrong"))).status == 401
        checked = passwords.checked
        locked = await cloud.authenticate(by_password("demo", "demo-password"))
        assert locked.status == 401 and passwords.checked == checked, "the password is not checked"
        body = {"user": {"original_password": "demo-password", "password": "x"}}
        admin = await cloud.admin()
        demo = (await admin.get("/users?name=demo"))["users"][0]
        assert (await cloud.request("POST", f"/users/{demo['id']}/password", body)).status == 401
        clock.time += 61
        await cloud.login("demo", "demo-password")
        for _ in range(4):
            await cloud.authenticate(by_password("demo", "wrong"))
        await cloud.login("demo", "demo-password")
        assert (await cloud.authenticate(by_password("demo", "wrong"))).status == 401
        await cloud.login("demo", "demo-password")


async def test_lockout_of_an_ipv6_client_is_for_its_network(tmp_path: Path, clock: HeldClock) -> None:
    async with cloud_at(sqlite_at(tmp_path), clock=clock, lockout_attempts=5, lockout_seconds=60) as cloud:
        for number in range(5):
            client = cloud.seen_from(f"2001:db8:0:1::{number:x}")
            assert (await client.authenticate(by_password("demo", "wrong"))).status == 401
        right = by_password("demo", "demo-password")
        assert (await cloud.seen_from("2001:db8:0:1:ffff::1").authenticate(right)).status == 401
        assert (await cloud.seen_from("2001:db8:0:2::1").authenticate(right)).status == 201


async def test_lockout_of_an_ipv4_client_within_ipv6_is_for_its_address(tmp_path: Path, clock: HeldClock) -> None:
    async with cloud_at(sqlite_at(tmp_path), clock=clock, lockout_attempts=1, lockout_seconds=60) as cloud:
        right = by_password("demo", "demo-password")
        assert (await cloud.seen_from("::ffff:192.0.2.1").authenticate(by_password("demo", "wrong"))).status == 401
        assert (await cloud.seen_from("192.0.2.1").authenticate(right)).status == 401
        assert (await cloud.seen_from("::ffff:192.0.2.2").authenticate(right)).status == 201


async def test_lockout_holds_for_concurrent_guesses(cloud: Cloud) -> None:
    passwords = cloud.identity.core.passwords
    assert isinstance(passwords, CountingPasswords)
    before = passwords.checked
    guesses = await asyncio.gather(*(cloud.authenticate(by_password("demo", f"guess {n}")) for n in range(60)))
    assert {answer.status for answer in guesses} == {401}
    assert passwords.checked - before <= 7, "five, and those that were running"


async def test_a_client_that_guesses_many_names_keeps_nobody_from_logging_in(cloud: Cloud) -> None:
    """Those guesses that wait when too many do are refused, not the log-ins of others."""
    guesser, other = cloud.seen_from("192.0.2.1"), cloud.seen_from("192.0.2.2")
    guesses = [guesser.authenticate(by_password(f"name{number}", "x")) for number in range(400)]
    right = by_password("demo", "demo-password")
    answers = await asyncio.gather(*guesses, other.authenticate(right), cloud.authenticate(right))
    assert [answer.status for answer in answers[-2:]] == [201, 201]
    assert {answer.status for answer in answers[:-2]} <= {401, 503}


async def test_application_credentials(cloud: Cloud, admin: Caller, clock: HeldClock) -> None:
    user = await cloud.member(admin, "alice")
    path = f"/users/{user.user_id}/application_credentials"
    credential = await user.make(path, name="robot", description="waters the flowers")
    assert len(credential["secret"]) >= 64 and credential["project_id"] == user.project_id
    assert {role["name"] for role in credential["roles"]} == {"member", "reader"}
    shown = (await user.get(f"{path}/{credential['id']}"))["application_credential"]
    assert shown == {key: value for key, value in credential.items() if key != "secret"}
    robot = cloud.caller(await cloud.authenticate(by_credential(credential)))
    assert robot.project_id == user.project_id and robot.roles == {"member", "reader"}
    assert robot.body["application_credential"] == {"id": credential["id"], "name": "robot", "restricted": True}
    assert robot.body["methods"] == ["application_credential"]
    by_name = {"name": "robot", "secret": credential["secret"], "id": None}
    for owner in ({"id": user.user_id}, {"name": "alice", "domain": {"id": "default"}}):
        assert (await cloud.authenticate(by_credential(credential, **by_name, user=owner))).status == 201
    assert (await cloud.authenticate(by_credential(credential, secret="wrong"))).status == 401
    assert (await cloud.authenticate(by_credential(credential, id="0" * 32))).status == 404
    nobodys = by_credential(credential, **by_name | {"name": "nobody's"}, user={"id": user.user_id})
    assert (await cloud.authenticate(nobodys)).status == 401
    assert (await cloud.authenticate(by_credential(credential), {"project": {"id": user.project_id}})).status == 401
    # Restricted: it cannot create or delete credentials, and its token cannot be exchanged.
    assert (await robot.request("POST", path, {"application_credential": {"name": "more"}})).status == 403
    assert (await robot.request("DELETE", f"{path}/{credential['id']}")).status == 403
    assert (await robot.request("GET", path)).status == 200
    assert (await cloud.authenticate(by_token(robot.token))).status == 403
    assert (await user.request("POST", path, {"application_credential": {"name": "robot"}})).status == 409

    limited = await user.make(
        path, name="limited", roles=[{"name": "reader"}], secret="chosen", unrestricted=True,
        expires_at="2023-11-14T23:00:00",
    )  # fmt: skip
    assert limited["secret"] == "chosen" and limited["expires_at"] == "2023-11-14T23:00:00.000000"
    reader = cloud.caller(await cloud.authenticate(by_credential(limited)))
    assert reader.roles == {"reader"} and reader.body["expires_at"] == "2023-11-14T23:00:00.000000Z"
    more = {"application_credential": {"name": "more", "roles": [{"name": "member"}]}}
    assert (await reader.request("POST", path, more)).status == 400, "it cannot delegate more roles than it has"
    for roles in ([{"name": "reader"}], []):  # without roles, those of the token
        child = await reader.make(path, name=f"child {roles}", roles=roles)
        assert [role["name"] for role in child["roles"]] == ["reader"]
    clock.time += 3600
    assert (await cloud.authenticate(by_credential(limited))).status == 401, "it has expired"
    listed = await user.get(f"{path}?name=robot")
    assert [each["name"] for each in listed["application_credentials"]] == ["robot"]
    # An administrator may show and delete, not create; other users may do nothing.
    stranger = await cloud.member(admin, "mallory")
    assert (await stranger.request("GET", path)).status == 403
    assert (await stranger.request("GET", f"{path}/{credential['id']}")).status == 403
    assert (await stranger.request("DELETE", f"{path}/{credential['id']}")).status == 403
    assert (await admin.request("POST", path, {"application_credential": {"name": "x"}})).status == 403
    assert (await admin.request("GET", path)).status == 200
    mallorys = f"/users/{stranger.user_id}/application_credentials/{credential['id']}"
    assert (await stranger.request("GET", mallorys)).status == 404, "not under another user's name either"
    unscoped = await cloud.login("alice", "secret")
    assert (await unscoped.request("POST", path, {"application_credential": {"name": "y"}})).status == 403
    await admin.do("DELETE", f"{path}/{credential['id']}")
    assert (await user.request("DELETE", f"{path}/{credential['id']}")).status == 404


async def test_a_user_has_a_limited_number_of_application_credentials(
    cloud: Cloud, admin: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application_credentials, "MAX_OF_USER", 2)
    alice, bob = await cloud.member(admin, "alice"), await cloud.member(admin, "bob")
    path = f"/users/{alice.user_id}/application_credentials"
    made = [await alice.make(path, name=name) for name in ("first", "second")]
    body = {"application_credential": {"name": "third"}}
    refused = await alice.request("POST", path, body)
    assert (refused.status, "may have 2 application credentials" in refused.body.decode()) == (403, True)
    await bob.make(f"/users/{bob.user_id}/application_credentials", name="third")
    await alice.do("DELETE", f"{path}/{made[0]['id']}")
    long = {"application_credential": {"name": "third", "description": "x" * 4097}}
    assert (await alice.request("POST", path, long)).status == 400
    await alice.make(path, name="third", description="x" * 4096)


async def test_an_application_credential_gets_a_role_that_is_newer_than_the_token(cloud: Cloud, admin: Caller) -> None:
    alice = await cloud.member(admin, "alice", "reader")
    role = await admin.make("/roles", name="new")
    await admin.do("PUT", f"/projects/{alice.project_id}/users/{alice.user_id}/roles/{role['id']}")
    path = f"/users/{alice.user_id}/application_credentials"
    made = await alice.make(path, name="one", roles=[{"id": role["id"]}], unrestricted=True)
    assert [each["name"] for each in made["roles"]] == ["new"]
    delegated = cloud.caller(await cloud.authenticate(by_credential(made)))
    reader = [{"name": "reader"}]
    answer = await delegated.request("POST", path, {"application_credential": {"name": "two", "roles": reader}})
    assert answer.status == 400, "a token of an application credential delegates its own roles only"
    passed = await delegated.make(path, name="three")
    assert [each["name"] for each in passed["roles"]] == ["new"]


async def test_an_application_credential_has_the_roles_that_its_roles_imply(cloud: Cloud, admin: Caller) -> None:
    """Else a credential with the role member could list nothing: readers may, and member implies reader."""
    user = await cloud.member(admin, "alice")
    path = f"/users/{user.user_id}/application_credentials"
    role = (await admin.get("/roles?name=member"))["roles"][0]["id"]
    for number, wanted in enumerate(({"name": "member"}, {"id": role})):
        credential = await user.make(path, name=f"robot {number}", roles=[wanted])
        assert {each["name"] for each in credential["roles"]} == {"member", "reader"}
        robot = cloud.caller(await cloud.authenticate(by_credential(credential)))
        assert robot.roles == {"member", "reader"}
    unknown = {"application_credential": {"name": "x", "roles": [{"name": "nothing"}]}}
    assert (await user.request("POST", path, unknown)).status == 404


async def test_changing_ones_password(cloud: Cloud, admin: Caller) -> None:
    user = await cloud.member(admin, "alice")
    path = f"/users/{user.user_id}/password"
    wrong = {"user": {"original_password": "wrong", "password": "new"}}
    assert (await user.request("POST", path, wrong)).status == 401
    right = {"user": {"original_password": "secret", "password": "new"}}
    assert (await cloud.request("POST", path, right)).status == 204, "the old password is enough"
    assert (await cloud.authenticate(by_password("alice", "secret"))).status == 401
    await cloud.login("alice", "new", "alice")
    await admin.do("PATCH", f"/users/{user.user_id}", {"user": {"options": {"lock_password": True}}}, 200)
    again = {"user": {"original_password": "new", "password": "newer"}}
    assert (await cloud.request("POST", path, again)).status == 403
    assert (await cloud.request("POST", f"/users/{'0' * 32}/password", again)).status == 401


async def test_bootstrap_can_be_repeated(tmp_path: Path, clock: HeldClock) -> None:
    async with cloud_at(sqlite_at(tmp_path), clock=clock) as cloud:
        admin = await cloud.admin()
        demo = (await admin.get("/users?name=demo"))["users"][0]
        await admin.do("PATCH", f"/users/{demo['id']}", {"user": {"password": "changed"}}, 200)
        paths = ("/users", "/projects", "/roles", "/services", "/endpoints", "/role_assignments", "/role_inferences")
        before = [await admin.get(path) for path in paths]
    async with cloud_at(sqlite_at(tmp_path), clock=clock) as cloud:
        admin = await cloud.admin()
        assert [await admin.get(path) for path in paths] == before
        await cloud.login("demo", "changed", "demo")
        more = {"identity": "/identity/v3", "compute": "/compute/v3", "volumev3": "/volume/v3", "dns": "http://dns:1"}
        await cloud.identity.bootstrap("ignored", "ignored", "new-service-password", more)
        await cloud.login("micronova", "new-service-password", "service")
        admin = await cloud.admin()
        urls = {entry["type"]: entry["endpoints"][0]["url"] for entry in admin.body["catalog"]}
        assert urls["compute"] == "http://cloud.example/compute/v3"
        assert urls["volumev3"] == "http://cloud.example/volume/v3" and urls["dns"] == "http://dns:1"
        await cloud.identity.bootstrap("reset", "reset", "new-service-password", {}, reset_passwords=True)
        await cloud.login("admin", "reset", "admin")


async def test_a_second_service_user_leaves_the_first_one_alone(tmp_path: Path, clock: HeldClock) -> None:
    """To change the password, processes with the new user are started while others still log in as the old one."""
    async with cloud_at(sqlite_at(tmp_path), clock=clock) as cloud:
        await cloud.identity.bootstrap(ADMIN[1], DEMO[1], "second-password", {}, service_user="micronova_2")
        for name, password in ((SERVICE[0], SERVICE[1]), ("micronova_2", "second-password")):
            caller = await cloud.login(name, password, "service")
            assert [role["name"] for role in caller.body["roles"]] == ["service"]
        # It is the one of the settings now: a password that is changed there is its password.
        await cloud.identity.bootstrap(ADMIN[1], DEMO[1], "third-password", {}, service_user="micronova_2")
        await cloud.login("micronova_2", "third-password", "service")
        await cloud.login(SERVICE[0], SERVICE[1], "service")


async def test_an_administrator_as_the_service_user_keeps_the_password(tmp_path: Path, clock: HeldClock) -> None:
    async with cloud_at(sqlite_at(tmp_path), clock=clock) as cloud:
        await cloud.identity.bootstrap(ADMIN[1], DEMO[1], "other-password", {}, service_user="admin")
        admin = await cloud.admin()
        assert "service" not in {role["name"] for role in admin.body["roles"]}
