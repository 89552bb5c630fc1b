"""Images that name a kernel and a ramdisk: the guest is booted by them, wherever the disk is made of its image."""

import uuid
from typing import Any

import pytest

from micronova.virt.driver import GuestPlan
from micronova.virt.fake.driver import FakeDriver
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import image

pytestmark = only_in_one_process("reads the plans of guests in the process of their hosts")
CLOUD = CloudOptions(
    hosts=2,
    roles=("image",),
    settings={"default": {"report_interval": 0.1}, "glance": {"max_kernel_images_mb": 2}},
)
PARTS = ("kernel", "ramdisk")
KINDS: dict[str, dict[str, Any]] = {
    "kernel": {"disk_format": "aki", "container_format": "aki"},
    "ramdisk": {"disk_format": "ari", "container_format": "ari"},
}
DISK: dict[str, Any] = {"disk_format": "ami", "container_format": "ami"}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[GuestPlan]:
    """The plans with which hosts make guests or boot them from other images."""
    seen: list[GuestPlan] = []

    def watched(name: str) -> Any:
        method = getattr(FakeDriver, name)

        async def call(self: FakeDriver, plan: GuestPlan, *args: Any, **more: Any) -> Any:
            seen.append(plan)
            return await method(self, plan, *args, **more)

        return call

    for name in ("spawn", "rebuild", "rescue"):
        monkeypatch.setattr(FakeDriver, name, watched(name))
    return seen


async def _parts(user: Caller, name: str = "") -> dict[str, Any]:
    """Make a kernel and a ramdisk; return the properties by which an image names them."""
    return {f"{part}_id": await image(user, 512, name=f"{part}{name}", **KINDS[part]) for part in PARTS}


async def _booted_by(user: Caller, id: str) -> list[str]:
    output = (await user.act(id, "os-getConsoleOutput", {}, 200))["output"]
    return [line.rpartition(" ")[2] for line in output.splitlines() if "Booted by kernel" in line]


async def _check(cloud: Cloud, plan: GuestPlan, parts: dict[str, Any], *, rescue: bool = False) -> None:
    """Assert that a host was told to boot by these, and can download them."""
    used = plan.rescue_image if rescue else plan.instance.image
    assert used is not None and used.kernel is not None and used.ramdisk is not None
    assert (used.kernel.id, used.ramdisk.id) == (parts["kernel_id"], parts["ramdisk_id"])
    assert (used.kernel.size, used.kernel.disk_format, used.ramdisk.disk_format) == (512, "aki", "ari")
    assert used.kernel.os_hash_value is not None
    for url in (plan.image_url, plan.kernel_url, plan.ramdisk_url):
        assert url is not None
        answer = await cloud.transport.request("GET", "/image" + url.partition("/image")[2], {}, None)
        assert answer.status == 200


async def test_create_rebuild_and_start(cloud: Cloud, user: Caller, plans: list[GuestPlan]) -> None:
    first, second = await _parts(user, "-1"), await _parts(user, "-2")
    id = (await user.boot(imageRef=await image(user, **DISK, **first, os_command_line="quiet")))["id"]
    await _check(cloud, plans[-1], first)
    assert await _booted_by(user, id) == ["kernel-1"]
    shown = await user.admin.show(id)
    attributes = [shown[f"OS-EXT-SRV-ATTR:{name}"] for name in first]
    assert attributes == list(first.values())
    await user.act(id, "rebuild", {"imageRef": await image(user, **second)})
    await user.wait_for(id, "ACTIVE")
    await _check(cloud, plans[-1], second)
    await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE")
    assert await _booted_by(user, id) == ["kernel-2", "kernel-2"]
    await user.act(id, "rebuild", {"imageRef": await image(user)})
    await user.wait_for(id, "ACTIVE")
    assert await _booted_by(user, id) == []


async def test_rescue(cloud: Cloud, user: Caller, plans: list[GuestPlan]) -> None:
    """The rescue image has its own kernel, or else that of the server, as in Nova."""
    own, other = await _parts(user, "-own"), await _parts(user, "-other")
    id = (await user.boot(imageRef=await image(user, **own)))["id"]
    for wanted, parts in ((None, own), (await image(user), own), (await image(user, **other), other)):
        await user.act(id, "rescue", None if wanted is None else {"rescue_image_ref": wanted}, 200)
        await user.wait_for(id, "RESCUE")
        await _check(cloud, plans[-1], parts, rescue=True)
        await user.act(id, "unrescue")
        await user.wait_for(id, "ACTIVE")
    assert (await _booted_by(user, id))[-2:] == ["kernel-other", "kernel-own"]


async def test_shelving_and_evacuation(cloud: Cloud, user: Caller, plans: list[GuestPlan]) -> None:
    parts = await _parts(user)
    id = (await user.boot(imageRef=await image(user, **parts)))["id"]
    await user.act(id, "shelve")
    await user.wait_for(id, "SHELVED_OFFLOADED")
    await user.act(id, "unshelve")
    await user.wait_for(id, "ACTIVE")
    await _check(cloud, plans[-1], parts)
    async with cloud.forced_down(await user.host_of(id)):
        await user.admin.at(94).act(id, "evacuate", {}, 200)
        await user.wait_for(id, "ACTIVE")
    await _check(cloud, plans[-1], parts)
    await cloud.assert_clean()


async def test_what_cannot_be_used(cloud: Cloud, user: Caller) -> None:
    parts = await _parts(user)
    server = (await user.boot(imageRef=await image(user)))["id"]
    foreign = await image(cloud.caller(), visibility="private", **KINDS["kernel"])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kernel_id": str(uuid.uuid4())}, "could not be found"),
        ({"kernel_id": foreign}, "could not be found"),
        ({**parts, "ramdisk_id": foreign}, "could not be found"),
        ({"kernel_id": await image(user, upload=False, **KINDS["kernel"])}, "it is queued"),
        ({"kernel_id": parts["ramdisk_id"]}, "has the format ari, and not aki or raw"),
        ({"kernel_id": parts["kernel_id"], "ramdisk_id": parts["kernel_id"]}, "has the format aki, and not ari or raw"),
        ({"ramdisk_id": parts["ramdisk_id"]}, "no kernel_id"),
        ({"os_command_line": "quiet"}, "no kernel_id"),
    ]
    for properties, words in cases:
        wrong = await image(user, **properties)
        assert words in await user.refused(400, "POST", "/servers", user.body(imageRef=wrong)), words
        path = f"/servers/{server}/action"
        assert words in await user.refused(400, "POST", path, {"rebuild": {"imageRef": wrong}}), words
        if "os_command_line" not in properties:
            body = {"rescue": {"rescue_image_ref": wrong}}
            assert words in await user.refused(400, "POST", path, body), words
    for part in parts.values():
        assert "no disk" in await user.refused(400, "POST", "/servers", user.body(imageRef=part))
        body = {"rescue": {"rescue_image_ref": part}}
        assert "no disk" in await user.refused(400, "POST", f"/servers/{server}/action", body)
    small = {"flavor": {"name": user.project, "ram": 1, "vcpus": 1, "disk": 1}}
    flavor = (await user.admin.post("/flavors", small, 200))["flavor"]["id"]
    large = {**parts, "ramdisk_id": await image(user, (1 << 20) - 256, **KINDS["ramdisk"])}
    wanted = user.body(imageRef=await image(user, **large), flavorRef=flavor)
    assert "do not fit into the 1 MB" in await user.refused(400, "POST", "/servers", wanted)
    assert (await user.show(server))["status"] == "ACTIVE"


async def test_hosts_copy_no_more_than_the_setting_allows(cloud: Cloud, user: Caller) -> None:
    """Nobody claims the room for them: a flavor with much memory and a small disk would fill the disk of its host."""
    parts = await _parts(user)
    server = (await user.boot(imageRef=await image(user)))["id"]
    for size, fits in (((2 << 20) - 512, True), (2 << 20, False)):
        large = await image(user, **{**parts, "ramdisk_id": await image(user, size, **KINDS["ramdisk"])})
        if fits:
            await user.boot(imageRef=large)
            continue
        words = "have 2097664 bytes: 2 MB are allowed"
        assert words in await user.refused(400, "POST", "/servers", user.body(imageRef=large))
        path = f"/servers/{server}/action"
        for body in ({"rebuild": {"imageRef": large}}, {"rescue": {"rescue_image_ref": large}}):
            assert words in await user.refused(400, "POST", path, body)


async def test_a_host_that_boots_disks_only(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch, plans: list[GuestPlan]
) -> None:
    able = FakeDriver.capabilities
    monkeypatch.setattr(FakeDriver, "capabilities", lambda driver: able(driver) - {"kernel_boot"})
    id = await user.create(imageRef=await image(user, **await _parts(user)))
    shown = await user.wait_for(id, "ERROR")
    assert "boots disks only" in shown["fault"]["message"]
    assert plans == []
