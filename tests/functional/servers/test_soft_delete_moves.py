"""Servers that are soft-deleted while they move or are shelved: they stay on one host, and can be restored there."""

from typing import Any

import pytest

from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import image, network, ok, ports_of
from tests.functional.servers.test_server_images import image_gone
from tests.functional.servers.test_shelve import images_of

CLOUD = CloudOptions(
    hosts=3,
    roles=("network", "image"),
    settings={"default": {"reclaim_instance_interval": 3600.0, "report_interval": 0.1, "shelved_offload_time": -1}},
)
pytestmark = only_in_one_process("has settings of its own, and the network service in the same process")


@pytest.mark.parametrize("call", ["export_disks", "import_guest", None])
async def test_a_server_that_moves_is_restored_on_one_host(cloud: Cloud, user: Caller, call: str | None) -> None:
    net, name = await network(user), f"kept-{call}"
    fields: dict[str, Any] = {"imageRef": await image(user), "networks": [{"uuid": net["id"]}]}
    id = (await user.boot(name=name, flavorRef="2", **fields))["id"]
    source = await user.host_of(id)
    rules = [] if call is None else [{"operation": call, "kind": "hang", "name": name, "count": 1}]
    async with cloud.faults(*rules):
        await user.act(id, "resize", {"flavorRef": "3"})
        if call is None:
            await user.wait_for(id, "VERIFY_RESIZE")
        else:
            await cloud.fault_struck()
        await user.delete(f"/servers/{id}")
        await user.wait_for(id, "SOFT_DELETED")
        await cloud.settled()
    host = await user.host_of(id)
    assert (host == source) is (call is not None)
    [migration] = (await user.admin.get(f"/os-migrations?instance_uuid={id}"))["migrations"]
    assert migration["status"] == ("confirmed" if call is None else "failed")

    async def alone() -> bool | None:
        found = [each for each in cloud.hosts if id in await cloud.guests(each)]
        return True if found == [host] else None

    await cloud.until(alone, "the other host to remove its guest")
    assert {port["binding:host_id"] for port in await ports_of(user, id)} == {host}
    await cloud.assert_clean()
    await user.act(id, "restore")
    shown = await user.wait_for(id, "ACTIVE")
    assert shown["flavor"]["original_name"] == ("m1.medium" if call is None else "m1.small")
    await cloud.assert_clean()
    await user.act(id, "forceDelete")
    await user.gone(id)


async def test_the_image_of_a_shelved_server_is_kept_until_it_is_needless(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot(imageRef=await image(user)))["id"]
    for ends in ("restore", "forceDelete"):
        await user.act(id, "shelve")
        await user.wait_for(id, "SHELVED")
        [made] = await images_of(user, id)
        await user.delete(f"/servers/{id}")
        await user.wait_for(id, "SOFT_DELETED")
        assert (await ok(user, "GET", f"/image/v2/images/{made['id']}"))["status"] == "active"
        await user.act(id, ends)
        if ends == "restore":
            await user.wait_for(id, "ACTIVE")
        else:
            await user.gone(id)
        await image_gone(user, made["id"])
        await cloud.assert_clean()
