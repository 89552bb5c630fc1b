"""The disks of a server that gets another flavor."""

from typing import Any

from micronova.objects.block_device import BlockDevice, resized
from micronova.objects.flavor import Flavor

UUID = "6b0c7f5e-9a63-4a0b-8f3c-5a7d0e1c2b3a"
ROOT = BlockDevice(uuid="root", image_id="i")


def _flavor(ephemeral: int = 0, swap: int = 0) -> Flavor:
    return Flavor(id="f", name="f", ram=1, vcpus=1, disk=1, ephemeral=ephemeral, swap=swap)


def _blank(uuid: str, size: int, **more: Any) -> BlockDevice:
    return BlockDevice(uuid=uuid, source_type="blank", boot_index=-1, size_gb=size, **more)


def test_swap_and_ephemeral_disks_follow_the_flavor() -> None:
    disks = (ROOT, _blank("e", 5), _blank("s", 1, guest_format="swap"))
    old, new = _flavor(ephemeral=5, swap=1024), _flavor(ephemeral=8, swap=2000)
    larger = resized(disks, UUID, old, new)
    assert [(disk.uuid, disk.size_gb) for disk in larger] == [("root", None), ("e", 8), ("s", 2)]
    assert resized(larger, UUID, new, old) == disks


def test_disks_come_and_go_with_the_flavor() -> None:
    none, both = _flavor(), _flavor(ephemeral=3, swap=512)
    more = resized((ROOT,), UUID, none, both)
    assert [(disk.guest_format, disk.size_gb, disk.boot_index) for disk in more[1:]] == [("swap", 1, -1), (None, 3, -1)]
    assert more == resized((ROOT,), UUID, none, both), "an order that is made again has the same disks"
    assert len({disk.uuid for disk in more}) == 3
    assert resized(more, UUID, both, none) == (ROOT,)


def test_disks_that_the_user_has_chosen_stay() -> None:
    disks = (ROOT, _blank("one", 2), _blank("two", 3))
    assert resized(disks, UUID, _flavor(ephemeral=5), _flavor(ephemeral=9)) == disks
