"""Volumes that take long to be made: servers that wait for them keep a conductor from nothing else."""

import asyncio
from typing import Any

import pytest

from micronova.embedded.volume.operations.volume_work import CreateVolume
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.gates import Gate

pytestmark = only_in_one_process("has one place for operations, and a volume service")

CLOUD = CloudOptions(hosts=2, roles=("volume",), settings={"conductor": {"concurrency": 1}})


async def test_other_work_goes_on(cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    other = (await user.boot(networks="none"))["id"]
    gate = Gate()
    monkeypatch.setattr(CreateVolume, "run", gate.before(CreateVolume.run))
    blank = {"boot_index": 0, "source_type": "blank", "destination_type": "volume", "volume_size": 1}
    wanted: dict[str, Any] = {"imageRef": None, "block_device_mapping_v2": [{**blank, "delete_on_termination": True}]}
    server = await user.create(**wanted)
    await asyncio.wait_for(gate.reached.wait(), 30)
    await user.act(other, "os-stop")
    await user.wait_for(other, "SHUTOFF")
    assert (await user.show(server))["status"] == "BUILD"
    gate.open.set()
    await user.wait_for(server, "ACTIVE")
    for each in (server, other):
        await user.delete(f"/servers/{each}")
        await user.gone(each)
    await cloud.settled()
    await cloud.assert_clean()
