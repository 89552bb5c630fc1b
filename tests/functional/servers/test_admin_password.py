"""changePassword: the caller waits for the guest, and nobody else learns the password."""

import asyncio
import base64
import logging
import uuid
from typing import Any

import pytest
import sqlalchemy as sa
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from micronova.db.tables import operations
from micronova.virt.driver import GuestPlan
from micronova.virt.fake.driver import FakeDriver
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process

CLOUD = CloudOptions(hosts=2)
PASSWORD = "correct horse battery staple"
ED25519 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEgrr4VKlvI4YyeFL5Ej/0tBUaKhIqk5M2u6YCEXeQbD x"


def _body(password: Any = PASSWORD) -> dict[str, Any]:
    return {"changePassword": {"adminPass": password}}


def _name() -> str:
    return f"p{uuid.uuid4().hex[:10]}"


async def _last_action(user: Caller, id: str) -> dict[str, Any]:
    [last, *_] = (await user.admin.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    path = f"/servers/{id}/os-instance-actions/{last['request_id']}"
    return dict((await user.admin.get(path))["instanceAction"])


@only_in_one_process("reads what arrives at a host, and the log of all roles")
async def test_only_the_guest_gets_the_password(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    arrived: list[tuple[str, str]] = []

    async def noted(driver: FakeDriver, plan: GuestPlan, password: str) -> None:
        arrived.append((plan.instance.uuid, password))

    monkeypatch.setattr(FakeDriver, "set_admin_password", noted)
    id = (await user.boot())["id"]
    await user.post(f"/servers/{id}/action", _body())
    assert arrived == [(id, PASSWORD)], "it is set when the answer comes"
    server = await user.show(id)
    assert (server["status"], server["OS-EXT-STS:task_state"]) == ("ACTIVE", None)
    action = await _last_action(user, id)
    assert action["action"] == "changePassword"
    assert [(event["event"], event["result"]) for event in action["events"]] == [
        ("compute_set_admin_password", "Success")
    ]
    assert (await user.get(f"/servers/{id}/os-server-password"))["password"] == "", "it has no key"
    query = sa.select(operations).where(operations.c.instance_uuid == id, operations.c.kind == "change_password")
    [row] = await cloud.read(query)
    assert row.secrets is None and PASSWORD.encode() not in row.payload + row.context
    assert PASSWORD not in caplog.text


async def test_it_is_stored_for_who_has_the_servers_rsa_key(user: Caller) -> None:
    secret = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = secret.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    for name, key in (("rsa", public.decode()), ("other", ED25519)):
        await user.post("/os-keypairs", {"keypair": {"name": name, "public_key": key, "type": "ssh"}}, 201)
    id, other = (await user.boot(key_name="rsa"))["id"], (await user.boot(key_name="other"))["id"]
    for password in ("first", PASSWORD):
        await user.post(f"/servers/{id}/action", _body(password))
        stored = (await user.get(f"/servers/{id}/os-server-password"))["password"]
        assert secret.decrypt(base64.b64decode(stored), padding.PKCS1v15()).decode() == password
    await user.post(f"/servers/{id}/action", _body("x" * 246))  # more than the key can encrypt
    assert (await user.get(f"/servers/{id}/os-server-password"))["password"] == stored
    await user.post(f"/servers/{other}/action", _body())
    assert (await user.get(f"/servers/{other}/os-server-password"))["password"] == ""


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [("fail", 409, "jammed"), ("not_supported", 501, "jammed"), ("unavailable", 202, "")],
)
async def test_a_failure(cloud: Cloud, user: Caller, kind: str, status: int, words: str) -> None:
    name = _name()
    id = (await user.boot(name=name))["id"]
    rule = {"operation": "set_admin_password", "kind": kind, "name": name, "message": "it is jammed", "count": 1}
    async with cloud.faults(rule):
        if status == 202:
            await user.post(f"/servers/{id}/action", _body())
        else:
            assert words in await user.refused(status, "POST", f"/servers/{id}/action", _body())
    server = await user.wait_for(id, "ACTIVE")
    assert "fault" not in server
    action = await _last_action(user, id)
    assert action["message"] == (None if status == 202 else "Error")
    for row in await cloud.read(sa.select(operations).where(operations.c.instance_uuid == id)):
        assert row.secrets is None
    await cloud.assert_clean()


async def test_a_delete_ends_the_wait(cloud: Cloud, user: Caller) -> None:
    name = _name()
    id = (await user.boot(name=name))["id"]
    async with cloud.faults({"operation": "set_admin_password", "kind": "hang", "name": name}):
        asking = asyncio.ensure_future(user.request("POST", f"/servers/{id}/action", _body()))
        await user.wait_for(id, "PASSWORD", task="updating_password")
        await user.refused(409, "POST", f"/servers/{id}/action", {"reboot": {"type": "HARD"}})
        await user.refused(409, "POST", f"/servers/{id}/action", _body())
        await user.delete(f"/servers/{id}")
        await user.gone(id)
        assert (await asking).status in (404, 409)
    await cloud.assert_clean()


async def test_bad_requests(user: Caller) -> None:
    id = (await user.boot())["id"]
    for body in (None, {}, {"adminPass": None}, {"adminPass": 7}, {"adminPass": "x", "user": "root"}, "x"):
        await user.refused(400, "POST", f"/servers/{id}/action", {"changePassword": body})
    await user.post(f"/servers/{id}/action", _body(""))
    await user.act(id, "lock")
    assert "locked" in await user.refused(409, "POST", f"/servers/{id}/action", _body())
    await user.act(id, "unlock")
    stranger = user.cloud.caller()
    await stranger.refused(404, "POST", f"/servers/{id}/action", _body())
