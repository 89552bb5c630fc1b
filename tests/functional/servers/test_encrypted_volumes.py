"""Servers with encrypted volumes: hosts get the key, and nobody else does."""

import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.clients.volume.client import VolumeClient
from micronova.compute.manager import ComputeManager
from micronova.compute.rpcapi import ComputeAPI
from micronova.db import nodes
from micronova.db.engine import Database
from micronova.db.tables import block_devices, operations
from micronova.objects.errors import NotFound
from micronova.objects.operations import BuildPayload
from micronova.objects.orders import DECRYPTS_VOLUMES, WorkOrder
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.test_volumes import Volumes, attachment

CLOUD = CloudOptions(roles=("volume",), hosts=2)
pytestmark = only_in_one_process("the cluster of the tests has no volume service")


class Encrypted(Volumes):
    """Volumes of a type with an encryption."""

    type_name = ""

    async def create_type(self) -> "Encrypted":
        admin = self._user.admin
        name = f"luks-{uuid.uuid4().hex[:8]}"
        made = (await self.request("POST", "/types", {"volume_type": {"name": name}}, admin))["volume_type"]["id"]
        encryption = {"provider": "luks", "control_location": "front-end", "cipher": "aes-xts-plain64", "key_size": 256}
        await self.request("POST", f"/types/{made}/encryption", {"encryption": encryption}, admin)
        self.type_name = name
        return self


@pytest_asyncio.fixture(loop_scope="module")
async def volumes(user: Caller) -> AsyncIterator[Encrypted]:
    yield await Encrypted(user).create_type()


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[WorkOrder]:
    """The orders that conductors send."""
    send, sent = ComputeAPI.send_order, list[WorkOrder]()

    async def noting(self: ComputeAPI, context: Any, order: WorkOrder) -> None:
        sent.append(order)
        await send(self, context, order)

    monkeypatch.setattr(ComputeAPI, "send_order", noting)
    return sent


def database(cloud: Cloud) -> Database:
    assert cloud.process.database is not None
    return cloud.process.database


def stored(conn: sa.Connection) -> str:
    """All text that compute's database has of disks and operations."""
    return "\n".join(str(row) for table in (block_devices, operations) for row in conn.execute(table.select()))


async def test_a_server_uses_encrypted_volumes(
    cloud: Cloud, user: Caller, volumes: Encrypted, orders: list[WorkOrder]
) -> None:
    """It boots from one, gets another one, is restarted and moves; each order to a host has the keys of both."""
    boots = await volumes.create(volume_type=volumes.type_name)
    await volumes.request("POST", f"/volumes/{boots}/action", {"os-set_bootable": {"bootable": True}})
    root = {"uuid": boots, "source_type": "volume", "destination_type": "volume", "boot_index": 0}
    server = (await user.boot(imageRef=None, block_device_mapping_v2=[root]))["id"]
    data = await volumes.create(volume_type=volumes.type_name)
    path = f"/servers/{server}/os-volume_attachments"
    await user.at(100).post(path, attachment(data), 200)
    await volumes.until(data, "in-use")
    await user.post(f"/servers/{server}/action", {"reboot": {"type": "HARD"}})
    await user.wait_for(server, "ACTIVE")
    last = orders[-1]
    assert last.kind == "reboot" and len(last.volumes) == 2
    keys = {each.volume_id: each.secret for each in last.volumes}
    assert len(set(keys.values())) == 2 and all(key and len(bytes.fromhex(key)) == 32 for key in keys.values())
    assert all(each.connection.encrypted and each.connection.sealed_secret is None for each in last.volumes)
    assert all(device.connection is None for device in last.block_devices)
    known = await database(cloud).read(stored)
    assert data in known and not any(key in known for key in keys.values() if key)
    shown = await volumes.show(data)
    assert shown["encrypted"] and str(keys[data]) not in str(shown)
    await user.admin.post(f"/servers/{server}/action", {"migrate": None})
    await user.wait_for(server, "VERIFY_RESIZE")
    moved = [order for order in orders if order.kind == "finish_resize"][-1]
    assert {each.volume_id: each.secret for each in moved.volumes} == keys
    await user.post(f"/servers/{server}/action", {"confirmResize": None}, 204)
    await user.wait_for(server, "ACTIVE")
    await user.delete(f"/servers/{server}")
    await volumes.until(data, "available")
    await cloud.assert_clean()


async def test_an_encrypted_volume_is_not_exchanged(user: Caller, volumes: Encrypted) -> None:
    server = (await user.boot())["id"]
    clear, sealed = await volumes.create(), await volumes.create(volume_type=volumes.type_name)
    path = f"/servers/{server}/os-volume_attachments"
    await user.at(100).post(path, attachment(clear), 200)
    await volumes.until(clear, "in-use")
    answer = await user.admin.request("PUT", f"{path}/{clear}", attachment(sealed))
    assert answer.status == 501 and b"encrypted" in answer.body
    assert (await volumes.show(sealed))["status"] == "available"
    await user.delete(f"/servers/{server}")


async def refused(user: Caller, volumes: Encrypted, status: int, text: str) -> None:
    """Attach an encrypted volume, which fails; server and volume are as before."""
    server, data = (await user.boot())["id"], await volumes.create(volume_type=volumes.type_name)
    path = f"/servers/{server}/os-volume_attachments"
    assert text in await user.at(100).refused(status, "POST", path, attachment(data))
    assert (await user.get(path))["volumeAttachments"] == []
    await volumes.until(data, "available")
    await user.delete(f"/servers/{server}")


async def test_a_host_of_an_older_version_gets_no_encrypted_volume(
    user: Caller, volumes: Encrypted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would give the guest the encrypted data. Its reports lack the capability."""
    monkeypatch.setattr(nodes, "DECRYPTS_VOLUMES", "what such a host does not report")
    await refused(user, volumes, 500, "older version")


async def test_a_server_with_encrypted_volumes_is_built_on_a_newer_host(
    cloud: Cloud, user: Caller, volumes: Encrypted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During an upgrade some hosts are older, which the scheduler does not know; the build does not end in ERROR."""
    older = cloud.hosts[0]
    [manager] = [role for role in cloud.process.started if isinstance(role, ComputeManager)]
    capabilities = manager._agents[older].host._capabilities

    async def reports(value: str) -> None:
        monkeypatch.setitem(capabilities, DECRYPTS_VOLUMES, value)
        await user.admin.boot(availability_zone=f"nova:{older}")  # the host describes itself when its work changes

        async def known() -> bool | None:
            return True if await database(cloud).read(nodes.host_decrypts, older) == (value == "true") else None

        await cloud.until(known, "the host to be described")

    await reports("false")
    for _ in range(3):
        boots = await volumes.create(volume_type=volumes.type_name)
        await volumes.request("POST", f"/volumes/{boots}/action", {"os-set_bootable": {"bootable": True}})
        root = {"uuid": boots, "source_type": "volume", "destination_type": "volume", "boot_index": 0}
        server = (await user.boot(imageRef=None, block_device_mapping_v2=[root]))["id"]
        assert await user.host_of(server) != older
        payload = BuildPayload.decode(await database(cloud).read(_payload_of_build, server))
        assert payload.unpreferred == [], "each operation has the names of all older hosts"
    await reports("true")
    await cloud.delete_all()
    await cloud.assert_clean()


def _payload_of_build(conn: sa.Connection, server: str) -> bytes:
    of_server = sa.select(operations.c.payload).where(
        operations.c.instance_uuid == server, operations.c.kind == "build"
    )
    return bytes(conn.execute(of_server).scalar_one())


async def test_a_volume_service_that_keeps_its_keys_elsewhere(
    user: Caller, volumes: Encrypted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Cinder with Barbican does not know our route."""
    send = VolumeClient._send

    async def lacking(self: VolumeClient, method: str, path: str, *given: Any, **more: Any) -> Any:
        if path.endswith("/encryption_key"):
            raise NotFound("The resource could not be found.")
        return await send(self, method, path, *given, **more)

    monkeypatch.setattr(VolumeClient, "_send", lacking)
    await refused(user, volumes, 501, "elsewhere")
