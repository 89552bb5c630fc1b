"""Credentials of users, those of EC2 among them, on both databases."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.embedded.identity.tables import credentials
from tests.unit.embedded.identity.harness import Caller, Cloud, by_credential, cloud_at, sqlite_at


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[Cloud]:
    async with cloud_at(sqlite_at(tmp_path)) as running:
        yield running


def ec2(access: str = "key", secret: str = "hidden") -> str:
    return json.dumps({"access": access, "secret": secret})


async def test_a_user_keeps_a_secret(cloud: Cloud) -> None:
    admin = await cloud.admin()
    alice, bob = await cloud.member(admin, "alice"), await cloud.member(admin, "bob")
    made = await alice.make("/credentials", type="totp", blob="A SECRET")
    assert made == {
        "id": made["id"], "user_id": alice.user_id, "project_id": None, "type": "totp", "blob": "A SECRET",
        "links": {"self": f"http://cloud.example/identity/v3/credentials/{made['id']}"},
    }  # fmt: skip
    path = f"/credentials/{made['id']}"
    assert (await alice.get(path))["credential"] == made == (await admin.get(path))["credential"]
    stored = await cloud.identity.core.database.read(lambda conn: conn.execute(sa.select(credentials.c.blob)).scalar())
    assert stored and b"SECRET" not in stored
    for method, body in (("GET", None), ("PATCH", {"credential": {"blob": "x"}}), ("DELETE", None)):
        assert (await bob.request(method, path, body)).status == 403
    other = await bob.make("/credentials", type="cert", blob="another")
    assert [each["id"] for each in (await alice.get("/credentials"))["credentials"]] == [made["id"]]
    assert (await alice.get(f"/credentials?user_id={bob.user_id}"))["credentials"] == []
    assert {each["id"] for each in (await admin.get("/credentials"))["credentials"]} == {made["id"], other["id"]}
    assert [each["id"] for each in (await admin.get("/credentials?type=cert"))["credentials"]] == [other["id"]]
    of_user = await admin.get(f"/credentials?user_id={alice.user_id}")
    assert [each["id"] for each in of_user["credentials"]] == [made["id"]]
    changed = await alice.do("PATCH", path, {"credential": {"blob": "new", "type": "totp"}}, 200)
    assert changed["credential"] == {**made, "blob": "new"}
    for name, value in (("type", "cert"), ("user_id", bob.user_id), ("project_id", "x")):
        assert (await alice.request("PATCH", path, {"credential": {name: value}})).status == 400
    await alice.do("DELETE", path)
    assert (await admin.request("GET", path)).status == 404
    assert (await admin.request("DELETE", path)).status == 404
    body = {"credential": {"type": "cert", "blob": "x", "user_id": alice.user_id}}
    assert (await bob.request("POST", "/credentials", body)).status == 403
    assert (await admin.request("POST", "/credentials", body)).status == 201
    body["credential"]["user_id"] = "nobody"
    assert (await admin.request("POST", "/credentials", body)).status == 404


async def test_ec2_credentials(cloud: Cloud) -> None:
    admin = await cloud.admin()
    alice, bob = await cloud.member(admin, "alice"), await cloud.member(admin, "bob")
    project = alice.body["project"]["id"]
    path = f"/users/{alice.user_id}/credentials/OS-EC2"
    made = (await alice.do("POST", path, {"tenant_id": project}, 201))["credential"]
    assert made["access"] and made["secret"] and made["access"] != made["secret"]
    assert (made["user_id"], made["tenant_id"], made["trust_id"]) == (alice.user_id, project, None)
    assert made["links"]["self"].endswith(f"{path}/{made['access']}")
    for caller in (alice, admin):
        assert (await caller.get(f"{path}/{made['access']}"))["credential"] == made
        assert (await caller.get(path))["credentials"] == [made]
    [stored] = (await alice.get("/credentials?type=ec2"))["credentials"]
    assert json.loads(stored["blob"])["access"] == made["access"]
    for method, url in (("GET", path), ("POST", path), ("GET", f"{path}/{made['access']}")):
        assert (await bob.request(method, url, {"tenant_id": project} if method == "POST" else None)).status == 403
    foreign = f"/users/{bob.user_id}/credentials/OS-EC2/{made['access']}"
    assert (await bob.request("GET", foreign)).status == 404
    assert (await bob.request("DELETE", foreign)).status == 404
    assert (await alice.request("POST", path, {"tenant_id": "nothing"})).status == 404
    await alice.do("DELETE", f"{path}/{made['access']}")
    assert (await alice.request("GET", f"{path}/{made['access']}")).status == 404
    assert (await alice.get(path))["credentials"] == []


BAD: list[dict[str, Any]] = [
    {},
    {"type": "cert"},
    {"blob": "x"},
    {"type": "", "blob": "x"},
    {"type": "cert", "blob": 5},
    {"type": "cert", "blob": "x" * 16_385},
    {"type": "cert", "blob": "x", "id": "y"},
    {"type": "ec2", "blob": ec2()},
    {"type": "ec2", "blob": "x", "project_id": "P"},
    {"type": "ec2", "blob": "[]", "project_id": "P"},
    {"type": "ec2", "blob": '{"secret": "x"}', "project_id": "P"},
    {"type": "EC2", "blob": '{"access": ""}', "project_id": "P"},
]


async def test_a_reader_changes_no_ec2_credentials_on_either_path(cloud: Cloud) -> None:
    admin = await cloud.admin()
    reader = await cloud.member(admin, "rita", "reader")
    own = {"type": "EC2", "blob": ec2("own"), "project_id": reader.project_id, "user_id": reader.user_id}
    made = await admin.make("/credentials", **own)
    body = {"credential": {**own, "blob": ec2("other")}}
    by_path = f"/users/{reader.user_id}/credentials/OS-EC2"
    for method, path, sent in (
        ("POST", "/credentials", body),
        ("POST", by_path, {"tenant_id": reader.project_id}),
        ("PATCH", f"/credentials/{made['id']}", {"credential": {"blob": ec2("own", "new")}}),
        ("DELETE", f"/credentials/{made['id']}", None),
        ("DELETE", f"{by_path}/own", None),
    ):
        assert (await reader.request(method, path, sent)).status == 403, (method, path)
    assert (await reader.get(f"/credentials/{made['id']}"))["credential"]["blob"] == ec2("own")
    await reader.make("/credentials", type="totp", blob="x")


async def test_bad_input(cloud: Cloud) -> None:
    alice = await cloud.member(await cloud.admin(), "alice")
    project = alice.body["project"]["id"]
    for body in BAD:
        sent = {**body, "project_id": project} if body.get("project_id") == "P" else body
        answer = await alice.request("POST", "/credentials", {"credential": sent})
        assert answer.status == 400, (body, answer)
    good = {"type": "ec2", "blob": ec2(), "project_id": project}
    made = await alice.make("/credentials", **good)
    assert (await alice.request("POST", "/credentials", {"credential": good})).status == 409
    assert (await alice.request("PATCH", f"/credentials/{made['id']}", {"credential": {"blob": "x"}})).status == 400
    assert len((await alice.get("/credentials"))["credentials"]) == 1


async def test_a_user_has_a_limited_number(cloud: Cloud) -> None:
    alice = await cloud.member(await cloud.admin(), "alice")
    for number in range(100):
        await alice.make("/credentials", type="cert", blob=f"{number}")
    assert (await alice.request("POST", "/credentials", {"credential": {"type": "cert", "blob": "x"}})).status == 403


async def test_credentials_go_with_their_user_project_and_domain(cloud: Cloud) -> None:
    admin = await cloud.admin()
    alice = await cloud.member(admin, "alice")
    project = await admin.make("/projects", name="other")
    await alice.make("/credentials", type="cert", blob="x")
    await alice.make("/credentials", type="ec2", blob=ec2(), project_id=project["id"])
    await admin.do("DELETE", f"/projects/{project['id']}")
    assert [each["type"] for each in (await admin.get("/credentials"))["credentials"]] == ["cert"]
    await admin.do("DELETE", f"/users/{alice.user_id}")
    assert (await admin.get("/credentials"))["credentials"] == []
    domain = await admin.make("/domains", name="d")
    user = await admin.make("/users", name="of-domain", domain_id=domain["id"])
    await admin.make("/credentials", type="cert", blob="x", user_id=user["id"])
    await admin.do("PATCH", f"/domains/{domain['id']}", {"domain": {"enabled": False}}, 200)
    await admin.do("DELETE", f"/domains/{domain['id']}")
    assert (await admin.get("/credentials"))["credentials"] == []


@pytest.mark.parametrize("unrestricted", [False, True])
async def test_an_application_credential_has_no_access_to_them(cloud: Cloud, unrestricted: bool) -> None:
    """With a secret of EC2 it could get tokens with all roles of its user."""
    alice = await cloud.member(await cloud.admin(), "alice")
    made = await alice.make("/credentials", type="cert", blob="x")
    path = f"/users/{alice.user_id}/application_credentials"
    credential = await alice.make(path, name="r", unrestricted=unrestricted)
    caller: Caller = cloud.caller(await cloud.authenticate(by_credential(credential)))
    project = alice.body["project"]["id"]
    for method, url, body in (
        ("POST", "/credentials", {"credential": {"type": "cert", "blob": "x"}}),
        ("PATCH", f"/credentials/{made['id']}", {"credential": {"blob": "y"}}),
        ("DELETE", f"/credentials/{made['id']}", None),
        ("GET", "/credentials", None),
        ("GET", f"/credentials/{made['id']}", None),
        ("POST", f"/users/{alice.user_id}/credentials/OS-EC2", {"tenant_id": project}),
        ("GET", f"/users/{alice.user_id}/credentials/OS-EC2", None),
    ):
        assert (await caller.request(method, url, body)).status == 403, (method, url)
