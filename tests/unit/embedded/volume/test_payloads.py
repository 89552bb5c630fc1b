"""The payloads of operations in the form that rows of every version have."""

from typing import Any

import msgspec
import pytest

from micronova.embedded.volume.model import Operation
from micronova.embedded.volume.operations import payloads
from micronova.embedded.volume.operations.payloads import Payload

STORED: list[tuple[type[Payload], dict[str, Any]]] = [
    (payloads.CreateVolumePayload, {}),
    (payloads.CreateVolumePayload, {"copy": "snapshots"}),
    (payloads.CreateVolumePayload, {"image_id": "i", "disk_format": "raw"}),
    (payloads.ReimageVolumePayload, {"image_id": "i", "disk_format": "qcow2", "image_metadata": {"a": "b"}}),
    (payloads.ExtendVolumePayload, {"size": 3, "charged": 1}),
    (payloads.UploadVolumePayload, {"image_id": "i", "status": "in-use"}),
    (payloads.CreateBackupPayload, {"copy": "volumes"}),
    (
        payloads.RestoreBackupPayload,
        {"values": {"bootable": False, "image_metadata": {}}, "metadata": {"key": "value"}},
    ),
]


def operation(stored: dict[str, Any]) -> Operation:
    return Operation(
        id="o", kind="x", host="h", resource_id="r", source_id=None, project_id="p", request_id="q", payload=stored,
        cancelled=False, progress=0, attempts=0, not_before=0, created_at=0,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "stored"), STORED)
def test_a_stored_payload_is_read_and_written_alike(kind: type[Payload], stored: dict[str, Any]) -> None:
    assert msgspec.to_builtins(kind.of(operation(stored))) == stored


def test_a_field_that_earlier_versions_wrote_is_ignored() -> None:
    found = payloads.CreateBackupPayload.of(operation({"copy": "volumes", "status": "available"}))
    assert found == payloads.CreateBackupPayload(source_directory="volumes")
