"""Attachments in which users write the ids of servers that are not theirs: compute leaves them alone."""

from typing import Any

import pytest

from micronova.clients.volume.client import VolumeClient
from micronova.objects.errors import Unavailable
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.test_volumes import Volumes, attachment

MOST = 2
CLOUD = CloudOptions(roles=("volume",), settings={"api": {"max_limit": MOST}})
pytestmark = only_in_one_process("the cluster of the tests has no volume service")


async def _name_server(stranger: Caller, server: str) -> set[str]:
    """Fill a page of attachments with a stranger's that name a server; return their ids."""
    volumes = Volumes(stranger)
    for _ in range(MOST):
        await _reserve(volumes, await volumes.create(), server)
    return {each["id"] for each in await volumes.attachments()}


async def _reserve(volumes: Volumes, volume: str, server: str) -> None:
    await volumes.request("POST", "/attachments", {"attachment": {"volume_uuid": volume, "instance_uuid": server}})


async def test_they_outlive_an_attach_that_is_tried_again(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, stranger, volumes = (await user.boot())["id"], cloud.caller(), Volumes(user)
    foreign, volume = await _name_server(stranger, server), await volumes.create()
    connect, refused = VolumeClient.connect, 0

    async def away(self: VolumeClient, *arguments: Any) -> Any:
        nonlocal refused
        refused += 1
        if refused == 1:
            raise Unavailable("The volume service does not answer.")
        return await connect(self, *arguments)

    monkeypatch.setattr(VolumeClient, "connect", away)
    await user.at(100).post(f"/servers/{server}/os-volume_attachments", attachment(volume), 200)
    assert refused == 2
    assert {each["id"] for each in await Volumes(stranger).attachments()} == foreign


async def test_they_do_not_hide_those_of_a_server_that_is_deleted(cloud: Cloud, user: Caller) -> None:
    server, volumes = (await user.boot())["id"], Volumes(user)
    held, left = await volumes.create(), await volumes.create()
    await user.at(100).post(f"/servers/{server}/os-volume_attachments", attachment(held), 200)
    await _reserve(volumes, left, server)  # as a conductor does that dies before it records that
    await _name_server(cloud.caller(), server)
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    for volume in (held, left):
        await volumes.until(volume, "available")
