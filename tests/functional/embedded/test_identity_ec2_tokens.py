"""Tokens for requests that were signed with an EC2 credential."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from micronova.embedded.identity.ec2_signatures import WINDOW
from micronova.http.client import Answer
from tests.clocks import HeldClock
from tests.ec2 import version_2, version_4
from tests.unit.embedded.identity.harness import SERVICE, Caller, Cloud, by_token, cloud_at, sqlite_at

PATH = "/ec2tokens"


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@pytest.fixture
async def cloud(tmp_path: Path, clock: HeldClock) -> AsyncIterator[Cloud]:
    async with cloud_at(sqlite_at(tmp_path), clock=clock) as running:
        yield running


async def keys(user: Caller) -> tuple[str, str]:
    path = f"/users/{user.user_id}/credentials/OS-EC2"
    made = (await user.do("POST", path, {"tenant_id": user.project_id}, 201))["credential"]
    return made["access"], made["secret"]


async def asked(service: Caller, signed: dict[str, Any], name: str = "credentials") -> Answer:
    return await service.request("POST", PATH, {name: signed})


async def test_a_signed_request_gives_a_token_of_its_signer(cloud: Cloud, clock: HeldClock) -> None:
    admin = await cloud.admin()
    alice = await cloud.member(admin, "alice")
    access, secret = await keys(alice)
    service = await cloud.login(*SERVICE)
    now = clock.now()
    for name, signed in (
        ("credentials", version_2(access, secret, now)),
        ("credential", version_2(access, secret, now, host="ec2.example")),
        ("ec2Credentials", version_4(access, secret, now)),
        ("credentials", version_4(access, secret, now, in_query=True)),
        ("credentials", version_2(access, secret, now - WINDOW)),
        ("credentials", version_4(access, secret, now + WINDOW)),
    ):
        for who in (service, admin):
            answer = await asked(who, signed, name)
            assert answer.status == 200, (signed, answer)
        token = answer.json()["token"]
        assert (token["user"]["id"], token["project"]["id"]) == (alice.user_id, alice.project_id)
        assert token["methods"] == ["ec2credential"] and token["catalog"]
        assert {role["name"] for role in token["roles"]} == {"member", "reader"}
        issued = answer.headers["x-subject-token"]
        assert (await service.get("/auth/tokens", subject=issued))["token"]["user"] == token["user"]
    assert (await service.request("GET", PATH)).status == 405


async def test_only_services_and_administrators_may_ask(cloud: Cloud, clock: HeldClock) -> None:
    alice = await cloud.member(await cloud.admin(), "alice")
    access, secret = await keys(alice)
    signed = version_2(access, secret, clock.now())
    assert (await asked(alice, signed)).status == 403
    assert (await cloud.request("POST", PATH, {"credentials": signed})).status == 401


async def test_other_requests_are_refused(cloud: Cloud, clock: HeldClock) -> None:
    admin = await cloud.admin()
    alice = await cloud.member(admin, "alice")
    access, secret = await keys(alice)
    other, _ = await keys(alice)
    now = clock.now()

    def changed(signed: dict[str, Any], name: str, **fields: Any) -> dict[str, Any]:
        return {**signed, name: {**signed[name], **fields}}

    two, four = version_2(access, secret, now), version_4(access, secret, now)
    in_query = version_4(access, secret, now, in_query=True)
    late = {"Timestamp": "2020-01-01T00:00:00Z"}
    for signed, status in (
        ({}, 401),
        ({"access": access}, 401),
        ({**two, "signature": ""}, 401),
        ({**two, "signature": "é"}, 401),
        (version_2(access, "wrong", now), 401),
        (version_4(access, "wrong", now), 401),
        ({**two, "access": "0" * 32}, 404),
        ({**two, "access": other}, 401),
        ({**four, "access": other}, 401),
        ({**two, "verb": "POST"}, 401),
        ({**two, "path": "/"}, 401),
        ({**two, "host": "evil.example"}, 401),
        (changed(two, "params", Action="TerminateInstances"), 401),
        (changed(two, "params", **late), 401),
        (changed(two, "params", SignatureVersion="1"), 401),
        (changed(two, "params", SignatureVersion="0"), 401),
        ({**two, "params": {}}, 401),
        ({**four, "body_hash": "0" * 64}, 401),
        (changed(four, "headers", Host="evil.example"), 401),
        (changed(four, "headers", **{"X-Amz-Date": "20200101T000000Z"}), 401),
        (changed(four, "headers", Authorization="AWS4-HMAC-SHA256 Credential="), 401),
        (changed(in_query, "params", Action="TerminateInstances"), 401),
        (version_2(access, secret, now - WINDOW - 1), 401),
        (version_2(access, secret, now + WINDOW + 1), 401),
        (version_4(access, secret, now - WINDOW - 1), 401),
        # A parameter of a POST is not signed by version 4: a newer time there does not help.
        (changed(version_4(access, secret, now - WINDOW - 1), "params", Timestamp=two["params"]["Timestamp"]), 401),
    ):
        answer = await asked(admin, signed)
        assert answer.status == status, (signed, answer)
        assert secret not in answer.body.decode()
    for body in ({}, {"credentials": 5}, {"credentials": {"access": 5}}, {"credentials": {**two, "params": 1}}):
        assert (await admin.request("POST", PATH, body)).status == (400 if body else 401)
    assert (await asked(admin, two)).status == 200


async def test_credentials_that_give_no_token(cloud: Cloud, clock: HeldClock) -> None:
    admin = await cloud.admin()
    alice = await cloud.member(admin, "alice")
    project = alice.project_id
    cases: list[tuple[dict[str, Any], int]] = [
        ({"secret": "s"}, 200),
        ({}, 401),
        ({"secret": 5}, 401),
        ({"secret": "s", "trust_id": "x"}, 401),
        ({"secret": "s", "app_cred_id": "x"}, 401),
    ]
    for number, (fields, status) in enumerate(cases):
        access = f"key-{number}"
        blob = msgspec.json.encode({"access": access, **fields}).decode()
        await alice.make("/credentials", type="ec2", blob=blob, project_id=project)
        answer = await asked(admin, version_4(access, "s", clock.now()))
        assert answer.status == status, (fields, answer)
    blob = msgspec.json.encode({"access": "key", "secret": "s"}).decode()
    await alice.make("/credentials", type="ec2", blob=blob, project_id=admin.project_id)
    assert (await asked(admin, version_4("key", "s", clock.now()))).status == 401, "she has no role there"
    access, secret = await keys(alice)
    for path, body in (
        (f"/projects/{project}", {"project": {"enabled": False}}),
        (f"/projects/{project}", {"project": {"enabled": True}}),
        (f"/users/{alice.user_id}", {"user": {"enabled": False}}),
    ):
        await admin.do("PATCH", path, body, 200)
        [enabled] = [value["enabled"] for value in body.values()]
        assert (await asked(admin, version_4(access, secret, clock.now()))).status == (200 if enabled else 401)
    await admin.do("DELETE", f"/users/{alice.user_id}")
    assert (await asked(admin, version_4(access, secret, clock.now()))).status == 404


async def test_a_token_of_a_signature_is_for_other_services_only(cloud: Cloud, clock: HeldClock) -> None:
    admin = await cloud.admin()
    answer = await asked(admin, version_4(*await keys(admin), clock.now()))
    caller = Caller(cloud, answer.headers["x-subject-token"], answer.json()["token"])
    assert "admin" in caller.roles
    for method, path, body in (
        ("GET", "/users", None),
        ("GET", "/credentials", None),
        ("GET", "/auth/catalog", None),
        ("POST", f"/users/{admin.user_id}/application_credentials", {"application_credential": {"name": "x"}}),
        ("POST", "/users", {"user": {"name": "x"}}),
        ("DELETE", f"/users/{admin.user_id}", None),
    ):
        assert (await caller.request(method, path, body, subject=caller.token)).status == 403, (method, path)
    assert (await cloud.authenticate(by_token(caller.token))).status == 403
