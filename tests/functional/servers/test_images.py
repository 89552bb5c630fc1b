"""Servers and the images that they boot from: an image that does not fit is refused."""

from typing import Any

import msgspec
import pytest

from micronova.clients.image.client import ImageClient
from micronova.objects.image import ImageMeta
from micronova.virt.driver import GuestPlan
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import call, image, ok
from tests.functional.servers.spawning import spawned  # noqa: F401

CLOUD = CloudOptions(hosts=2, roles=("image",))
Plans = dict[str, list[tuple[str, GuestPlan]]]


async def _flavor(user: Caller, **fields: Any) -> str:
    wanted = {"name": user.project, "ram": 64, "vcpus": 1, "disk": 1, **fields}
    return str((await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"])


@pytest.mark.parametrize(
    ("of_image", "of_flavor", "words"),
    [
        ({"min_disk": 2}, {"disk": 1}, "disk would be too small"),
        ({"min_ram": 128}, {"ram": 64}, "memory is too small"),
    ],
)
async def test_what_the_image_needs(
    user: Caller, of_image: dict[str, Any], of_flavor: dict[str, int], words: str
) -> None:
    small, picture = await _flavor(user, **of_flavor), await image(user, **of_image)
    assert words in await user.refused(400, "POST", "/servers", user.body(imageRef=picture, flavorRef=small))
    fits = await user.boot(imageRef=picture, flavorRef="2")
    assert fits["image"]["id"] == picture


@pytest.mark.parametrize(
    ("of_image", "asked", "shown"),
    [
        (None, None, "MANUAL"),
        ("True", None, "AUTO"),
        ("True", "MANUAL", "MANUAL"),
        ("False", None, "MANUAL"),
        ("False", "AUTO", "AUTO"),
        ("disabled", None, "MANUAL"),
        ("disabled", "AUTO", None),
    ],
)
async def test_the_image_says_whether_its_disk_is_resized(
    user: Caller, of_image: str | None, asked: str | None, shown: str | None
) -> None:
    properties: dict[str, Any] = {} if of_image is None else {"auto_disk_config": of_image}
    fields: dict[str, Any] = {} if asked is None else {"OS-DCF:diskConfig": asked}
    body = user.body(imageRef=await image(user, **properties), **fields)
    if shown is None:
        assert "automatic disk resize disabled" in await user.refused(400, "POST", "/servers", body)
        return
    created = (await user.post("/servers", body))["server"]
    assert created["OS-DCF:diskConfig"] == shown
    assert (await user.wait_for(created["id"], "ACTIVE"))["OS-DCF:diskConfig"] == shown


async def test_an_image_may_need_a_config_drive(user: Caller) -> None:
    server = await user.boot(imageRef=await image(user, img_config_drive="mandatory"))
    assert server["config_drive"] == "True"
    listed = (await user.get("/servers?config_drive=true"))["servers"]
    assert [one["id"] for one in listed] == [server["id"]]


async def test_images_that_cannot_be_used(cloud: Cloud, user: Caller) -> None:
    queued = await image(user, upload=False)
    assert "is not active" in await user.refused(400, "POST", "/servers", user.body(imageRef=queued))
    off = await image(user)
    answer = await call(user.admin, "POST", f"/image/v2/images/{off}/actions/deactivate")
    assert answer.status == 204
    assert off in await user.refused(400, "POST", "/servers", user.body(imageRef=off))
    foreign = await image(cloud.caller(), visibility="private")
    assert foreign in await user.refused(400, "POST", "/servers", user.body(imageRef=foreign))
    unknown = "99999999-9999-4999-8999-999999999999"
    message = await user.refused(400, "POST", "/servers", user.body(imageRef=unknown))
    assert "imageRef" in message and unknown in message


async def test_shared_and_public_images(cloud: Cloud, user: Caller) -> None:
    owner = cloud.caller()
    shared = await image(owner, visibility="shared")
    await user.refused(400, "POST", "/servers", user.body(imageRef=shared))
    await ok(owner, "POST", f"/image/v2/images/{shared}/members", {"member": user.project})
    await user.boot(imageRef=shared)
    public = await image(owner.admin, visibility="public")
    await user.boot(imageRef=public)


async def test_properties_are_remembered(user: Caller) -> None:
    properties: dict[str, Any] = {"os_distro": "debian", "hw_disk_bus": "virtio"}
    picture = await image(user, **properties)
    server = await user.boot(imageRef=picture)
    await ok(user, "DELETE", f"/image/v2/images/{picture}")
    shown = await user.admin.show(server["id"])
    assert shown["image"]["id"] == picture
    assert shown["image"]["properties"].items() >= {"os_distro": "debian", "hw_disk_bus": "virtio"}.items()
    assert (shown["OS-EXT-SRV-ATTR:kernel_id"], shown["OS-EXT-SRV-ATTR:ramdisk_id"]) == ("", "")
    assert "properties" not in (await user.at(97).show(server["id"]))["image"]


async def test_the_host_learns_the_properties(user: Caller, spawned: Plans) -> None:
    properties: dict[str, Any] = {"os_distro": "debian"}
    server = await user.boot(imageRef=await image(user, **properties))
    [(_, plan)] = spawned[server["id"]]
    assert plan.instance.image is not None
    assert plan.instance.image.properties["os_distro"] == "debian"
    assert plan.instance.image.size == 1024


async def test_the_host_gets_a_ticket_for_this_image_alone(cloud: Cloud, user: Caller, spawned: Plans) -> None:
    picture, other = await image(user), await image(user)
    server = await user.boot(imageRef=picture)
    [(_, plan)] = spawned[server["id"]]
    assert plan.image_url is not None
    path = "/image" + plan.image_url.partition("/image")[2]
    answer = await cloud.transport.request("GET", path, {}, None)
    assert (answer.status, len(answer.body)) == (200, 1024)
    stolen = await cloud.transport.request("GET", path.replace(picture, other), {}, None)
    assert stolen.status in (401, 403, 404)


@only_in_one_process("changes what the client of the image service returns")
async def test_an_image_that_is_larger_than_the_disk(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image only claims to be a gigabyte large, so that nothing is uploaded."""
    picture = await image(user)
    get = ImageClient.get

    async def larger(client: ImageClient, image_id: str, token: str | None = None) -> ImageMeta:
        return msgspec.structs.replace(await get(client, image_id, token), size=(1 << 30) + 1)

    monkeypatch.setattr(ImageClient, "get", larger)
    message = await user.refused(400, "POST", "/servers", user.body(imageRef=picture))
    assert "disk is too small" in message
    await user.boot(imageRef=picture, flavorRef="2")
