"""Servers with much data: no order is larger than a host can get, and every server can be deleted."""

from typing import Any

import msgspec
import pytest

from micronova.clients.image.client import ImageClient
from micronova.conductor.operations import orders
from micronova.objects.image import MOST_PROPERTY_BYTES, ImageMeta
from micronova.virt.driver import GuestPlan
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import call, image
from tests.functional.servers.spawning import spawned  # noqa: F401

Plans = dict[str, list[tuple[str, GuestPlan]]]
pytestmark = only_in_one_process("changes limits and images within the process")
CLOUD = CloudOptions(hosts=2, roles=("image",))
PATCH = {"content-type": "application/openstack-images-v2.1-json-patch"}
LARGE = "A" * 40_000


async def test_an_image_with_much_metadata_cannot_be_made(user: Caller) -> None:
    picture = await image(user)
    value = "\U0001f600" * 16_000
    first = [{"op": "add", "path": "/p1", "value": value}]
    assert (await call(user, "PATCH", f"/image/v2/images/{picture}", first, PATCH)).status == 200
    second = [{"op": "add", "path": "/p2", "value": value}]
    answer = await call(user, "PATCH", f"/image/v2/images/{picture}", second, PATCH)
    assert answer.status == 413 and b"may have 65536 bytes, not 128004" in answer.body
    await user.boot(imageRef=picture)


async def test_a_server_keeps_the_begin_of_long_properties(user: Caller, spawned: Plans) -> None:
    picture = await image(user, zork="z" * 300)
    server = await user.boot(imageRef=picture)
    [(_, plan)] = spawned[server["id"]]
    assert plan.instance.image is not None
    assert plan.instance.image.properties["zork"] == "z" * 255


async def test_an_image_with_too_much_metadata_is_refused(user: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image service of other makers may allow any number of properties."""
    picture = await image(user)
    get = ImageClient.get

    async def larger(client: ImageClient, image_id: str, token: str | None = None) -> ImageMeta:
        properties: dict[str, Any] = {f"p{number:03}": "z" * 252 for number in range(MOST_PROPERTY_BYTES // 256 + 1)}
        return msgspec.structs.replace(await get(client, image_id, token), properties=properties)

    monkeypatch.setattr(ImageClient, "get", larger)
    message = await user.refused(400, "POST", "/servers", user.body(imageRef=picture))
    assert "a server keeps at most 65536" in message


async def test_a_build_whose_order_is_too_large_fails_with_the_reason(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "LARGEST_ORDER", 20_000)
    picture = await image(user)
    id = await user.create(imageRef=picture, user_data=LARGE)
    failed = await user.wait_for(id, "ERROR")
    assert "too much data for an order" in failed["fault"]["message"]
    await user.boot(imageRef=picture)
    await user.delete(f"/servers/{id}")
    await user.gone(id)


async def test_a_server_that_has_become_too_large_can_be_deleted(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await user.boot(imageRef=await image(user), user_data=LARGE)
    monkeypatch.setattr(orders, "LARGEST_ORDER", 20_000)
    await user.act(server["id"], "reboot", {"type": "SOFT"})
    shown = await user.wait_for(server["id"], "ERROR", "ACTIVE")
    assert shown["OS-EXT-STS:task_state"] is None
    actions = await user.get(f"/servers/{server['id']}/os-instance-actions")
    assert actions["instanceActions"][0]["message"] == "Error"
    await user.delete(f"/servers/{server['id']}")
    await user.gone(server["id"])
