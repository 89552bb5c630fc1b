"""How a volume service describes a connection."""

from typing import Any

import msgspec
import pytest

from micronova.objects.errors import NotSupported
from micronova.objects.volume import (
    AttachedVolume,
    Connection,
    ISCSIConnection,
    NBDConnection,
    RBDConnection,
    connection_of,
    initiator_of,
)

SOCKET = {"driver_volume_type": "nbd", "export_name": "e", "socket_path": "/s", "access_mode": "ro"}


def test_a_connection_is_flat_or_nested() -> None:
    wanted = NBDConnection(export_name="e", socket_path="/s", access_mode="ro")
    assert connection_of({**SOCKET, "attachment_id": "a"}) == wanted
    data = {key: value for key, value in SOCKET.items() if key != "driver_volume_type"}
    assert connection_of({"driver_volume_type": "nbd", "data": data}) == wanted


def test_volumes_of_a_ceph_cluster() -> None:
    """As Cinder's RBD driver describes them."""
    info = {
        "driver_volume_type": "rbd", "name": "volumes/volume-1", "hosts": ["10.0.0.1"], "ports": ["6789"],
        "cluster_name": "ceph", "auth_enabled": True, "auth_username": "cinder", "secret_type": "ceph",
        "secret_uuid": "s", "volume_id": "v", "discard": True, "keyring": None, "qos_specs": None,
        "access_mode": "rw", "encrypted": False, "cacheable": False, "attachment_id": "a",
    }  # fmt: skip
    assert connection_of(info) == RBDConnection(
        name="volumes/volume-1",
        hosts=("10.0.0.1",),
        ports=("6789",),
        auth_enabled=True,
        auth_username="cinder",
        secret_uuid="s",
        discard=True,
    )


def test_volumes_of_an_iscsi_target() -> None:
    """As Cinder's LVM driver describes them."""
    info = {
        "driver_volume_type": "iscsi", "target_discovered": False, "target_iqn": "iqn.t", "target_lun": 1,
        "target_portal": "10.0.0.1:3260", "volume_id": "v", "auth_method": "CHAP", "auth_username": "u",
        "auth_password": "p", "encrypted": False, "qos_specs": None, "access_mode": "ro", "sealed_key": "aGFo",
    }  # fmt: skip
    assert connection_of(info) == ISCSIConnection(
        target_iqn="iqn.t",
        target_portal="10.0.0.1:3260",
        target_lun=1,
        auth_username="u",
        auth_password="p",
        access_mode="ro",
    )


def test_secrets_have_the_stored_names() -> None:
    """Rows and hosts of earlier versions have them: a volume whose key is not found cannot be opened."""
    connection: Connection = NBDConnection(export_name="e", sealed_secret=b"sealed")
    volume = AttachedVolume(
        volume_id="v", attachment_id="a", device_uuid="d", device_name="/dev/vdb", connection=connection, secret="text"
    )
    known = msgspec.to_builtins(volume)
    assert known["passphrase"] == "text" and known["connection"]["sealed_key"] == "c2VhbGVk"
    assert msgspec.convert(known, AttachedVolume) == volume


def test_the_name_of_a_host_at_targets() -> None:
    assert initiator_of("Node_1.example") == "iqn.2010-10.org.openstack:host-node-1.example"


RBD = {"driver_volume_type": "rbd", "name": "p/v"}
ISCSI = {"driver_volume_type": "iscsi", "target_iqn": "t", "target_portal": "h:1"}


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ({}, "connected by 'None'"),
        ({"driver_volume_type": "fibre_channel"}, "fibre_channel"),
        ({"driver_volume_type": "nbd"}, "not understood"),
        ({"driver_volume_type": "nbd", "export_name": "e", "host": "h"}, "without a socket"),
        ({**RBD, "auth_enabled": True, "auth_username": "cinder"}, "rbd_secret_uuid"),
        ({**RBD, "hosts": ["m"]}, "another number"),
        ({**ISCSI, "target_portal": "h"}, "host and the port"),
        ({**ISCSI, "auth_username": "u"}, "only one"),
    ],
)
def test_other_connections_are_refused(info: dict[str, Any], text: str) -> None:
    with pytest.raises(NotSupported, match=text):
        connection_of(info)
