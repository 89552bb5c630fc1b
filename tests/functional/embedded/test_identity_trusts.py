"""Trusts, and the tokens that they give."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.http.client import Answer
from micronova.http.paging import iso_from_seconds
from tests.clocks import HeldClock
from tests.unit.embedded.identity.harness import (
    Caller,
    Cloud,
    by_credential,
    by_password,
    by_token,
    cloud_at,
    sqlite_at,
)

PATH = "/OS-TRUST/trusts"


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@pytest.fixture
async def cloud(tmp_path: Path, clock: HeldClock) -> AsyncIterator[Cloud]:
    async with cloud_at(sqlite_at(tmp_path), clock=clock) as running:
        yield running


async def parties(cloud: Cloud) -> tuple[Caller, Caller, Caller]:
    admin = await cloud.admin()
    return admin, await cloud.member(admin, "alice", "manager"), await cloud.member(admin, "bob")


async def given(trustor: Caller, trustee: Caller, **fields: Any) -> dict[str, Any]:
    return await trustor.make(
        PATH,
        **{
            "trustor_user_id": trustor.user_id,
            "trustee_user_id": trustee.user_id,
            "project_id": trustor.project_id,
            "impersonation": False,
            "roles": [{"name": "member"}],
            **fields,
        },
    )


async def use(cloud: Cloud, user: str, trust: dict[str, Any]) -> Answer:
    return await cloud.authenticate(by_password(user, "secret"), {"OS-TRUST:trust": {"id": trust["id"]}})


async def test_a_trust_is_made_shown_and_deleted(cloud: Cloud, clock: HeldClock) -> None:
    admin, alice, bob = await parties(cloud)
    carol = await cloud.member(admin, "carol")
    made = await given(alice, bob, expires_at="2100-01-01T00:00:00.000000Z")
    role = (await admin.get("/roles?name=member"))["roles"][0]
    path = f"{PATH}/{made['id']}"
    assert made == {
        "id": made["id"], "trustor_user_id": alice.user_id, "trustee_user_id": bob.user_id,
        "project_id": alice.project_id, "impersonation": False, "expires_at": "2100-01-01T00:00:00.000000Z",
        "remaining_uses": None, "redelegation_count": 0, "redelegated_trust_id": None, "deleted_at": None,
        "links": {"self": f"http://cloud.example/identity/v3{path}"}, "roles": [role],
        "roles_links": {"self": f"http://cloud.example/identity/v3{path}/roles", "next": None, "previous": None},
    }  # fmt: skip
    for caller in (alice, bob, admin):
        assert (await caller.get(path))["trust"] == made
        assert (await caller.get(f"{path}/roles"))["roles"] == [role]
        assert (await caller.get(f"{path}/roles/{role['id']}"))["role"] == role
        assert (await caller.request("HEAD", f"{path}/roles/{role['id']}")).status == 200
        assert (await caller.request("GET", f"{path}/roles/other")).status == 404
    for url in (path, f"{path}/roles", f"{path}/roles/{role['id']}"):
        assert (await carol.request("GET", url)).status == 404, url
    assert (await carol.request("DELETE", path)).status == 404
    for url in (PATH, f"{PATH}?trustor_user_id={alice.user_id}", f"{PATH}?trustee_user_id={bob.user_id}"):
        assert (await carol.request("GET", url)).status == 403, url
    summary = {name: value for name, value in made.items() if name not in ("roles", "roles_links")}
    for caller, query in (
        (alice, f"?trustor_user_id={alice.user_id}"), (bob, f"?trustee_user_id={bob.user_id}"), (admin, ""),
    ):  # fmt: skip
        assert (await caller.get(PATH + query))["trusts"] == [summary]
    assert (await alice.get(f"{PATH}?trustee_user_id={alice.user_id}"))["trusts"] == []
    assert (await bob.request("DELETE", path)).status == 403, "only the trustor deletes it"
    await alice.do("DELETE", path)
    for caller in (alice, admin):
        assert (await caller.request("GET", path)).status == 404
        assert (await caller.request("DELETE", path)).status == 404
    short = await given(alice, bob, expires_at=iso_from_seconds(clock.now() + 60))
    clock.time += 60
    assert (await admin.request("GET", f"{PATH}/{short['id']}")).status == 404
    assert (await admin.get(PATH))["trusts"] == []


async def test_who_may_trust_whom_with_what(cloud: Cloud) -> None:
    admin, alice, bob = await parties(cloud)
    good = {
        "trustor_user_id": alice.user_id, "trustee_user_id": bob.user_id, "project_id": alice.project_id,
        "impersonation": True, "roles": [{"name": "member"}],
    }  # fmt: skip
    for changed, status in (
        ({"trustor_user_id": bob.user_id}, 403),
        ({"trustee_user_id": "nobody"}, 404),
        ({"project_id": "nothing"}, 404),
        ({"project_id": bob.project_id}, 404),
        ({"project_id": None}, 404),
        ({"roles": []}, 403),
        ({"roles": [{}]}, 400),
        ({"roles": [{"name": "admin"}]}, 404),
        ({"roles": [{"id": "nothing"}]}, 404),
        ({"expires_at": "bad.123Z"}, 400),
        ({"expires_at": "2000-01-01T00:00:00Z"}, 400),
        ({"remaining_uses": 0}, 400),
        ({"allow_redelegation": True, "redelegation_count": 4}, 403),
        ({"allow_redelegation": True, "remaining_uses": 1}, 400),
        ({"redelegation_count": -1}, 400),
        ({"unknown": 1}, 400),
    ):
        answer = await alice.request("POST", PATH, {"trust": {**good, **changed}})
        assert answer.status == status, (changed, answer)
    assert (await admin.request("POST", PATH, {"trust": good})).status == 403, "not even an administrator"
    assert (await admin.get(PATH))["trusts"] == []


async def test_an_application_credential_delegates_only_what_it_has(cloud: Cloud) -> None:
    admin, alice, bob = await parties(cloud)
    member = (await admin.get("/roles?name=member"))["roles"][0]["id"]
    other = await admin.make("/projects", name="other")
    await admin.do("PUT", f"/projects/{other['id']}/users/{alice.user_id}/roles/{member}")
    credentials = f"/users/{alice.user_id}/application_credentials"
    made = await alice.make(credentials, name="robot", roles=[{"name": "member"}], unrestricted=True)
    robot = cloud.caller(await cloud.authenticate(by_credential(made)))
    good = {
        "trustor_user_id": alice.user_id, "trustee_user_id": bob.user_id, "project_id": alice.project_id,
        "impersonation": True, "roles": [{"name": "member"}],
    }  # fmt: skip
    for more in ({"roles": [{"name": "manager"}]}, {"project_id": other["id"]}):
        assert (await alice.request("POST", PATH, {"trust": good | more})).status == 201, "the user herself may"
        assert (await robot.request("POST", PATH, {"trust": good | more})).status == 403, more
    trust = await robot.make(PATH, **good)
    assert cloud.caller(await use(cloud, "bob", trust)).roles == {"member", "reader"}


@pytest.mark.parametrize("impersonation", [True, False])
async def test_a_token_for_a_trust(cloud: Cloud, impersonation: bool) -> None:
    admin, alice, bob = await parties(cloud)
    trust = await given(alice, bob, impersonation=impersonation)
    token = cloud.caller(await use(cloud, "bob", trust))
    assert token.user_id == (alice if impersonation else bob).user_id
    assert token.project_id == alice.project_id
    assert token.roles == {"member", "reader"}, "what the role implies, and not what else the trustor has"
    expected = {
        "id": trust["id"], "impersonation": impersonation, "trustee_user": {"id": bob.user_id},
        "trustor_user": {"id": alice.user_id},
    }  # fmt: skip
    assert token.body["OS-TRUST:trust"] == expected
    shown = (await admin.request("GET", "/auth/tokens", subject=token.token)).json()["token"]
    assert shown["OS-TRUST:trust"] == expected
    assert (await use(cloud, "alice", trust)).status == 403, "alice is not the trustee"
    assert (await use(cloud, "bob", {"id": "nothing"})).status == 401
    # It is not the source of further rights.
    for scope in (None, {"project": {"id": bob.project_id}}, {"OS-TRUST:trust": {"id": trust["id"]}}):
        assert (await cloud.authenticate(by_token(token.token), scope)).status == 403
    await token.get(f"/projects/{alice.project_id}")
    for method, path, body in (
        ("POST", PATH, {"trust": {
            "trustor_user_id": token.user_id, "trustee_user_id": bob.user_id, "project_id": alice.project_id,
            "impersonation": False, "roles": [{"name": "member"}],
        }}),
        ("POST", f"/users/{token.user_id}/application_credentials", {"application_credential": {"name": "x"}}),
        ("POST", "/credentials", {"credential": {"type": "cert", "blob": "x"}}),
        ("GET", "/credentials", None),
        ("GET", f"/users/{token.user_id}/credentials/OS-EC2", None),
    ):  # fmt: skip
        assert (await token.request(method, path, body)).status == 403, (method, path)


async def test_a_trust_is_used_a_number_of_times(cloud: Cloud) -> None:
    admin, alice, bob = await parties(cloud)
    trust = await given(alice, bob, remaining_uses=2)
    assert (await use(cloud, "alice", trust)).status == 403, "a refusal is no use"
    for left in (1, 0):
        assert (await use(cloud, "bob", trust)).status == 201
        assert (await admin.get(f"{PATH}/{trust['id']}"))["trust"]["remaining_uses"] == left
    assert (await use(cloud, "bob", trust)).status == 403


LOSSES = ["trust", "role", "trustor", "trustee", "project", "expiry"]


@pytest.mark.parametrize("impersonation", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
async def test_a_token_ends_with_what_it_rests_on(
    cloud: Cloud, clock: HeldClock, loss: str, impersonation: bool
) -> None:
    admin, alice, bob = await parties(cloud)
    expires = iso_from_seconds(clock.now() + 60) if loss == "expiry" else None
    trust = await given(alice, bob, impersonation=impersonation, expires_at=expires)
    token = cloud.caller(await use(cloud, "bob", trust))
    await token.get("/auth/catalog")
    manager = (await admin.get("/roles?name=manager"))["roles"][0]["id"]
    disabled = {"enabled": False}
    match loss:
        case "trust":
            await alice.do("DELETE", f"{PATH}/{trust['id']}")
        case "role":
            await admin.do("DELETE", f"/projects/{alice.project_id}/users/{alice.user_id}/roles/{manager}")
        case "trustor":
            await admin.do("PATCH", f"/users/{alice.user_id}", {"user": disabled}, 200)
        case "trustee":
            await admin.do("PATCH", f"/users/{bob.user_id}", {"user": disabled}, 200)
        case "project":
            await admin.do("PATCH", f"/projects/{alice.project_id}", {"project": disabled}, 200)
        case _:
            clock.time += 60
    assert (await token.request("GET", "/auth/catalog")).status == 401
    assert (await use(cloud, "bob", trust)).status == (403 if loss == "trustor" else 401)


async def test_trusts_go_with_their_parties(cloud: Cloud) -> None:
    admin, alice, bob = await parties(cloud)
    await given(alice, bob)
    await admin.do("DELETE", f"/users/{bob.user_id}")
    assert (await admin.get(PATH))["trusts"] == []
    carol = await cloud.member(admin, "carol")
    await given(alice, carol)
    await admin.do("DELETE", f"/users/{alice.user_id}")
    assert (await admin.get(PATH))["trusts"] == []
    await given(carol, await cloud.member(admin, "dave"))
    await admin.do("DELETE", f"/projects/{carol.project_id}")
    assert (await admin.get(PATH))["trusts"] == []


async def as_trustee(cloud: Cloud, user: str, trust: dict[str, Any]) -> Caller:
    return cloud.caller(await use(cloud, user, trust))


@pytest.mark.parametrize("impersonation", [True, False])
async def test_a_trust_is_redelegated(cloud: Cloud, impersonation: bool) -> None:
    admin, alice, bob = await parties(cloud)
    carol, dave = await cloud.member(admin, "carol"), await cloud.member(admin, "dave")
    first = await given(alice, bob, impersonation=impersonation, allow_redelegation=True, redelegation_count=2)
    assert (first["redelegation_count"], first["redelegated_trust_id"]) == (2, None)
    trustee = await as_trustee(cloud, "bob", first)
    common = {"project_id": alice.project_id, "impersonation": impersonation}
    second = await given(trustee, carol, **common, allow_redelegation=True)
    assert (second["redelegation_count"], second["redelegated_trust_id"]) == (1, first["id"])
    assert second["trustor_user_id"] == (alice.user_id if impersonation else bob.user_id)
    trustee = await as_trustee(cloud, "carol", second)
    assert trustee.user_id == (alice.user_id if impersonation else carol.user_id)
    assert (trustee.project_id, trustee.roles) == (alice.project_id, {"member", "reader"})
    third = await given(trustee, dave, **common, allow_redelegation=True)
    assert (third["redelegation_count"], third["redelegated_trust_id"]) == (0, second["id"])
    last = await as_trustee(cloud, "dave", third)
    assert last.roles == {"member", "reader"}
    body = {**common, "trustor_user_id": last.user_id, "trustee_user_id": bob.user_id, "roles": [{"name": "member"}]}
    assert (await last.request("POST", PATH, {"trust": body})).status == 403, "often enough"
    ended = await given(await as_trustee(cloud, "bob", first), dave, **common)
    assert ended["redelegation_count"] == 0, "no further, if nothing is said"
    none = await given(
        await as_trustee(cloud, "bob", first), dave, **common, allow_redelegation=True, redelegation_count=0
    )
    assert none["redelegation_count"] == 0
    held = await as_trustee(cloud, "dave", none)
    answer = await held.request("POST", PATH, {"trust": {**body, "trustor_user_id": held.user_id}})
    assert answer.status == 403, "its redelegation_count is 0"
    # The whole chain goes with its beginning.
    await alice.do("DELETE", f"{PATH}/{first['id']}")
    for caller in (trustee, last):
        assert (await caller.request("GET", "/auth/catalog")).status == 401
    for user, trust in (("carol", second), ("dave", third), ("dave", ended)):
        assert (await admin.request("GET", f"{PATH}/{trust['id']}")).status == 404
        assert (await use(cloud, user, trust)).status == 401


async def test_what_is_redelegated_is_not_more_than_was_given(cloud: Cloud, clock: HeldClock) -> None:
    admin, alice, bob = await parties(cloud)
    carol = await cloud.member(admin, "carol")
    until = iso_from_seconds(clock.now() + 600)
    plain = await given(alice, bob)
    first = await given(
        alice, bob, allow_redelegation=True, redelegation_count=2, expires_at=until, roles=[{"name": "reader"}]
    )
    assert (await given(alice, bob, allow_redelegation=True))["redelegation_count"] == 3
    assert (await given(alice, bob, allow_redelegation=True, redelegation_count=0))["redelegation_count"] == 0
    assert (await given(alice, bob, redelegation_count=2))["redelegation_count"] == 0
    good = {
        "trustor_user_id": bob.user_id, "trustee_user_id": carol.user_id, "project_id": alice.project_id,
        "impersonation": False, "roles": [{"name": "reader"}],
    }  # fmt: skip
    trustee = await as_trustee(cloud, "bob", first)
    for changed in (
        {"roles": [{"name": "member"}]},
        {"impersonation": True},
        {"expires_at": iso_from_seconds(clock.now() + 700)},
        {"remaining_uses": 1},
        {"allow_redelegation": True, "redelegation_count": 2},
        {"project_id": bob.project_id},
        {"trustor_user_id": alice.user_id},
    ):
        answer = await trustee.request("POST", PATH, {"trust": {**good, **changed}})
        assert answer.status == 403, (changed, answer)
    answer = await (await as_trustee(cloud, "bob", plain)).request("POST", PATH, {"trust": good})
    assert answer.status == 403, "it may not be redelegated"
    made = await trustee.make(PATH, **good)
    assert made["expires_at"] == until, "it does not last longer"
    shorter = await trustee.make(PATH, **good, expires_at=iso_from_seconds(clock.now() + 60))
    assert shorter["expires_at"] == iso_from_seconds(clock.now() + 60)
    clock.time += 600
    assert (await use(cloud, "carol", made)).status == 401


@pytest.mark.parametrize("impersonation", [True, False])
@pytest.mark.parametrize("what", ["agent disabled", "agent deleted", "role lost", "first trustor disabled"])
async def test_a_token_ends_with_what_its_chain_rests_on(cloud: Cloud, what: str, impersonation: bool) -> None:
    admin, alice, bob = await parties(cloud)
    carol = await cloud.member(admin, "carol")
    first = await given(alice, bob, impersonation=impersonation, allow_redelegation=True)
    common = {"project_id": alice.project_id, "impersonation": impersonation}
    second = await given(await as_trustee(cloud, "bob", first), carol, **common)
    last = await as_trustee(cloud, "carol", second)
    await last.get("/auth/catalog")
    if what == "agent disabled":
        await admin.do("PATCH", f"/users/{bob.user_id}", {"user": {"enabled": False}}, 200)
    elif what == "agent deleted":
        await admin.do("DELETE", f"/users/{bob.user_id}")
    elif what == "first trustor disabled":
        await admin.do("PATCH", f"/users/{alice.user_id}", {"user": {"enabled": False}}, 200)
    else:
        role = (await admin.get("/roles?name=manager"))["roles"][0]["id"]
        await admin.do("DELETE", f"/projects/{alice.project_id}/users/{alice.user_id}/roles/{role}")
    assert (await last.request("GET", "/auth/catalog")).status == 401
    assert (await use(cloud, "carol", second)).status in (401, 403)
    gone = (await admin.request("GET", f"{PATH}/{second['id']}")).status == 404
    assert gone == (what == "agent deleted")


async def test_a_trust_without_a_project_delegates_no_roles(cloud: Cloud) -> None:
    _, alice, bob = await parties(cloud)
    without: list[dict[str, Any]] = [{"project_id": None, "roles": []}, {"project_id": None}, {}]
    for fields in without:
        body = {"trustor_user_id": alice.user_id, "trustee_user_id": bob.user_id, "impersonation": True, **fields}
        made = (await alice.request("POST", PATH, {"trust": body})).json()["trust"]
        assert (made["project_id"], made["roles"]) == (None, [])
    with_role = {**body, "roles": [{"name": "member"}]}
    assert (await alice.request("POST", PATH, {"trust": with_role})).status == 404, "nobody has a role on no project"
    answer = await use(cloud, "bob", made)
    token = answer.json()["token"]
    assert token["user"]["id"] == alice.user_id
    assert not {"project", "domain", "system", "roles", "catalog"} & set(token)
    assert token["OS-TRUST:trust"]["id"] == made["id"]
    exchanged = await cloud.authenticate(
        by_token(answer.headers["x-subject-token"]), {"project": {"id": alice.project_id}}
    )
    assert exchanged.status == 403
    assert (await alice.request("DELETE", f"{PATH}/{made['id']}")).status == 204
    assert (await use(cloud, "bob", made)).status == 401
