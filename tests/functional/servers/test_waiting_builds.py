"""Builds that wait for their volumes: they take no places of a conductor, whoever has begun how many of them."""

import asyncio

import pytest

from micronova.embedded.volume.backend.files import Files
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process

CLOUD = CloudOptions(hosts=2, roles=("volume",), settings={"conductor": {"concurrency": 2}})
pytestmark = [pytest.mark.asyncio(loop_scope="module"), only_in_one_process("it holds the work of the volume service")]
WAITING = 5


async def test_others_are_served_while_builds_wait_for_volumes(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume of a large image takes minutes, and one project may ask for more of them than a conductor has places."""
    other = cloud.caller()
    bystander = (await other.boot())["id"]
    may_end = asyncio.Event()
    original = Files.create_blank

    async def held(*arguments: object) -> None:
        await may_end.wait()
        await original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Files, "create_blank", held)
    root = {"boot_index": 0, "source_type": "blank", "destination_type": "volume", "volume_size": 1}
    root["delete_on_termination"] = True
    waiting = [await user.create(imageRef=None, block_device_mapping_v2=[root]) for _ in range(WAITING)]
    try:
        await other.act(bystander, "os-stop")
        await other.wait_for(bystander, "SHUTOFF")
        for id in waiting:
            assert (await user.show(id))["status"] == "BUILD"
    finally:
        may_end.set()
    for id in waiting:
        await user.wait_for(id, "ACTIVE")
    await cloud.delete_all()
    await cloud.assert_clean()
