"""Key pairs at every microversion at which they change."""

import asyncio

import pytest
from cryptography.hazmat.primitives import serialization

from micronova.api.compute import keypair_crypto
from tests.functional.api.resources import Cloud, cloud  # noqa: F401
from tests.schemas.tempest import check, versions_of

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEgrr4VKlvI4YyeFL5Ej/0tBUaKhIqk5M2u6YCEXeQbD someone"
FINGERPRINT = "38:bf:9b:41:1a:3f:ec:fc:33:cd:36:6e:a9:1d:83:da"


def _body(name: str, **more: object) -> dict[str, object]:
    return {"keypair": {"name": name, **more}}


@pytest.mark.parametrize("minor", versions_of("keypairs", 10, 35, 75, 92))
async def test_every_answer_is_what_tempest_accepts(cloud: Cloud, minor: int) -> None:
    answer = await cloud.member.post("/os-keypairs", _body("mine", public_key=KEY), minor)
    check("keypairs", "create_keypair", minor, answer.status, answer.json())
    assert "private_key" not in answer.json()["keypair"]
    answer = await cloud.member.get("/os-keypairs/mine", minor)
    check("keypairs", "get_keypair", minor, answer.status, answer.json())
    assert answer.json()["keypair"]["public_key"] == KEY
    answer = await cloud.member.get("/os-keypairs", minor)
    check("keypairs", "list_keypairs", minor, answer.status, answer.json())
    assert [each["keypair"]["name"] for each in answer.json()["keypairs"]] == ["mine"]
    assert ("type" in answer.json()["keypairs"][0]["keypair"]) == (minor >= 2)
    answer = await cloud.member.delete("/os-keypairs/mine", minor)
    check("keypairs", "delete_keypair", minor, answer.status, answer.json())
    assert (await cloud.member.get("/os-keypairs/mine", minor)).status == 404
    assert (await cloud.member.delete("/os-keypairs/mine", minor)).status == 404


@pytest.mark.parametrize("minor", [1, 2, 91])
async def test_a_key_is_made_for_those_who_bring_none(cloud: Cloud, minor: int) -> None:
    answer = await cloud.member.post("/os-keypairs", _body("made"), minor)
    check("keypairs", "create_keypair", minor, answer.status, answer.json())
    made = answer.json()["keypair"]
    private = serialization.load_pem_private_key(made["private_key"].encode(), None)
    public = private.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    assert made["public_key"].startswith(public.decode())
    assert made["fingerprint"] == keypair_crypto.fingerprint("ssh", made["public_key"])


async def test_no_key_is_made_since_2_92(cloud: Cloud) -> None:
    answer = await cloud.member.post("/os-keypairs", _body("made"), 92)
    assert answer.status == 400 and b"public_key" in answer.body


async def test_certificates(cloud: Cloud) -> None:
    made = (await cloud.member.post("/os-keypairs", _body("win", type="x509"), 2)).json()["keypair"]
    assert made["type"] == "x509" and made["public_key"].startswith("-----BEGIN CERTIFICATE-----")
    answer = await cloud.member.post("/os-keypairs", _body("copy", type="x509", public_key=made["public_key"]), 92)
    assert answer.status == 201 and answer.json()["keypair"]["fingerprint"] == made["fingerprint"]
    assert len(made["fingerprint"].split(":")) == 20


async def test_a_fingerprint_is_md5_in_pairs() -> None:
    assert len(keypair_crypto.fingerprint("ssh", KEY).split(":")) == 16


async def test_names_by_version(cloud: Cloud) -> None:
    async def status(name: str, minor: int) -> int:
        return (await cloud.member.post("/os-keypairs", _body(name, public_key=KEY), minor)).status

    assert await status("a@b.c", 91) == 400
    assert await status("a@b.c", 92) == 201
    assert await status("a b-c_d", 2) == 201
    assert (await cloud.member.get("/os-keypairs/a%20b-c_d", 2)).json()["keypair"]["name"] == "a b-c_d"
    assert await status(" a", 2) == 400
    assert await status("ключ", 92) == 400
    old = await cloud.member("POST", "/os-keypairs", _body(" spaced ", public_key=KEY), prefix="/v2")
    assert old.status == 200 and old.json()["keypair"]["name"] == "spaced"


async def test_pages_since_2_35(cloud: Cloud) -> None:
    for number in range(5):
        await cloud.member.post("/os-keypairs", _body(f"k{number}", public_key=KEY), 2)
    body = (await cloud.member.get("/os-keypairs?limit=2", 35)).json()
    assert [each["keypair"]["name"] for each in body["keypairs"]] == ["k0", "k1"]
    assert body["keypairs_links"][0]["href"].endswith("/os-keypairs?limit=2&marker=k1")
    body = (await cloud.member.get("/os-keypairs?limit=9&marker=k3", 35)).json()
    assert [each["keypair"]["name"] for each in body["keypairs"]] == ["k4"] and "keypairs_links" not in body
    assert (await cloud.member.get("/os-keypairs?marker=nothing", 35)).status == 400
    assert len((await cloud.member.get("/os-keypairs?limit=2", 34)).json()["keypairs"]) == 5


async def test_another_users_keys_are_for_administrators(cloud: Cloud) -> None:
    await cloud.member.post("/os-keypairs", _body("mine", public_key=KEY), 2)
    assert (await cloud.stranger.get("/os-keypairs/mine", 10)).status == 404
    assert (await cloud.stranger.get("/os-keypairs/mine?user_id=ada", 10)).status == 403
    assert (await cloud.admin.get("/os-keypairs/mine?user_id=ada", 10)).status == 200
    assert len((await cloud.admin.get("/os-keypairs?user_id=ada", 10)).json()["keypairs"]) == 1
    assert len((await cloud.admin.get("/os-keypairs?user_id=ada", 9)).json()["keypairs"]) == 0
    answer = await cloud.admin.post("/os-keypairs", _body("given", public_key=KEY, user_id="ada"), 10)
    assert answer.status == 201 and answer.json()["keypair"]["user_id"] == "ada"
    assert (await cloud.member.post("/os-keypairs", _body("x", public_key=KEY, user_id="eve"), 10)).status == 403
    assert (await cloud.admin.delete("/os-keypairs/given?user_id=ada", 10)).status == 204


async def test_the_quota_holds_under_concurrency(cloud: Cloud) -> None:
    await cloud.admin.put("/os-quota-sets/red", {"quota_set": {"key_pairs": 5}})
    answers = await asyncio.gather(
        *(cloud.member.post("/os-keypairs", _body(f"k{number}", public_key=KEY), 2) for number in range(20))
    )
    assert sorted(answer.status for answer in answers) == [201] * 5 + [403] * 15
    assert b"Quota exceeded for key_pairs" in max(answers, key=lambda answer: answer.status).body
    await cloud.member.delete("/os-keypairs/k0", 2)
    names = (await cloud.member.get("/os-keypairs")).json()["keypairs"]
    await cloud.member.delete(f"/os-keypairs/{names[0]['keypair']['name']}", 2)
    assert (await cloud.member.post("/os-keypairs", _body("again", public_key=KEY), 2)).status == 201


async def test_a_name_is_taken_once_even_when_two_ask(cloud: Cloud) -> None:
    answers = await asyncio.gather(
        *(cloud.member.post("/os-keypairs", _body("same", public_key=KEY), 2) for _ in range(4))
    )
    assert sorted(answer.status for answer in answers) == [201, 409, 409, 409]
    assert (await cloud.admin.get("/limits?tenant_id=red")).status == 200
