"""Volumes of another volume service, to which QEMU itself connects: by iSCSI, or in a Ceph cluster."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from micronova.clients.volume.client import VolumeClient
from micronova.objects.orders import WorkOrder
from micronova.objects.volume import ISCSIConnection, RBDConnection, initiator_of
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.test_encrypted_volumes import database, orders, stored  # noqa: F401
from tests.functional.servers.test_volumes import Volumes, attachment

CLOUD = CloudOptions(roles=("volume",), hosts=2)
pytestmark = only_in_one_process("the cluster of the tests has no volume service")
PASSWORD = "a-password-of-a-target"
ISCSI = {
    "driver_volume_type": "iscsi", "target_discovered": False, "target_iqn": "iqn.2010-10.org.openstack:volume-1",
    "target_lun": 1, "target_portal": "10.0.0.1:3260", "auth_method": "CHAP", "auth_username": "user-1",
    "auth_password": PASSWORD, "encrypted": False, "qos_specs": None, "access_mode": "rw",
}  # fmt: skip
RBD = {
    "driver_volume_type": "rbd", "name": "volumes/volume-1", "hosts": ["10.0.0.1"], "ports": ["6789"],
    "auth_enabled": True, "auth_username": "cinder", "secret_uuid": "9a0b8f3c", "access_mode": "rw",
}  # fmt: skip


@pytest_asyncio.fixture(loop_scope="module")
async def volumes(user: Caller) -> AsyncIterator[Volumes]:
    yield Volumes(user)


Describe = Callable[[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Describe:
    """Let the volume service describe connections as Cinder does with other storage; return the connectors it got."""
    connectors: list[dict[str, Any]] = []

    def describe(info: dict[str, Any]) -> list[dict[str, Any]]:
        send = VolumeClient._send

        async def other(self: VolumeClient, method: str, path: str, body: Any = None, **more: Any) -> Any:
            answer = await send(self, method, path, body, **more)
            if method == "PUT" and path.startswith("/attachments/"):
                connectors.append(body["attachment"]["connector"])
                answer["attachment"]["connection_info"] = info
            return answer

        monkeypatch.setattr(VolumeClient, "_send", other)
        return connectors

    return describe


async def _attached(user: Caller, volumes: Volumes) -> tuple[str, str]:
    server, held = (await user.boot())["id"], await volumes.create()
    await user.at(100).post(f"/servers/{server}/os-volume_attachments", attachment(held), 200)
    await volumes.until(held, "in-use")
    return server, held


async def test_a_volume_of_an_iscsi_target(
    cloud: Cloud,
    user: Caller,
    volumes: Volumes,
    described: Describe,
    orders: list[WorkOrder],
) -> None:
    """The host logs in by its own name. The database has the password sealed, and orders have it."""
    connectors = described(ISCSI)
    server, held = await _attached(user, volumes)
    host = await user.host_of(server)
    assert [each["initiator"] for each in connectors] == [initiator_of(str(host))]
    await user.post(f"/servers/{server}/action", {"reboot": {"type": "HARD"}})
    await user.wait_for(server, "ACTIVE")
    for kind in ("attach_volume", "reboot"):
        [sent] = next(order for order in orders if order.kind == kind).volumes
        assert sent.secret == PASSWORD
        assert sent.connection == ISCSIConnection(
            target_iqn=str(ISCSI["target_iqn"]),
            target_portal="10.0.0.1:3260",
            target_lun=1,
            auth_username="user-1",
            initiator=initiator_of(str(host)),
        )
    known = await database(cloud).read(stored)
    assert held in known and "user-1" in known and PASSWORD not in known
    await user.delete(f"/servers/{server}/os-volume_attachments/{held}", 202)
    await volumes.until(held, "available")
    await cloud.assert_clean()


async def test_a_volume_of_a_ceph_cluster(
    cloud: Cloud,
    user: Caller,
    volumes: Volumes,
    described: Describe,
    orders: list[WorkOrder],
) -> None:
    described(RBD)
    server, held = await _attached(user, volumes)
    [sent] = next(order for order in orders if order.kind == "attach_volume").volumes
    assert sent.connection == RBDConnection(
        name="volumes/volume-1",
        hosts=("10.0.0.1",),
        ports=("6789",),
        auth_enabled=True,
        auth_username="cinder",
        secret_uuid="9a0b8f3c",
    )
    await user.delete(f"/servers/{server}/os-volume_attachments/{held}", 202)
    await volumes.until(held, "available")
    await cloud.assert_clean()


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ({**RBD, "secret_uuid": None}, "rbd_secret_uuid"),
        ({"driver_volume_type": "fibre_channel"}, "fibre_channel"),
    ],
)
async def test_what_hosts_cannot_reach(
    user: Caller, volumes: Volumes, described: Describe, info: dict[str, Any], text: str
) -> None:
    described(info)
    server, held = (await user.boot())["id"], await volumes.create()
    path = f"/servers/{server}/os-volume_attachments"
    answer = await user.at(100).request("POST", path, attachment(held))
    assert answer.status >= 400 and text in str(answer.body), answer
    await volumes.until(held, "available")
    assert (await user.get(path))["volumeAttachments"] == []
