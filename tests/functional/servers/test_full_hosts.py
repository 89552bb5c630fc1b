"""Hosts whose disks other files have filled: what keeps or shrinks what a server holds is not refused."""

from collections.abc import Callable, Iterator

import pytest
import pytest_asyncio

from micronova.compute.resource_tracker import ResourceTracker
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import image

pytestmark = only_in_one_process("fills the hosts of the cloud's process")
CLOUD = CloudOptions(hosts=2, roles=("image",), settings={"default": {"allow_resize_to_same_host": True}})


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Fill the disks of all hosts beyond their limit."""
    used = ResourceTracker.used

    def full(tracker: ResourceTracker) -> dict[str, int]:
        return {**used(tracker), "DISK_GB": 10**6}

    yield lambda: monkeypatch.setattr(ResourceTracker, "used", full)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def one_host(cloud: Cloud) -> None:
    """Resizes stay on their host, which is the only one that is enabled."""
    admin = cloud.caller().admin
    [service] = (await admin.get(f"/os-services?binary=nova-compute&host={cloud.hosts[1]}"))["services"]
    await admin.put(f"/os-services/{service['id']}", {"status": "disabled"})


async def test_a_rebuild(cloud: Cloud, user: Caller, fill: Callable[[], None]) -> None:
    first, second = await image(user), await image(user, size=2048)
    id = (await user.boot(imageRef=first))["id"]
    fill()
    await user.act(id, "rebuild", {"imageRef": second})
    assert (await user.wait_for(id, "ACTIVE"))["image"]["id"] == second
    await cloud.assert_clean()


async def test_a_revert(cloud: Cloud, user: Caller, fill: Callable[[], None]) -> None:
    id = (await user.boot(imageRef=await image(user)))["id"]
    await user.act(id, "resize", {"flavorRef": "2"})
    await user.wait_for(id, "VERIFY_RESIZE")
    fill()
    await user.act(id, "revertResize")
    assert (await user.wait_for(id, "ACTIVE"))["flavor"]["original_name"] == "m1.tiny"
    await cloud.assert_clean()


async def test_a_resize_that_is_undone(cloud: Cloud, user: Caller, fill: Callable[[], None]) -> None:
    id = (await user.boot(imageRef=await image(user), name="undone"))["id"]
    async with cloud.faults({"operation": "resize", "kind": "fail", "name": "undone"}):
        await user.act(id, "resize", {"flavorRef": "2"})
        await cloud.fault_struck()
        fill()
        assert (await user.wait_for(id, "ACTIVE"))["flavor"]["original_name"] == "m1.tiny"
    await cloud.assert_clean()
